"""The new text as an iterator: `for piece in generator.stream(prompt)`."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING

from selfspec.detokenize import IncrementalDecoder
from selfspec.engine.engine import BoundRequest, run_calls
from selfspec.engine.results import GenerationResult, StepOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class GenerationStream(Iterator[str | list[int]]):
    """The iterator that `SelfSpecGenerator.stream` returns. A round runs in the caller's thread when its piece is asked for.

    Pieces are text, or lists of token ids if the generator has no tokenizer; joined they are `result.new_tokens`, or what
    these add to the prompt's text: `result.text`, and perhaps a space before it, which SentencePiece tokenizers strip from a
    text that is decoded by itself. `close`, the end of a `with` statement, or garbage collection of the stream ends the
    generation. Leaving a loop early ends it only if nothing else holds the stream: where you keep it, use `with`. Until the
    end its policy is in use, and another call gets a copy.
    result: what `generate` would have returned; None until the last piece was read, and for a text that broke off.
    """

    def __init__(self, call: BoundRequest) -> None:
        self.result: GenerationResult | None = None
        self._steps = run_calls([call])
        self._pieces: Iterator[str | list[int]] = _pieces(self._steps, call.tokenizer, call.request.prompt.tolist())

    def __iter__(self) -> GenerationStream:
        return self

    def __next__(self) -> str | list[int]:
        """Return the next piece, never an empty one. A text piece ends with a complete character."""
        try:
            return next(self._pieces)
        except StopIteration as end:
            self.result = end.value or self.result
            raise
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the generation here and free what it held. No more pieces come."""
        self._steps.close()
        self._pieces = iter(())

    def __enter__(self) -> GenerationStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"GenerationStream({'open' if self.result is None else repr(self.result)})"


def _pieces(
    steps: Iterator[StepOutput], tokenizer: PreTrainedTokenizerBase | None, prompt: Sequence[int]
) -> Generator[str | list[int], None, GenerationResult | None]:
    """No method of the stream: a reference to it would delay its garbage collection."""
    decoder = None if tokenizer is None else IncrementalDecoder(tokenizer, prompt)
    result = None
    for step in steps:
        result = step.result
        piece = step.tokens if decoder is None else decoder.push(step.tokens)
        if piece:
            yield piece
    rest = "" if decoder is None else decoder.finish()
    if rest:
        yield rest
    return result
