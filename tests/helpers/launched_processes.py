"""Runs a function in several processes that find each other as torchrun's do, and brings back what each returned."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

_SECONDS = 90.0


class ProcessFailed(Exception):
    """A process raised; the message is its traceback."""


def in_processes(count: int, function: Callable[..., Any], *arguments: Any) -> list:
    """What the function returned in each process, or the traceback of what it raised; None of one that ended otherwise.

    Processes are forked: importing everything anew would take longer than the tests.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    processes, ends = [], []
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
        return _collect(ends)
    finally:  # also where one did not end: the others would wait for it, busily, until the tests are over
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()


def results_of(count: int, function: Callable[..., Any], *arguments: Any) -> list:
    """The same; raises ProcessFailed with the first traceback, if any process failed."""
    found = in_processes(count, function, *arguments)
    for one in found:
        if isinstance(one, ProcessFailed):
            raise one
    assert None not in found
    return found


def _collect(ends: Sequence[Connection]) -> list:
    found: dict[int, Any] = {}
    waiting = {end: number for number, end in enumerate(ends)}
    while waiting:
        ready = wait([*waiting], timeout=_SECONDS)
        if not ready:
            raise ProcessFailed(f"processes {[*waiting.values()]} did not end")
        for end in ready:
            assert isinstance(end, Connection)
            number = waiting.pop(end)
            try:
                found[number] = end.recv()
            except EOFError:
                found[number] = None
    return [found[number] for number in range(len(ends))]


def _run(end: Connection, variables: dict[str, str], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update(variables)
    torch.set_num_threads(1)
    try:
        end.send(function(*arguments))
    except BaseException as error:
        end.send(ProcessFailed(f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    os._exit(0)  # nothing of the parent's is torn down here
