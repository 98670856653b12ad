"""`python -m bench.experiments start-up`: seconds from the start of a process to what a person waits for."""

from __future__ import annotations

import os
import pty
import statistics
import subprocess
import sys
import time
from typing import Annotated

import typer

from selfspec.cli.notes import one_line_errors

_PYTHON = sys.executable
CASES: dict[str, list[str]] = {
    "import torch": [_PYTHON, "-c", "import torch"],
    "import selfspec": [_PYTHON, "-c", "import selfspec"],
    "from selfspec import SelfSpecGenerator": [_PYTHON, "-c", "from selfspec import SelfSpecGenerator"],
    "selfspec --version": [_PYTHON, "-m", "selfspec", "--version"],
    "selfspec --help": [_PYTHON, "-m", "selfspec", "--help"],
    "selfspec get --help": [_PYTHON, "-m", "selfspec", "get", "--help"],
}


def start_up(
    model: Annotated[str | None, typer.Argument(help="Also start a chat with it, to the first prompt.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Starts of each, after one that fills the caches.")] = 7,
) -> None:
    """Median and extremes of several starts, in seconds on the clock and of processors. For a quiet machine."""
    with one_line_errors():
        for name, command in CASES.items():
            _show(name, [_run(command) for _ in range(repeats + 1)][1:])
        if model is not None:
            chat = [_PYTHON, "-m", "selfspec", "chat", model]
            _show(f"selfspec chat {model}, to its prompt", [_to_prompt(chat) for _ in range(repeats + 1)][1:])


def _show(name: str, seconds: list[tuple[float, float]]) -> None:
    clock, processor = ([one[index] for one in seconds] for index in (0, 1))
    typer.echo(
        f"{name:42}{statistics.median(clock):6.2f} s ({min(clock):.2f} to {max(clock):.2f}), "
        f"{statistics.median(processor):.2f} s of processors"
    )


def _run(command: list[str]) -> tuple[float, float]:
    before, start = _children(), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start, _children() - before


def _to_prompt(command: list[str]) -> tuple[float, float]:
    """Start the chat in a terminal of its own and wait for its prompt.

    Processor time includes what goes on in the background once the prompt is there.
    """
    before, start = _children(), time.perf_counter()
    process, terminal = pty.fork()
    if process == 0:
        os.execv(command[0], command)
    seen = b""
    while b"\n> " not in seen.replace(b"\r", b""):
        try:
            seen += os.read(terminal, 1 << 16)
        except OSError:
            raise ValueError(f"the chat ended before its prompt: {seen.decode(errors='replace').strip()}") from None
    seconds = time.perf_counter() - start
    os.write(terminal, b"/exit\n")
    try:
        while os.read(terminal, 1 << 16):
            pass
    except OSError:  # how a terminal ends
        pass
    os.waitpid(process, 0)
    os.close(terminal)
    return seconds, _children() - before


def _children() -> float:
    times = os.times()
    return times.children_user + times.children_system
