"""A device whose work is done as late as its order allows, on a CPU: what no event and no wait demands has not happened yet.

On CUDA a missing dependency gives wrong numbers sometimes. Here it gives wrong numbers always: within `LazyDevice` every
operation is only noted, on the queue of its stream. What it will write holds NaN (0 in integers) until then. The host and
the other stream see memory as it is at that moment; a queue runs only as far as a wait for one of its events demands,
or, with a seed, by a few operations more now and then, so that other orders come up too.
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
    """A place in a queue, behind all that was launched before it."""

    def __init__(self, queue: str) -> None:
        self.queue, self.passed = queue, False


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

    seed: of when queues run further than they must; None for never.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self._queues: dict[str, deque[Callable[[], None] | _Point]] = {"main": deque(), "side": deque()}
        self._current = "main"
        self._off = False  # while queued work runs, and while something is captured
        self._host: dict[int, Tensor] = {}  # the host's own memory, by storage; kept, so that no address comes up twice
        self._random = None if seed is None else Random(seed)
        self._function_mode = _HostReads(self)
        self.num_operations = 0

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
    def beside(self, event: LazyEvent) -> Iterator[None]:
        self._current = "side"
        self.wait_for(event)
        try:
            yield
        finally:
            behind = LazyEvent(self)
            behind.record()
            self._current = "main"
            self.wait_for(behind)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """As `torch.cuda.graph` does, wait for the device; then what is captured runs at once, for its warming up."""
        self.drain()
        with self._at_once():
            yield

    def mark(self) -> _Point:
        """A point behind all that is on the current queue."""
        point = _Point(self._current)
        self._queues[self._current].append(point)
        return point

    def wait_for(self, event: LazyEvent) -> None:
        """What is launched on the current queue from now on comes behind the event as it was last recorded."""
        point = event.point
        if point is not None:
            self._queues[self._current].append(lambda: self.reach(point))

    # The queues

    def reach(self, point: _Point) -> None:
        """Run a point's queue up to it."""
        while not point.passed:
            self._step(point.queue)

    def drain(self, name: str | None = None) -> None:
        """Run a queue, or all, to the end."""
        for queue in [name] if name else list(self._queues):
            while self._queues[queue]:
                self._step(queue)

    def drain_current(self) -> None:
        """As a copy to ordinary host memory does: wait for the current stream."""
        self.drain(self._current)

    def is_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._host

    def _is_host(self, tensor: Tensor) -> None:
        self._host[tensor.untyped_storage()._cdata] = tensor

    def _step(self, name: str) -> None:
        work = self._queues[name].popleft()
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
        self._queues[self._current].append(work)
        if self._random is not None and self._random.random() < 0.3:
            name = self._random.choice(list(self._queues))
            for _ in range(self._random.randrange(40)):
                if self._queues[name]:
                    self._step(name)

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
