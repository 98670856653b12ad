"""What a replay is, and how captures are counted, kept and given up. On a CPU the stand-in replays noted operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from selfspec.engine.runners.choice import CaptureError
from selfspec.engine.runners.cuda_graph.capture import Captures, RecordedOperations
from selfspec.engine.runners.cuda_graph.streams import NoStreams

CPU = torch.device("cpu")


def test_a_replay_does_the_same_work_on_new_numbers() -> None:
    x, y, total = torch.tensor([1.0, 2.0]), torch.zeros(2), torch.zeros(1)

    def body() -> None:
        view = (x * 2)[1:]  # a view of something made on the way
        y[1:].copy_(view)
        total.add_(view)

    recorded = RecordedOperations(body)
    assert y.tolist() == [0.0, 4.0]
    x.copy_(torch.tensor([0.0, 5.0]))
    recorded.replay()
    assert y.tolist() == [0.0, 10.0]
    assert total.tolist() == [14.0]


def test_a_replay_keeps_a_number_that_was_read() -> None:
    length, y = torch.tensor([2]), torch.zeros(4)
    recorded = RecordedOperations(lambda: y[: length.tolist()[0]].add_(1))
    length.fill_(4)
    recorded.replay()
    assert y.tolist() == [2.0, 2.0, 0.0, 0.0]  # as a graph would: baked in


def test_a_temporary_tensor_is_gone_when_its_work_is_done() -> None:
    """On CUDA all graphs share the memory of theirs, so nothing may be handed on in one."""
    x, y, kept = torch.tensor([2.0]), torch.zeros(1), {}

    def first() -> None:
        kept["x"], kept["index"] = x * 2, (x - 1).long()

    work = RecordedOperations(first)
    x.fill_(3.0)
    for _ in range(2):
        assert kept["x"].isnan().all()
        assert kept["index"].tolist() == [0]
        work.replay()
    y.copy_(kept["x"])
    assert y.isnan().all()


@pytest.mark.parametrize("read", [lambda x: int(x), lambda x: x.nonzero(), lambda x: x.item()])
def test_waiting_for_the_device_is_refused_while_capturing(read: Any) -> None:
    with pytest.raises(RuntimeError, match="wait for the device"):
        RecordedOperations(lambda: read(torch.ones(1)))


@pytest.mark.parametrize("bring", [lambda x: x + torch.tensor([2.0]), lambda x: torch.where(x > 0, x, -1)])
def test_bringing_numbers_from_the_host_is_refused_while_capturing(bring: Any) -> None:
    with pytest.raises(RuntimeError, match="copies from the host"):
        RecordedOperations(lambda: bring(torch.ones(1)))
    with torch.inference_mode(), pytest.raises(RuntimeError, match="copies from the host"):
        RecordedOperations(lambda: bring(torch.ones(1)))


def test_captures_are_counted_put_back_and_given_up() -> None:
    x = torch.zeros(1)
    captures = Captures(CPU, (x,), NoStreams(), max_captures=2)
    steps = {n: (lambda n=n: x.add_(n)) for n in (1, 2, 3)}
    captures._capture("trial", steps[1])
    assert x.tolist() == [0.0]  # capturing ran the body, and took that back
    for key in (1, 2, 1, 3, 1):  # 3 takes the place of 2
        captures.run(key, steps[key])
    assert x.tolist() == [8.0]
    assert (captures.num_captures, len(captures)) == (4, 2)
    captures.run(2, steps[2])
    assert captures.num_captures == 5
    assert captures.seconds > 0


def test_what_is_captured_ahead_stays() -> None:
    x = torch.zeros(1)
    captures = Captures(CPU, (x,), NoStreams(), max_captures=2)
    captures.run("later kept", lambda: x.add_(1))
    for key in ("later kept", *range(5)):
        captures.ensure(key, lambda: x.add_(1))
    for key in range(10, 15):
        captures.run(key, lambda: x.add_(1))
    assert len(captures) == 6 + 2
    made = captures.num_captures
    for key in ("later kept", *range(5)):
        captures.run(key, lambda: x.add_(1))
    assert captures.num_captures == made


def test_a_replay_that_fails_says_which() -> None:
    captures = Captures(CPU, (), NoStreams())
    captures._made_ahead["fails"] = Failing()
    with pytest.raises(CaptureError, match="replaying fails failed: lost"):
        captures.run("fails", lambda: None)


class Failing:
    def replay(self) -> None:
        raise RuntimeError("lost")
