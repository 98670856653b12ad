"""One call of `generate` or `stream`: an engine with one text."""

from __future__ import annotations

from collections.abc import Generator

from policies import RoundRecord
from selfspec.engine.engine import BoundRequest, Engine, GenerationResult

TextTokens = tuple[list[int], RoundRecord | None]
"""Tokens that prefill or a round committed, and the round's record; prefill has none."""


class Call:
    """Runs one checked call. It keeps the model that it began with, and a KV cache that no other call has, to its end."""

    def __init__(self, checked: BoundRequest) -> None:
        self.checked = checked
        self.result: GenerationResult | None = None

    def rounds(self) -> Generator[TextTokens]:
        """Yield the committed tokens of prefill (its record is None) and of every round; then `result` is set.

        Whoever does not exhaust it must close it, which ends the call.
        """
        with Engine() as engine:
            engine.join(self.checked)
            while len(engine):
                for progress in engine.step():
                    if progress.error is not None:
                        raise progress.error
                    self.result = progress.result
                    yield progress.tokens, progress.record
