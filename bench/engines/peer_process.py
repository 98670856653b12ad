"""An engine in a process of its own: what it does to its process (a crash, threads, matrix tiles) touches nobody else.

The child makes the engines of one peer and answers one call at a time over a pipe. It measures by its own clock, so what
passes through the pipe is in no number. What it prints goes to a file, whose last line is told if it ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers.utils import logging

from bench.engines.own import BatchRun, EngineLostError, Generation, TimedEngine

START_METHOD: Literal["spawn", "fork"] = "spawn"
_DESCRIBED = ("name", "label", "warmed_up", "weights", "arithmetic")
_ENDING_SECONDS = 5.0
_SHOWN = 300  # characters of a last line
_SETTLING_SECONDS = 0.5  # in which another engine's threads stop spinning: OpenMP's may for .2


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The engines that a child process makes, on one copy of the weights. about: what the parent is told of them."""

    engines: Sequence[TimedEngine]
    about: Mapping[str, Any] = field(default_factory=dict)


class PeerProcess:
    """A running child. Used with `with`.

    name: of the peer, for messages. make: called in the child; it must be possible to pickle. timeout: seconds that one
    answer may take.
    Raises EngineLostError if the peer cannot be made.
    """

    _latest: ClassVar[PeerProcess | None] = None  # of all, the one that was asked for a text last
    _has_run = False

    def __init__(self, name: str, make: Callable[[], Peer], *, timeout: float) -> None:
        self._name, self._timeout = name, timeout
        self._lost: str | None = None
        handle, self._path = tempfile.mkstemp()
        os.close(handle)
        context = multiprocessing.get_context(START_METHOD)
        self._pipe, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            target=_serve, args=(theirs, self._pipe, self._path, make), daemon=True
        )
        self._process.start()
        theirs.close()
        try:
            described, self.about = self._answer()
        except EngineLostError:
            self.close()
            raise
        self.engines = [RemoteEngine(self, number, one) for number, one in enumerate(described)]

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child."""
        self._pipe.close()  # it then ends by itself
        self._process.join(_ENDING_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        Path(self._path).unlink(missing_ok=True)

    def call(self, engine: int, method: str, *arguments: Any) -> Any:
        """Return what a method of one of the engines returns. Raises EngineLostError if there is no answer."""
        if self._lost is not None:
            raise EngineLostError(self._lost)
        with suppress(OSError):  # it has ended: `_answer` says how
            self._pipe.send((engine, method, arguments))
        return self._answer()

    def run(self, engine: int, method: str, texts: list[Any], *arguments: Any) -> Any:
        """Do the same with a method that is timed. One that waited for others first brings its weights into the cache."""
        waited = self._has_run and PeerProcess._latest is not self
        PeerProcess._latest, self._has_run = self, True
        if waited:
            time.sleep(_SETTLING_SECONDS)
            self.call(0, method, texts, 2)
        return self.call(engine, method, texts, *arguments)

    def _answer(self) -> Any:
        try:
            if not self._pipe.poll(self._timeout):
                self._process.kill()
                raise self._gone(f"it did not answer within {self._timeout:g} seconds")
            worked, value = self._pipe.recv()
        except (EOFError, OSError):
            raise self._gone(None) from None
        if not worked:
            self._process.kill()
            kind, message, mistaken = value
            raise self._gone(f"{kind}: {message}", message if mistaken else None)
        return value

    def _gone(self, why: str | None, mistake: str | None = None) -> EngineLostError:
        self._process.join(_ENDING_SECONDS)
        if why is None:
            code = self._process.exitcode or 0
            name = next((one.name for one in signal.Signals if one == -code), f"signal {-code}")
            why = f"it was ended by {name}" if code < 0 else f"it ended with status {code}"
            said = Path(self._path).read_bytes().decode(errors="replace").replace("\r", "\n").split("\n")
            if last := next((line.strip() for line in reversed(said) if line.strip()), ""):
                why += f" ({last[-_SHOWN:]})"
        self._lost = f"{self._name} is lost: {why}"
        return EngineLostError(self._lost, mistake)


class RemoteEngine(TimedEngine):
    """An engine as the parent sees it. What goes through the pipe is lists of numbers: tensors would share memory."""

    def __init__(self, process: PeerProcess, number: int, about: Mapping[str, Any]) -> None:
        self._process, self._number = process, number
        for name in _DESCRIBED:
            setattr(self, name, about[name])

    def generate(self, prompt: Tensor, max_new_tokens: int, repeat: int = 0) -> Generation:
        return self._process.run(self._number, "generate", prompt.tolist(), max_new_tokens, repeat)

    def run(self, prompts: Sequence[Tensor], max_new_tokens: int) -> BatchRun:
        return self._process.run(self._number, "run", [prompt.tolist() for prompt in prompts], max_new_tokens)

    def next_logits(self, ids: Tensor) -> Tensor:
        return torch.tensor(self._call("next_logits", ids.tolist()), dtype=torch.float64)  # which holds any dtype's

    def answer_length(self, prompt: Tensor, max_new_tokens: int) -> int:
        return self._call("answer_length", prompt.tolist(), max_new_tokens)

    def forget(self) -> None:
        self._call("forget")

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._process.call(self._number, method, *arguments)


def _serve(pipe: Connection, parents: Connection, path: str, make: Callable[[], Peer]) -> None:
    """Run the child: answer the parent's calls until it closes the pipe."""
    parents.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C ends
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    said = os.open(path, os.O_WRONLY | os.O_APPEND)
    sys.stdout.flush()
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        peer = make()
        described = [{name: getattr(one, name) for name in _DESCRIBED} for one in peer.engines]
        pipe.send((True, (described, dict(peer.about))))
        while True:
            number, method, sent = pipe.recv()
            called = getattr(peer.engines[number], method)
            value = called(*(_ids(one) if isinstance(one, list) else one for one in sent))
            pipe.send((True, value.tolist() if isinstance(value, Tensor) else value))
    except (EOFError, BrokenPipeError):
        return
    except BaseException as error:
        mistaken = isinstance(error, (ValueError, TypeError, OSError))  # as the command line tells them apart
        pipe.send((False, (type(error).__name__, " ".join(str(error).split()), mistaken)))
        raise


def _ids(sent: list[int] | list[list[int]]) -> Tensor | list[Tensor]:
    """Turn a text's ids, or those of several, into what an engine takes."""
    if sent and isinstance(sent[0], list):
        return [torch.tensor(text, dtype=torch.long) for text in sent]
    return torch.tensor(sent, dtype=torch.long)
