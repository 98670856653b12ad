"""Runs a function in several processes that find each other as torchrun's do, and brings back what each returned."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

_SECONDS = 90.0


class ProcessFailed(Exception):
    """A process raised; the message is its traceback."""


def results_of(count: int, function: Callable[..., Any], *arguments: Any) -> list:
    """What the function returned in each process. Raises ProcessFailed with the traceback of the first that fails.

    Processes are forked: importing everything anew would take longer than the tests.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    processes, ends, found = [], list[Any](), dict[Any, Any]()
    for number in range(count):
        mine, theirs = context.Pipe(duplex=False)
        variables = {
            "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }  # fmt: skip
        process = context.Process(target=_run, args=(theirs, variables, function, arguments), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        ends.append(mine)
    try:
        while len(found) < count:
            ready = wait([end for end in ends if end not in found], timeout=_SECONDS)
            assert ready, "a process did not end"
            for end in ready:
                found[end] = end.recv()  # raises EOFError if the process has ended otherwise
                if isinstance(found[end], ProcessFailed):
                    raise found[end]
    finally:  # also where one did not end: the others would wait for it, busily, until the tests are over
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
    return [found[end] for end in ends]


def _run(end: Connection, variables: dict[str, str], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update(variables)
    torch.set_num_threads(1)
    try:
        end.send(function(*arguments))
    except BaseException as error:
        end.send(ProcessFailed(f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    os._exit(0)  # nothing of the parent's is torn down here
