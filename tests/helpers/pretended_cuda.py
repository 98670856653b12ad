"""CUDA's streams, graphs and cuBLAS workspaces without a device, as far as graphs depend on one another through them.

What PyTorch 2.13 does, as its sources say, in the worst case that they allow:
- There are 32 streams of each priority, handed out in turns.
- Each stream has one workspace. The first product on the stream allocates it: from the graphs' pool of memory while
  something is captured, else from the memory of all. A graph keeps its address.
- Destroying a graph frees the workspace of the stream that it was captured on, and `free_workspaces` those of all streams.
- Freed memory of all is gone at once. Memory of a pool is gone when the pool's last graph is.
- A capture that fails leaves its pool open, until that is told to end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from selfspec.engine.runners.cuda_graph import stream_pool

Pool = tuple[int, int]
NUM_STREAMS = 32


@dataclass(eq=False)
class Block:
    """Memory. pool: of graphs, None for the memory of all. is_there: whether reading it is no error."""

    pool: Pool | None
    is_there: bool = True


@dataclass(frozen=True)
class PretendedStream:
    cuda_stream: int
    device_index: int = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.device_index)

    def wait_stream(self, other: PretendedStream) -> None:
        """Work is over when its call returns."""


class PretendedCuda:
    """Takes the place of `torch.cuda` as long as the patch lasts. underway: pools that allocations go to."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._made: Counter[int] = Counter()
        self._pools = 0
        self._current = PretendedStream(0)
        self.capturing: PretendedGraph | None = None
        self.uses: Counter[Pool] = Counter()
        self.underway: list[Pool] = []
        self.workspaces: dict[int, Block] = {}
        self.generator = PretendedGenerator()
        self._blocks: list[Block] = []
        for name, value in {
            "Stream": self.new_stream,
            "current_stream": lambda device=None: self._current,
            "current_device": lambda: 0,
            "stream": self.on_stream,
            "graph_pool_handle": self.new_pool,
            "CUDAGraph": lambda: PretendedGraph(self),
            "graph": self.capture,
            "default_generators": (self.generator,),
        }.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_allocation, raising=False)
        patch.setattr(torch._C, "_cuda_releasePool", lambda device, pool: self.release(pool), raising=False)
        patch.setattr(stream_pool, "_shelves", {})

    def new_stream(self, device: Any = None, priority: int = 0) -> PretendedStream:
        self._made[priority] += 1
        return PretendedStream(1000 * (1 - priority) + self._made[priority] % NUM_STREAMS)

    @contextmanager
    def on_stream(self, stream: PretendedStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def new_pool(self) -> Pool:
        self._pools += 1
        return 0, self._pools

    @contextmanager
    def capture(self, graph: PretendedGraph, pool: Pool, stream: PretendedStream, **options: Any) -> Iterator[None]:
        with self.on_stream(stream):
            self.capturing, graph.pool, graph.stream = graph, pool, stream
            self.uses[pool] += 1
            self.underway.append(pool)
            self.generator.capturing = True
            try:
                yield
            finally:
                self.capturing = None
                if graph.is_spoilt:
                    raise RuntimeError("operation failed due to a previous error during capture")
                self.underway.remove(pool)
                self.generator.capturing = False
                graph.ended = True

    def product(self, out: Tensor, left: Tensor, right: Tensor) -> None:
        """out = left @ right, with the workspace of the current stream."""
        graph, key = self.capturing, self._current.cuda_stream
        if key not in self.workspaces:
            self.workspaces[key] = Block(None if graph is None else graph.pool)
            self._blocks.append(self.workspaces[key])
        block = self.workspaces[key]
        assert block.is_there, "a stream's workspace is not there"
        if graph is None:
            assert block.pool is None, "work outside of graphs has a workspace in their memory"
            out.copy_(left @ right)
        else:
            graph.steps.append((block, lambda: out.copy_(left @ right)))

    def wait(self) -> None:
        """Wait for the device, which a capture does not survive."""
        if self.capturing is not None:
            self.capturing.is_spoilt = True
            raise RuntimeError("operation not permitted when stream is capturing")

    def free_workspaces(self, stream: PretendedStream | None = None) -> None:
        """As PyTorch's compiler does where it captures graphs of its own."""
        for key in [*self.workspaces] if stream is None else [stream.cuda_stream]:
            block = self.workspaces.pop(key, None)
            if block is not None and (block.pool is None or not self.uses[block.pool]):
                block.is_there = False

    def end_allocation(self, device: int, pool: Pool) -> None:
        if pool not in self.underway:
            raise RuntimeError("not currently recording to this pool")
        self.underway.remove(pool)

    def release(self, pool: Pool) -> None:
        self.uses[pool] -= 1
        assert self.uses[pool] >= 0
        if not self.uses[pool]:
            held = {id(block) for block in self.workspaces.values()}
            for block in self._blocks:
                if block.pool == pool and id(block) not in held:
                    block.is_there = False


class PretendedGenerator:
    """The default generator of PyTorch 2.11: a capture that fails leaves it as if it still were captured."""

    def __init__(self) -> None:
        self.capturing = False

    def clone_state(self) -> PretendedGenerator:
        return PretendedGenerator()

    def graphsafe_set_state(self, state: PretendedGenerator) -> None:
        self.capturing = state.capturing


class PretendedGraph:
    """steps: what was captured, each with its workspace."""

    def __init__(self, cuda: PretendedCuda) -> None:
        self._cuda = cuda
        self.steps: list[tuple[Block, Callable[[], object]]] = []
        self.pool: Pool = (0, 0)
        self.stream = PretendedStream(0)
        self.ended = self.is_spoilt = False

    def replay(self) -> None:
        for block, step in self.steps:
            if not block.is_there:
                raise RuntimeError("an illegal memory access was encountered")
            step()

    def __del__(self) -> None:
        if self.ended:
            self._cuda.free_workspaces(self.stream)
            self._cuda.release(self.pool)
