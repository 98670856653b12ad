"""How far the loading of a checkpoint is, for whoever shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_listener: ContextVar[Callable[[int, int], object] | None] = ContextVar("loading_progress", default=None)


@contextmanager
def telling(listener: Callable[[int, int], object]) -> Iterator[None]:
    """Within it, models that are loaded call the listener with (layers read, layers in all) after every layer."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def tell(done: int, total: int) -> None:
    """Report that `done` of `total` layers have been read."""
    listener = _listener.get()
    if listener is not None:
        listener(done, total)
