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
from selfspec.engine.runners.choice import CaptureError
from selfspec.engine.runners.cuda_graph.graph import CudaGraph, GraphSpace
from selfspec.engine.runners.cuda_graph.streams import Streams

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

MAX_CAPTURES = 1024
"""Captures made on demand that are held at most."""


class Captured(Protocol):
    """Work that can be done again."""

    def replay(self) -> None:
        """Do the captured work again, on what the buffers hold now."""
        ...


class RecordedOperations(TorchDispatchMode):
    """The stand-in: operations in their order, each with its arguments and the tensors that its results went to.

    Temporary tensors are spoiled when the work is done: other graphs write over those of a CUDA graph.
    """

    def __init__(self, body: Body) -> None:
        super().__init__()
        self._steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        with self, operators_only():
            body()
        self._spoil()

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
        read = {_memory(tensor) for tensor in _tensors((args, kwargs))}
        results = _tensors(out)
        if any(_memory(result) not in read for result in results):
            self._steps.append((func, args, kwargs, results))
        return out

    def replay(self) -> None:
        """Run the noted operations; their results go where they went the first time, as a graph's do."""
        for func, args, kwargs, places in self._steps:
            out = func(*args, **kwargs)
            for place, result in zip(places, _tensors(out)):
                place.copy_(result)
        self._spoil()

    def _spoil(self) -> None:
        """Nobody wants these numbers any more. Integers become 0, which is an index into anything."""
        for _, _, _, places in self._steps:
            for place in places:
                place.fill_(torch.nan if place.is_floating_point() else 0)


def _tensors(value: Any) -> list[Tensor]:
    """Find the tensors in it."""
    if isinstance(value, Tensor):  # usually, and at once
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    """Identify a tensor's memory. A packed weight has none to look at, and is never a view: -1."""
    if tensor.layout is not torch.strided:
        return -1
    return tensor.untyped_storage()._cdata


def _reason(error: RuntimeError) -> str:
    """Say which error ended a capture, and what went wrong in it. In a function whose frame the error does not keep."""
    return str(error) if error.__context__ is None else f"{error} ({error.__context__})"


class Captures:
    """Captured work by key: captured when first asked for, or ahead of that.

    protect: what capturing disturbs and must be put back, since a body runs for warming up.
    max_captures: how many of those captured when first asked for are held; beyond that the least recently used is given up.
    Those made ahead are all kept, and do not count. Memory is not counted: temporary tensors are in one pool that all
    captures share, as large as the largest of them needs, and what a graph itself takes of the device no allocator knows.
    Attributes: num_captures, seconds: how many were made so far, and how long that took.
    """

    def __init__(
        self,
        device: torch.device,
        protect: Sequence[Tensor],
        streams: Streams,
        *,
        max_captures: int = MAX_CAPTURES,
    ) -> None:
        self.num_captures = 0
        self.seconds = 0.0
        self._protect = protect
        self._streams = streams
        self._max_captures = max_captures
        self._made_ahead: dict[Hashable, Captured] = {}
        self._on_demand: OrderedDict[Hashable, Captured] = OrderedDict()
        self._device = device
        self._space: GraphSpace | None = None  # from the first capture on, on CUDA

    def __len__(self) -> int:
        return len(self._made_ahead) + len(self._on_demand)

    def run(self, key: Hashable, body: Body) -> None:
        """Do the work of a key: replay it, after capturing `body` if it is not held. Equal keys must mean equal work.

        Raises CaptureError with the reason if the work can be neither captured nor replayed.
        """
        captured = self._made_ahead.get(key)
        if captured is None:
            captured = self._on_demand.get(key)
            if captured is None:
                captured = self._on_demand[key] = self._capture(key, body)
                while len(self._on_demand) > self._max_captures:
                    self._on_demand.popitem(last=False)
            else:
                self._on_demand.move_to_end(key)
        try:
            captured.replay()
        except RuntimeError as error:
            raise CaptureError(f"replaying {key} failed: {error}") from error

    def ensure(self, key: Hashable, body: Body) -> None:
        """Capture a key's work if it is not held, without doing it, and keep it from now on. Raises CaptureError as `run`."""
        if key not in self._made_ahead:
            held = self._on_demand.pop(key, None)
            self._made_ahead[key] = held or self._capture(key, body)

    def _capture(self, key: Hashable, body: Body) -> Captured:
        with self._streams.capturing():
            start = perf_counter()
            saved = [tensor.clone() for tensor in self._protect]
            try:
                captured = self._make(body)
            except RuntimeError as error:
                raise CaptureError(f"capturing {key} failed: {_reason(error)}") from error
            for tensor, value in zip(self._protect, saved):
                tensor.copy_(value)
            self.num_captures += 1
            self.seconds += perf_counter() - start
            return captured

    def _make(self, body: Body) -> Captured:
        if self._device.type != "cuda":
            return RecordedOperations(body)
        if self._space is None:
            self._space = GraphSpace(self._device)
        return CudaGraph(body, self._space)
