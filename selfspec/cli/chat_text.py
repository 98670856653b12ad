"""The text of an answer up to the string that ends it, while it is still being written."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from selfspec.stop_text import before_stop, open_end
from selfspec.streaming import Fate


class StopTrimmer:
    """Passes pieces of text on, but for a stop string and what follows it. What may become one is held back meanwhile.

    write: gets pieces with their fates. Dropped drafts are no text; they keep their places between the others.
    """

    def __init__(self, stops: Sequence[str], write: Callable[[str, Fate], object]) -> None:
        self._stops, self._write = tuple(stops), write
        self._held: list[tuple[str, Fate]] = []
        self._stopped = False

    def push(self, piece: str, fate: Fate = "target") -> None:
        """The next piece."""
        if self._stopped:
            return
        self._held.append((piece, fate))
        text = "".join(held for held, its_fate in self._held if its_fate != "rejected")
        kept = before_stop(text, self._stops)
        self._stopped = len(kept) < len(text)
        self._pass_on(len(kept) if self._stopped else len(text) - open_end(text, self._stops))

    def finish(self) -> None:
        """The text ends here: what was held back is text."""
        if not self._stopped:
            self._pass_on(sum(len(piece) for piece, _ in self._held))

    def _pass_on(self, characters: int) -> None:
        while self._held:
            piece, fate = self._held[0]
            if fate != "rejected":
                if characters < len(piece):
                    self._write(piece[:characters], fate)
                    self._held[0] = piece[characters:], fate
                    return
                characters -= len(piece)
            self._write(piece, fate)
            self._held.pop(0)
