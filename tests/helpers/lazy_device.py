"""A device whose work is done as late as its order allows, on a CPU: what no event and no wait demands has not happened yet.

On CUDA a missing dependency gives wrong numbers sometimes. Here it gives wrong numbers always: within `LazyDevice` every
operation is only noted, on a queue. What it will write holds NaN (0 in integers) until then. The host sees memory as it is at
that moment; the queue runs only as far as a wait for an event demands, or, with a seed, by a few operations more now and
then, so that other orders come up too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_READS = (Tensor.tolist, Tensor.numpy)
"""How the host reads memory without an operation that a dispatch mode would see."""


class _Point:
    """A place in the queue, after all that was launched before it."""

    def __init__(self) -> None:
        self.passed = False


class LazyEvent:
    """See `selfspec.engine.runners.cuda_graph.streams.Event`."""

    def __init__(self, device: LazyDevice) -> None:
        self._device = device
        self.point: _Point | None = None

    def record(self) -> None:
        self.point = self._device.mark()

    def synchronize(self) -> None:
        if self.point is not None:
            self._device.reach(self.point)


class LazyDevice(TorchDispatchMode):
    """The device, within its context; as an object, the streams of `selfspec.engine.runners.cuda_graph.streams.Streams`.

    seed: of when the queue runs further than it must; None for never. num_drains: how often the host waited for all that was
    launched.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self._queue: deque[Callable[[], None] | _Point] = deque()
        self._off = False  # while queued work runs, and while something is captured
        self._host: dict[int, Tensor] = {}  # the host's own memory, by storage; kept, so that no address comes up twice
        self._random = None if seed is None else Random(seed)
        self._function_mode = _HostReads(self)
        self.num_operations = self.num_drains = 0

    def __enter__(self) -> LazyDevice:
        self._function_mode.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._function_mode.__exit__(*exception)
        self.drain()

    # The streams

    def event(self) -> LazyEvent:
        return LazyEvent(self)

    def host_memory(self, size: int) -> Tensor:
        with self._at_once():
            memory = torch.zeros(size, dtype=torch.float64)
        self._is_host(memory)
        return memory

    def resume(self) -> None:
        """One caller, one main stream: nothing to order."""

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """As `torch.cuda.graph` does, wait for the device; then what is captured runs at once, for its warming up."""
        self.drain()
        with self._at_once():
            yield

    def mark(self) -> _Point:
        """A point after all that is on the queue."""
        point = _Point()
        self._queue.append(point)
        return point

    # The queue

    def reach(self, point: _Point) -> None:
        """Run the queue up to a point."""
        while not point.passed:
            self._step()

    def drain(self) -> None:
        """Run the queue to the end."""
        while self._queue:
            self._step()

    def drain_current(self) -> None:
        """As a copy to ordinary host memory does: wait for the stream."""
        self.num_drains += 1
        self.drain()

    def is_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._host

    def _is_host(self, tensor: Tensor) -> None:
        self._host[tensor.untyped_storage()._cdata] = tensor

    def _step(self) -> None:
        work = self._queue.popleft()
        if isinstance(work, _Point):
            work.passed = True
        else:
            with self._at_once(), torch.inference_mode():
                work()

    @contextmanager
    def _at_once(self) -> Iterator[None]:
        before, self._off = self._off, True
        try:
            yield
        finally:
            self._off = before

    def _launch(self, work: Callable[[], None]) -> None:
        self.num_operations += 1
        self._queue.append(work)
        if self._random is not None and self._random.random() < 0.3:
            for _ in range(min(self._random.randrange(40), len(self._queue))):
                self._step()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._off:
            return func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor(...): the host's own
            self._is_host(args[0])
        if inputs and all(self.is_host(tensor) for tensor in inputs):
            return self._on_the_host(func, args, kwargs)
        if func._schema.is_mutable:
            self._launch(lambda: func(*args, **kwargs))
            return self._written(func, args, kwargs)
        random = torch.Tag.nondeterministic_seeded in func.tags
        if not any("Tensor" in str(result.type) for result in func._schema.returns):
            self.drain_current()  # the host wants a number
            return func(*args, **kwargs)
        if "empty" in func._schema.name:
            return _spoiled(func(*args, **kwargs))
        if not inputs and not random:
            return func(*args, **kwargs)  # a constant
        generator = kwargs.get("generator")
        state = generator.get_state() if random and generator is not None else None
        out = func(*args, **kwargs)  # now, for its shape, on whatever is there
        if state is not None:
            generator.set_state(state)
        places = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        read = {tensor.untyped_storage()._cdata for tensor in inputs}
        if all(place.untyped_storage()._cdata in read for place in places):
            return out  # a view
        for place in places:
            _spoiled(place)

        def work() -> None:
            for place, result in zip(places, tree_leaves(func(*args, **kwargs))):
                place.copy_(result)

        self._launch(work)
        return out

    def _on_the_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._is_host(leaf)
        return out

    def _written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operation that writes to its arguments returns: those."""
        written = []
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written.append(args[index] if index < len(args) else kwargs[argument.name])
        return None if not func._schema.returns else written[0] if len(written) == 1 else tuple(written)


def _spoiled(tensor: Tensor) -> Tensor:
    """The tensor with numbers in it that nobody wants: NaN, or 0 in integers, which is a place in any table."""
    return tensor.fill_(float("nan") if tensor.is_floating_point() else 0)


class _HostReads(TorchFunctionMode):
    """Reading a device's tensor from Python waits for the current stream; reading the host's own memory does not."""

    def __init__(self, device: LazyDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in _READS and not self._device.is_host(args[0]):
            self._device.drain_current()
        return func(*args, **(kwargs or {}))
