"""What graphs share without saying so: workspaces, streams, memory pools. On a pretended device (`pretended_cuda.py`)."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from pretended_cuda import NUM_STREAMS, PretendedCuda, PretendedGraph
from selfspec.engine.runners.choice import CaptureError
from selfspec.engine.runners.cuda_graph.capture import Captures
from selfspec.engine.runners.cuda_graph.streams import NoStreams

CUDA = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> PretendedCuda:
    return PretendedCuda(monkeypatch)


def captures(most: int = 100) -> Captures:
    return Captures(CUDA, (), NoStreams(), max_captures=most)


class Work:
    """Products of its own numbers, by key."""

    def __init__(self, cuda: PretendedCuda) -> None:
        self._cuda = cuda
        self.x, self.y = torch.eye(2), torch.zeros(2, 2)

    def body(self, factor: int) -> Callable[[], object]:
        weight = torch.full((2, 2), float(factor))
        return lambda: self._cuda.product(self.y, self.x, weight)

    def is_right(self, held: Captures, factor: int) -> bool:
        """Whether captured work does what it says."""
        self.y.zero_()
        held.run(factor, self.body(factor))
        return bool((self.y == factor).all())


def test_giving_up_a_graph_leaves_the_others_whole(cuda: PretendedCuda) -> None:
    """The least recently used one goes, and with it the workspace of the stream that all were captured on."""
    work, held = Work(cuda), captures(4)
    assert all(work.is_right(held, factor) for _ in range(3) for factor in (1, 2, 3, 4, 5, 2, 3))
    assert held.num_captures > 7


def test_graphs_outlast_the_workspaces_that_others_free(cuda: PretendedCuda) -> None:
    """A function compiled with mode="reduce-overhead" frees the workspaces of all streams."""
    work, held = Work(cuda), captures()
    for _ in range(2):
        assert all(work.is_right(held, factor) for factor in (1, 2, 3))
        cuda.free_workspaces()
    assert held.num_captures == 3


def test_runners_that_come_and_go_beside_other_streams(cuda: PretendedCuda) -> None:
    """More of each than PyTorch has streams: work outside of graphs never comes onto a stream that is captured on."""
    stays = Work(cuda), captures()
    assert stays[0].is_right(stays[1], 7)
    for _ in range(2 * NUM_STREAMS):
        work, held = Work(cuda), captures(2)
        for factor in (1, 2, 3):
            assert work.is_right(held, factor)
            with cuda.on_stream(cuda.new_stream()):
                work.body(factor)()
        assert stays[0].is_right(stays[1], 7)
        assert stays[0].is_right(stays[1], 8)
    assert stays[1].num_captures == 2


def test_a_stream_is_held_by_one_runner(cuda: PretendedCuda) -> None:
    work = Work(cuda)
    held = [captures() for _ in range(NUM_STREAMS)]
    assert all(work.is_right(one, 1) for one in held)
    streams = {graph.stream for graph in gc.get_objects() if type(graph) is PretendedGraph and graph._cuda is cuda}
    assert len(streams) == NUM_STREAMS
    with pytest.raises(CaptureError, match="all 32 streams of priority -1 on cuda:0 are in use"):
        captures().run(1, work.body(1))
    held.pop()
    assert work.is_right(captures(), 1)


def test_a_capture_that_fails_is_over(cuda: PretendedCuda) -> None:
    """The allocator is told, and the reason is. What is captured elsewhere goes on."""
    work, held = Work(cuda), captures()
    assert work.is_right(held, 1)

    def body() -> None:
        work.body(2)()
        cuda.wait()

    with pytest.raises(CaptureError, match=r"failed due to a previous error.*\(operation not permitted when stream"):
        held.run(2, body)
    assert cuda.underway == []
    assert not cuda.generator.capturing
    assert work.is_right(held, 1)
    spoilt = held._space
    assert spoilt is not None
    stream, pool = spoilt.stream, spoilt.memory
    del held, spoilt
    assert cuda.uses[pool] == 0
    others = [captures() for _ in range(NUM_STREAMS - 1)]
    for other in others:
        assert work.is_right(other, 1)
        assert other._space is not None
        assert other._space.stream != stream  # a workspace in memory that is gone may still belong to it


def test_a_body_that_fails_by_itself_leaves_nothing_open(cuda: PretendedCuda) -> None:
    def body() -> None:
        if cuda.capturing is not None:
            raise RuntimeError("out of memory")

    held = captures()
    with pytest.raises(CaptureError, match=r"capturing 1 failed: out of memory$"):
        held.run(1, body)
    assert cuda.underway == []
    assert held._space is not None
    assert cuda.uses[held._space.memory] == 0
