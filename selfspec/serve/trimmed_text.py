"""Tokens to text as they come, cut before the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria

from selfspec.stop_text import StopCutter, before_stop
from selfspec.streaming import IncrementalDecoder

_FEW = 64
"""Most pending tokens that are searched for a stop string, since all of them are decoded again for every token."""


class TrimmedText:
    """The text of one answer, cut before the first stop string.

    min_tokens: in the text of this many first tokens no stop string is looked for. prompt: the ids that it follows.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], min_tokens: int = 0, prompt: Sequence[int] = ()
    ) -> None:
        self._uncut = min_tokens
        self._decoder, self._cutter = IncrementalDecoder(tokenizer, prompt), StopCutter(stops)

    @property
    def ended(self) -> bool:
        """Whether a stop string has come. What `push` and `finish` returned ends before it."""
        return self._cutter.ended

    def push(self, tokens: Sequence[int]) -> str:
        uncut, self._uncut = self._uncut, max(0, self._uncut - len(tokens))
        first = self._decoder.push(tokens[:uncut]) if uncut else ""
        return first + self._cutter.push(self._decoder.push(tokens[uncut:]))

    def finish(self) -> str:
        return self._cutter.push(self._decoder.finish()) + self._cutter.finish()

    @property
    def ends_here(self) -> bool:
        """Whether a stop string has come if no token follows, with incomplete characters decoded as they are."""
        if self.ended or self._uncut or not 0 < self._decoder.num_pending <= _FEW:
            return self.ended
        text = self._cutter.held + self._decoder.peek([])
        return len(before_stop(text, self._cutter.stops)) < len(text)


class StopTexts(StoppingCriteria):
    """Ends a text at the token that completes a stop string. For one text: it reads each committed token once.

    transformers' StopStringCriteria ends at the same tokens, but first processes the whole vocabulary for every new set of
    strings. That is too slow for a server whose clients choose them.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], prompt_length: int, min_tokens: int = 0
    ) -> None:
        self._tokenizer, self._stops, self._min_tokens = tokenizer, stops, min_tokens
        self._text: TrimmedText | None = None
        self._prompt_length = self._seen = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> bool:
        if self._text is None or input_ids.shape[1] <= self._seen:  # a round failed, and its tokens were not committed
            prompt, self._seen = input_ids[0, : self._prompt_length].tolist(), self._prompt_length
            self._text = TrimmedText(self._tokenizer, self._stops, self._min_tokens, prompt)
        self._text.push(input_ids[0, self._seen :].tolist())
        self._seen = input_ids.shape[1]
        return self._text.ends_here
