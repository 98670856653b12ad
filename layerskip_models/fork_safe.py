"""Locks that are free in a forked child, whatever threads of the parent held them at that moment."""

from __future__ import annotations

import os
from typing import Any, TypeVar
from weakref import WeakSet

_Lock = TypeVar("_Lock")
_locks: WeakSet[Any] = WeakSet()


def fork_safe(lock: _Lock) -> _Lock:
    """Return the lock. A child has only the thread that forked, so nobody else would ever release it there."""
    _locks.add(lock)
    return lock


def _free() -> None:
    for lock in _locks:
        lock._at_fork_reinit()  # as the standard library frees its own


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_free)
