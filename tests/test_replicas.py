"""Replicas under Ray Serve, and what makes a request that failed fit to be sent again."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from selfspec.cli.serve_command import serve_command
from selfspec.serve.app import _EventStream


class Texts:
    """Stands for a request's texts."""

    left = False

    def cancel(self) -> None:
        self.left = True


def test_a_stream_has_no_status_before_its_first_piece() -> None:
    """A proxy that has seen no status can still answer 500, and the client sends its request again."""

    async def scenario() -> None:
        sent: list[dict[str, Any]] = []
        come, texts = asyncio.Event(), Texts()

        async def events():
            await come.wait()
            yield "data: 1\n\n"
            yield "data: 2\n\n"

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            await asyncio.Event().wait()

        stream = _EventStream(texts, events())  # type: ignore[arg-type]
        running = asyncio.create_task(stream({"type": "http"}, receive, send))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not sent
        come.set()
        await running
        assert [message["type"] for message in sent] == ["http.response.start", *3 * ["http.response.body"]]
        assert [message.get("body") for message in sent[1:]] == [b"data: 1\n\n", b"data: 2\n\n", b""]
        assert texts.left

    asyncio.run(scenario())


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs selfspec[ray]")
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_arguments_on_rays_command_line_are_checked_by_their_type() -> None:
    """Ray turns `num_replicas=2` into what `build` is annotated with, if that is a class and not its name."""
    from selfspec.serve.replicas import ReplicaOptions, build

    assert inspect.signature(build).parameters["options"].annotation is ReplicaOptions
    assert ReplicaOptions.model_validate({"num_replicas": "3", "model": "x"}).num_replicas == 3
    with pytest.raises(ValueError, match="nonsense"):
        ReplicaOptions.model_validate({"nonsense": "1"})


def test_replicas_have_the_options_of_a_server() -> None:
    """But for what is Ray's. Read from the source, which cannot be imported without Ray."""
    source = Path(str(importlib.util.find_spec("selfspec.serve.replicas").origin)).read_text(encoding="utf-8")  # type: ignore[union-attr]
    (options,) = [
        one for one in ast.parse(source).body if isinstance(one, ast.ClassDef) and one.name == "ReplicaOptions"
    ]
    names = {
        one.target.id for one in options.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }
    assert names - {"max_queued", "num_replicas", "num_cpus", "num_gpus"} == {
        *inspect.signature(serve_command).parameters
    } - {"host", "port", "grace_seconds", "copy_from"}
    used = {one.attr for one in ast.walk(ast.parse(source)) if isinstance(one, ast.Attribute)}
    assert names <= used


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs selfspec[ray]")
def test_a_killed_replica_loses_no_request_that_can_be_sent_again() -> None:
    command = [sys.executable, "-m", "bench.trials.killed_replica"]
    ran = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ", 0 lost" in ran.stdout
