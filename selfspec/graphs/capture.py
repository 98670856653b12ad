"""Captured work: a function over fixed buffers, run once, then replayed as it was, without Python in between.

On CUDA that is a CUDA graph. Elsewhere a stand-in with the same contract: it notes every operation with the very tensors it
read and wrote, and replays only those. A number that a graph would bake in (a length, something read by `.item()`) is baked
in there as well, so a test on a CPU sees what a GPU would do. The stand-in is for tests: it is slower than running eagerly.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from layerskip_models.kernels.native_linear import operators_only

Body = Callable[[], object]
"""What is captured: reads and writes tensors that outlive it; what it returns is not looked at."""

_FROM_HOST = (
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.scalar_tensor.default,
    torch.ops.aten.where.Scalar,
    torch.ops.aten.where.ScalarSelf,
    torch.ops.aten.where.ScalarOther,
)
"""Operations that bring a number from ordinary host memory, for which CUDA synchronises."""

_WARM_UPS = 2  # before a capture: libraries allocate and choose at their first calls, which a graph must not see


class Captured(Protocol):
    """num_bytes: memory that it holds on its device beside the buffers it works on."""

    num_bytes: int

    def replay(self) -> None:
        """Do the captured work again, on what the buffers hold now."""
        ...


class CudaGraph:
    """A CUDA graph. pool: memory for temporary tensors, shared by graphs that never run at the same time."""

    def __init__(self, body: Body, pool: Any, stream: torch.cuda.Stream) -> None:
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(stream.device)[0]
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may go on using CUDA meanwhile: only this one must not synchronise.
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            body()
        self.num_bytes = max(free - torch.cuda.mem_get_info(stream.device)[0], 0)

    def replay(self) -> None:
        """Launch it on the current stream."""
        self._graph.replay()


class RecordedOperations(TorchDispatchMode):
    """The stand-in: operations in their order, each with its arguments and the tensors that its results went to."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self._steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self.num_bytes = 0
        with self, operators_only():
            body()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run the operation, and note it unless it only made a view."""
        kwargs = kwargs or {}
        if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            raise RuntimeError(f"{func} makes the host wait for the device: a CUDA graph cannot hold it")
        if func in _FROM_HOST:
            raise RuntimeError(f"{func} copies from the host: a CUDA graph cannot hold it")
        out = func(*args, **kwargs)
        if func._schema.is_mutable:
            self._steps.append((func, args, kwargs, []))
            return out
        read = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if any(_memory(result) not in read for result in results):
            self._steps.append((func, args, kwargs, results))
            self.num_bytes += sum(result.numel() * result.element_size() for result in results)
        return out

    def replay(self) -> None:
        """Run the noted operations; their results go where they went the first time, as a graph's do."""
        for func, args, kwargs, places in self._steps:
            out = func(*args, **kwargs)
            for place, result in zip(places, (leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor))):
                place.copy_(result)


def _memory(tensor: Tensor) -> int:
    """Identifies the memory behind a tensor; a packed weight has none to look at, and is nobody's view."""
    if tensor.layout is not torch.strided:
        return -1
    return tensor.untyped_storage()._cdata


class Captures:
    """Captured work by key: captured when first asked for, the least recently used given up beyond a bound.

    protect: what capturing disturbs and must be put back, since a body runs for warming up. max_bytes: bound on the
    memory of all captures together; one alone may exceed it. max_captures: bound on their number.
    Attributes: num_captures, seconds: how many were made so far, and how long that took.
    """

    def __init__(
        self, device: torch.device, protect: Sequence[Tensor], *, max_bytes: int = 1 << 30, max_captures: int = 1024
    ) -> None:
        self.num_captures = 0
        self.seconds = 0.0
        self._protect = protect
        self._max_bytes, self._max_captures = max_bytes, max_captures
        self._held: OrderedDict[Hashable, Captured] = OrderedDict()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_bytes(self) -> int:
        """Memory of those held now."""
        return sum(captured.num_bytes for captured in self._held.values())

    def run(self, key: Hashable, body: Body) -> None:
        """Do the work of a key: replay it, after capturing `body` if it is not held. Equal keys must mean equal work."""
        captured = self._held.get(key)
        if captured is None:
            captured = self._capture(key, body)
        else:
            self._held.move_to_end(key)
        captured.replay()

    def ensure(self, key: Hashable, body: Body) -> None:
        """Capture a key's work if it is not held, without doing it."""
        if key not in self._held:
            self._capture(key, body)

    def clear(self) -> None:
        """Give all up."""
        self._held.clear()
        if self._pool is not None:
            self._pool = torch.cuda.graph_pool_handle()  # the old one's memory goes with its last graph

    def _capture(self, key: Hashable, body: Body) -> Captured:
        start = perf_counter()
        saved = [tensor.clone() for tensor in self._protect]
        captured: Captured
        if self._stream is None:
            captured = RecordedOperations(body)
        else:
            current = torch.cuda.current_stream(self._stream.device)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    body()
            current.wait_stream(self._stream)
            captured = CudaGraph(body, self._pool, self._stream)
        for tensor, value in zip(self._protect, saved):
            tensor.copy_(value)
        self._held[key] = captured
        self.num_captures += 1
        while len(self._held) > 1 and (len(self._held) > self._max_captures or self.num_bytes > self._max_bytes):
            self._held.popitem(last=False)
        self.seconds += perf_counter() - start
        return captured
