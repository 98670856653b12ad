"""Freed memory leaves the process, where the C library can do that, and a request that has ended leaves nothing behind."""

from __future__ import annotations

import gc
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from layerskip_models import DEMO_PATH
from running_server import RunningServer, asking, running_server, wait_until
from selfspec import SelfSpecGenerator
from selfspec.serve import running
from selfspec.serve.running import find_trim


@contextmanager
def circles() -> Iterator[Counter[str]]:
    """What only the collector frees: the types of these objects, counted at the end."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found.update(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


@pytest.mark.skipif(find_trim() is None, reason="the C library has no malloc_trim")
def test_a_server_gives_memory_back_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """glibc's own function can be called, and is called again and again."""
    trim, results = find_trim(), list[object]()
    monkeypatch.setattr(running, "find_trim", lambda: lambda pad: results.append(trim(pad)) if trim else None)
    monkeypatch.setattr(running, "TRIM_SECONDS", 0.05)
    with running_server(SelfSpecGenerator.from_pretrained(DEMO_PATH)):
        wait_until(lambda: len(results) > 2)
    assert {*results} <= {0, 1}  # whether any was given back


def test_a_full_collection_leaves_alone_what_was_there_before_the_server() -> None:
    """Afterwards the collector looks at everything again."""
    generator = SelfSpecGenerator.from_pretrained(DEMO_PATH)
    gc.unfreeze()  # what the tests before this one had frozen
    before = len(gc.get_objects())
    with running_server(generator, freezes=True):
        assert gc.get_freeze_count() > before / 2
        assert len(gc.get_objects()) < before / 2
    assert gc.get_freeze_count() == 0


_TIMES = 4
_numbers = itertools.count(1)


def new_schema(**more: Any) -> dict[str, Any]:
    schema = {"type": "integer", "minimum": 0, "maximum": next(_numbers), **more}
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


REQUESTS: tuple[Callable[[], dict[str, Any]], ...] = (
    dict,
    lambda: {"stream": True},
    lambda: {"stream": True, "show_drafts": True},
    lambda: {"temperature": 1.0},
    lambda: {"n": 3},
    lambda: {"logprobs": 2, "echo": True},
    lambda: {"cache_salt": f"salt {next(_numbers)}"},
    lambda: {"policy": f"del:d_max={3 + next(_numbers) % 8}"},
    lambda: {"response_format": new_schema()},
    lambda: {"policy": "no such policy"},
    lambda: {"response_format": new_schema(type=7)},
    lambda: {"prompt": "some words " * 2000},
)


def send(server: RunningServer, *, leave_after: float | None = None, **fields: Any) -> None:
    """leave_after: seconds after which the client hangs up, whatever it has got; None for one that reads its answer."""
    connection = asking(server, {"model": "demo", "prompt": "def f(x):", "max_tokens": 12, **fields})
    if leave_after is None:
        connection.getresponse().read()
    else:
        time.sleep(leave_after)
    connection.close()


def test_requests_leave_no_circle(server: RunningServer) -> None:
    """What one kind of them leaves behind would be found as often as it was sent."""

    def send_all() -> None:
        for fields in REQUESTS:
            send(server, **fields())

    send_all()  # what a first request makes for all
    for _ in range(2):  # once more if something that ends by itself, such as a connection, did so just then
        with circles() as found:
            for _ in range(_TIMES):
                send_all()
        if found.total() < _TIMES:
            return
    raise AssertionError(found.most_common(20))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_leaves_no_text(server: RunningServer, stream: bool) -> None:
    """At once, before its first piece, or between two. uvicorn may hold a few objects of a connection; texts are ours."""
    with circles() as found:
        for moment in range(3 * _TIMES):
            send(server, leave_after=0.003 * moment, max_tokens=60, stream=stream)
        send(server, max_tokens=1)
    ours = {name: count for name, count in found.items() if name.startswith(("selfspec", "policies", "torch."))}
    assert not ours
