"""What Python's collector leaves alone during the tests: what has been imported, and what lives from file to file.

A full collection took ten times as long by the middle of the tests, and all of them a quarter of the tests' time.
"""

from __future__ import annotations

import gc


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
