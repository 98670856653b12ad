"""Replicas under Ray Serve, and what makes a request that failed fit to be sent again."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest

from selfspec.cli.serve_command import serve_command
from selfspec.serve.app import _EventStream
from selfspec.serve.replica_options import ReplicaOptions


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
    from selfspec.serve.replicas import build

    assert inspect.signature(build).parameters["options"].annotation is ReplicaOptions


def test_arguments_are_those_of_serve() -> None:
    """Each option of `selfspec serve` is taken and told of, but for what is Ray's."""
    options = set(inspect.signature(serve_command).parameters)
    fields = ReplicaOptions.model_fields
    assert options - set(fields) == {"host", "port", "grace_seconds"}
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    assert {name for name in set(fields) - options if f"`{name}`" not in page} == set()
    own = inspect.signature(serve_command).parameters
    differing = {
        name for name in options & set(fields) if (own[name].default or None) != (fields[name].default or None)
    }
    assert differing == {"max_waiting"}


def test_arguments_as_texts_become_settings(tmp_path: Path) -> None:
    """On Ray's command line every value is a text."""
    notes = tmp_path / "notes.txt"
    notes.write_text("to copy from", encoding="utf-8")
    given = {
        "num_replicas": "3",
        "batch_size": "2",
        "num_cpus": "0.5",
        "share_prefixes": "true",
        "max_body_mb": "0.5",
        "default_chat_tokens": "7",
        "max_tokens": "9",
        "allow_policy": "del",
        "copy_from": str(notes),
        "allow_host": "API.example",
    }
    options = ReplicaOptions.model_validate(given)
    assert (options.num_replicas, options.num_cpus) == (3, 0.5)
    settings = options.settings()
    assert (settings.model_name, settings.batch_size, settings.share_prefixes) == ("demo", 2, True)
    assert (settings.max_body_bytes, settings.default_chat_tokens, settings.most_new_tokens) == (1 << 19, 7, 9)
    assert (settings.allowed_policies, settings.copy_from) == (("del",), ("to copy from",))
    assert settings.allowed_hosts is not None and "api.example" in settings.allowed_hosts
    assert ReplicaOptions().settings().allowed_hosts is None
    assert ReplicaOptions(allow_policy=["del", "ar"]).settings().allowed_policies == ("del", "ar")
    with pytest.raises(ValueError, match="nonsense"):
        ReplicaOptions.model_validate({"nonsense": "1"})
