"""Cutting a text before the first stop string, while the text is still being written."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from selfspec.streaming import Fate, FatePieces


def before_stop(text: str, stops: Sequence[str]) -> str:
    """Keep the text up to the first of these strings."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found, default=len(text))]


def _open_end(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end may be the beginning of a stop string."""
    sizes = range(min(len(text), max(map(len, stops), default=0)), 0, -1)
    return next((size for size in sizes if any(stop.startswith(text[-size:]) for stop in stops)), 0)


class StopCutter:
    """Passes text on up to the first stop string. Text that may be the beginning of one is held back until that is clear.

    ended: a stop string has come. held: the text that is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.held, self.ended = "", False

    def push(self, piece: str) -> str:
        if self.ended:
            return ""
        text = self.held + piece
        certain = before_stop(text, self.stops)
        self.ended = len(certain) < len(text)
        kept = len(certain) if self.ended else len(text) - _open_end(text, self.stops)
        self.held = "" if self.ended else text[kept:]
        return text[:kept]

    def finish(self) -> str:
        held, self.held = self.held, ""
        return held


class StopTrimmer:
    """Writes pieces of text with their fates up to the first stop string. Rejected drafts keep their places in between."""

    def __init__(self, stops: Sequence[str], write: Callable[[str, Fate], object]) -> None:
        self._cutter, self._write, self._pieces = StopCutter(stops), write, FatePieces()

    def push(self, piece: str, fate: Fate = "target") -> None:
        if not self._cutter.ended:
            self._pieces.add(piece, fate)
            self._pass_on(self._cutter.push("" if fate == "rejected" else piece))

    def finish(self) -> None:
        self._pass_on(self._cutter.finish())

    def _pass_on(self, text: str) -> None:
        for piece, fate in self._pieces.take(len(text)):
            self._write(piece, fate)
