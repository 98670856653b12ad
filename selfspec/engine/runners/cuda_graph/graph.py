"""One captured function as a CUDA graph.

A graph keeps the addresses of what it used while it was captured, and of that the workspaces of cuBLAS are not ours: PyTorch
keeps one for each stream, frees it when any graph that was captured on this stream is destroyed, and frees all of them where
`torch.compile(mode="reduce-overhead")` captures. So the workspace has to lie in memory that lasts as long as the graph: it is
allocated while capturing, hence in the memory of the graphs themselves, because nothing has run on the stream before.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from selfspec.engine.runners.cuda_graph.stream_pool import CAPTURE_PRIORITY, HeldStream

_WARM_UPS = 2  # before a capture: libraries allocate and choose at their first calls, which a graph must not see


class GraphSpace:
    """What graphs that never run at the same time share: a stream for captures alone, and memory for temporary tensors.

    Raises RuntimeError if no stream is left.
    """

    def __init__(self, device: torch.device) -> None:
        self.held = HeldStream(device, CAPTURE_PRIORITY)
        self.stream = self.held.stream
        self.memory: Any = torch.cuda.graph_pool_handle()

    def abandon_capture(self) -> None:
        """Clean up after a capture that failed: its memory pool is no longer being allocated from. PyTorch would leave the
        pool open for good, and with it every later use of the allocator in the state of a capture."""
        self.held.keep()  # it may still have a workspace in that memory
        with suppress(RuntimeError):  # the pool is closed if the capture came to its end
            torch._C._cuda_endAllocateToPool(self.stream.device_index, self.memory)
            torch._C._cuda_releasePool(self.stream.device_index, self.memory)
        # PyTorch 2.11 leaves the default generator in the state of a capture as well, and every later draw without a
        # generator would raise. A copy of its state is not in that state.
        generator = torch.cuda.default_generators[self.stream.device_index]
        generator.graphsafe_set_state(generator.clone_state())


class CudaGraph:
    """A CUDA graph. Raises RuntimeError if the work cannot be captured; the device can be used as before then."""

    def __init__(self, body: Callable[[], object], space: GraphSpace) -> None:
        for _ in range(_WARM_UPS):
            body()  # on the current stream: not on that of captures
        self._space = space
        self._graph = torch.cuda.CUDAGraph()
        begun = False
        try:
            # The outer context also leaves the stream when a capture fails, which `torch.cuda.graph` itself does not.
            # Other threads may go on using CUDA meanwhile: only this one must not synchronise.
            with (
                torch.cuda.stream(space.stream),
                torch.cuda.graph(
                    self._graph, pool=space.memory, stream=space.stream, capture_error_mode="thread_local"
                ),
            ):
                begun = True
                body()
        except BaseException:
            if begun:
                space.abandon_capture()
            raise

    def __del__(self) -> None:
        """Destroy the graph before its stream can be another's: only then is the stream's workspace gone."""
        self.__dict__.pop("_graph", None)

    def replay(self) -> None:
        """Do the captured work again, on the current stream."""
        self._graph.replay()
