"""Runs `python -m MODULE` and `python FILE` in a forked process, which need not import PyTorch and transformers again.

What the program does is done in a process of its own, with its own arguments, environment, folder and streams. What a test
with it does not see is whether the program imports all that it needs, and what starting takes: `tests/test_start_up.py` does.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from layerskip_models.kernels import library


def fork_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is started with `subprocess` is forked if it is a program in Python, and started as ever if not."""
    real = subprocess.Popen

    def start(command: Sequence[Any], *rest: Any, **options: Any) -> Any:
        forks = command[0] == sys.executable and (command[1] == "-m" or not str(command[1]).startswith("-"))
        return ForkedProgram([*map(str, command)], **options) if forks else real(command, *rest, **options)

    monkeypatch.setattr(subprocess, "Popen", start)


class ForkedProgram:
    """The part of `subprocess.Popen` that `subprocess.run` and our own code use. What it says is in files until it ends."""

    def __init__(
        self,
        command: list[str],
        *,
        env: dict[str, str] | None = None,
        cwd: Path | str | None = None,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        text: bool = False,
    ) -> None:
        assert stdin in (None, subprocess.DEVNULL), "a forked program is told nothing"
        self.args, self._text = command, text
        self._said = [tempfile.TemporaryFile() if one == subprocess.PIPE else None for one in (stdout, stderr)]  # noqa: SIM115
        out, err = (said or given for said, given in zip(self._said, (stdout, stderr)))
        self._process = multiprocessing.get_context("fork").Process(target=_become, args=(command, env, cwd, out, err))
        self._process.start()

    def __enter__(self) -> ForkedProgram:
        return self

    def __exit__(self, *error: object) -> None:
        self.wait()
        for said in filter(None, self._said):
            said.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self._process.exitcode

    def communicate(self, told: None = None, timeout: float | None = None) -> tuple[Any, Any]:
        """What it wrote to either stream, where that was asked for."""
        self.wait(timeout)
        found: list[Any] = []
        for said in self._said:
            if said is None:
                found.append(None)
                continue
            said.seek(0)
            found.append(said.read().decode() if self._text else said.read())
        return found[0], found[1]

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _become(command: list[str], env: dict[str, str] | None, cwd: Path | str | None, out: Any, err: Any) -> None:
    """Does not return."""
    status = 1
    try:
        _redirect(out, err)
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        if cwd is not None:
            os.chdir(cwd)
        for cache in (library._library, library.load, library.kernels, library.pool_oldest):
            cache.cache_clear()  # the environment may name another variant of the kernels
        status = _run(command[1:])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # nothing of the parent's is torn down here


def _redirect(out: Any, err: Any) -> None:
    for number, given in ((1, out), (2, err)):
        if given == subprocess.STDOUT:
            os.dup2(1, number)
        elif given == subprocess.DEVNULL:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        elif given is not None:
            os.dup2(given.fileno(), number)
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(number, "w", closefd=False)) for number in (1, 2))


def _run(words: list[str]) -> int:
    """Its exit status. words: `-m`, a module and its arguments, or a file and its arguments."""
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            package = hasattr(sys.modules.get(words[1]), "__path__")
            sys.modules.pop(f"{words[1]}.__main__" if package else words[1], None)  # runpy warns of one that is there
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
