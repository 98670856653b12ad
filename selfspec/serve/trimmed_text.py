"""Tokens to text as they come, cut before the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria

from selfspec.stop_text import before_stop, open_end
from selfspec.streaming import IncrementalDecoder

_FEW = 64
"""Tokens without text yet that are looked at for a stop string: decoding more with each of them would take ever longer."""


class TrimmedText:
    """The text of one answer. Text that may be the beginning of a stop string is held back until that is decided.

    min_tokens: in the text of so many first tokens no stop string is looked for.
    ended: whether a stop string has come. What `push` and `finish` returned, put together, ends before it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], min_tokens: int = 0) -> None:
        self._uncut = min_tokens
        self._decoder = IncrementalDecoder(tokenizer)
        self._stops = stops
        self._held = ""
        self.ended = False

    def push(self, tokens: Sequence[int]) -> str:
        """The text that is now certain."""
        uncut, self._uncut = self._uncut, max(0, self._uncut - len(tokens))
        first = self._decoder.push(tokens[:uncut]) if uncut else ""
        return first + self._cut(self._decoder.push(tokens[uncut:]))

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        return self._cut(self._decoder.finish()) + self._release()

    @property
    def ends_here(self) -> bool:
        """Whether a stop string has come if no token follows: bytes are looked at as if no more of them came."""
        if self.ended or self._uncut or not 0 < self._decoder.num_pending <= _FEW:
            return self.ended
        text = self._held + self._decoder.peek([])
        return len(before_stop(text, self._stops)) < len(text)

    def _cut(self, piece: str) -> str:
        if not self._stops:
            return piece
        if self.ended:
            return ""
        text = self._held + piece
        certain = before_stop(text, self._stops)
        if len(certain) < len(text):
            self.ended, self._held = True, ""
            return certain
        kept = len(text) - open_end(text, self._stops)
        self._held = text[kept:]
        return text[:kept]

    def _release(self) -> str:
        held, self._held = self._held, ""
        return held


class StopTexts(StoppingCriteria):
    """Ends a text at the token that completes a stop string. For one text: it reads each committed token once.

    transformers' StopStringCriteria gives the same stops, but first goes through the whole vocabulary for every new set of
    strings, which a server that takes them from its clients cannot afford.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], prompt_length: int, min_tokens: int = 0
    ) -> None:
        self._tokenizer, self._stops, self._min_tokens = tokenizer, stops, min_tokens
        self._text = TrimmedText(tokenizer, stops, min_tokens)
        self._prompt_length = self._seen = prompt_length
        self._answers = torch.tensor([False], device="cpu"), torch.tensor([True], device="cpu")

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        """Whether the text, int64 [1, n], holds a stop string; bool [1]."""
        if input_ids.shape[1] <= self._seen:  # a round broke off behind tokens that were not committed after all
            self._text, self._seen = TrimmedText(self._tokenizer, self._stops, self._min_tokens), self._prompt_length
        self._text.push(input_ids[0, self._seen :].tolist())
        self._seen = input_ids.shape[1]
        return self._answers[self._text.ends_here]
