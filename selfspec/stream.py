"""The new text as an iterator: `for piece in generator.stream(prompt)`."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

from selfspec.engine.call import Call, TextTokens
from selfspec.engine.engine import GenerationResult
from selfspec.streaming import IncrementalDecoder


class GenerationStream(Iterator[str | list[int]]):
    """What `SelfSpecGenerator.stream` returns. A round is run when its piece is asked for, in the caller's thread.

    Pieces are text, or lists of token ids from a generator without a tokenizer; put together they are `result.text` or
    `result.new_tokens`. Leaving the loop early (`break`, an exception) or `close` ends the generation. In a `with` statement
    that happens at its end at the latest, without one when the stream is garbage collected.
    result: what `generate` would have returned; None until the last piece was read, and for a text that broke off.
    """

    def __init__(self, call: Call) -> None:
        self.result: GenerationResult | None = None
        self._call = call
        self._rounds = call.rounds()
        self._pieces = self._texts(call) if call.checked.tokenizer is not None else self._ids()

    def __iter__(self) -> GenerationStream:
        return self

    def __next__(self) -> str | list[int]:
        """The next piece, never an empty one. A text piece ends with a complete character."""
        try:
            return next(self._pieces)
        except StopIteration:
            self.result = self._call.result
            raise
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the generation here. What the call held is free for others; there are no more pieces."""
        self._rounds.close()
        self._pieces = iter(())

    def __enter__(self) -> GenerationStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ids(self) -> Iterator[str | list[int]]:
        return (block for block, _ in self._rounds)

    def _texts(self, call: Call) -> Iterator[str | list[int]]:
        assert call.checked.tokenizer is not None
        return _pieces(self._rounds, IncrementalDecoder(call.checked.tokenizer))

    def __repr__(self) -> str:
        return f"GenerationStream({'open' if self.result is None else repr(self.result)})"


def _pieces(rounds: Iterator[TextTokens], decoder: IncrementalDecoder) -> Iterator[str]:
    for block, _ in rounds:
        text = decoder.push(block)
        if text:
            yield text
    rest = decoder.finish()
    if rest:
        yield rest
