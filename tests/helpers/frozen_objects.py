"""What Python's collector leaves alone during the tests, which is what lives from file to file, and what only it frees.

A full collection took ten times as long by the middle of the tests, and all of them a quarter of the tests' time.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class FrozenObjects:
    """Whether there are any: the collector itself counts them one by one to say so."""

    def __init__(self) -> None:
        self.known = False

    def renew(self) -> None:
        """Garbage goes, and all else that exists now is left alone from now on."""
        gc.collect()
        gc.freeze()
        self.known = True

    def are_gone(self) -> None:
        """A server that ends lets go of all that was frozen."""
        self.known = False


FROZEN = FrozenObjects()


@contextmanager
def circles() -> Iterator[Counter[str]]:
    """What only the collector frees: the types of these objects, counted at the end."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found.update(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
