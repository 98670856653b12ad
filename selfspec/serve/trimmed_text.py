"""Tokens to text as they come, cut before the first stop string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria

from selfspec.detokenize import IncrementalDecoder, StopCutter, before_stop

_FEW = 64
"""Most pending tokens that are searched for a stop string, since all of them are decoded again for every token."""


class Stops:
    """Strings that end a text, the same for all texts of a request.

    min_tokens: in the text of this many first tokens they are not looked for. special: special tokens with their texts, which
    an answer does not show, but which can complete a stop string.
    marks: for the special tokens that occur in the strings, a character that no text has.
    """

    def __init__(
        self, texts: Sequence[str] = (), min_tokens: int = 0, special: Mapping[int, str] | None = None
    ) -> None:
        self.min_tokens, self.marks = min_tokens, dict[int, str]()
        marked = [*texts]
        for token, text in sorted((special or {}).items(), key=lambda one: -len(one[1])):
            if text and any(text in stop for stop in marked):
                self.marks[token] = chr(0xD800 + len(self.marks))  # half a character
                marked = [stop.replace(text, self.marks[token]) for stop in marked]
        self.texts = tuple(dict.fromkeys([*texts, *marked]))


class TrimmedText:
    """The text of one answer, cut before the first stop string. prompt: the ids that it follows."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Stops, prompt: Sequence[int] = ()) -> None:
        self._uncut, self._marks = stops.min_tokens, stops.marks
        self._unmarked = {ord(mark): None for mark in stops.marks.values()}
        self._decoder, self._cutter = IncrementalDecoder(tokenizer, prompt), StopCutter(stops.texts)

    @property
    def ended(self) -> bool:
        """Whether a stop string has come. What `push` and `finish` returned ends before it."""
        return self._cutter.ended

    def push(self, tokens: Sequence[int]) -> str:
        uncut, self._uncut = self._uncut, max(0, self._uncut - len(tokens))
        first = self._decoder.push(tokens[:uncut]) if uncut else ""
        text, start = "", uncut
        for place in range(uncut, len(tokens) if self._marks else 0):
            if (mark := self._marks.get(tokens[place])) is not None:
                text += self._cutter.push(self._decoder.push(tokens[start:place]) + mark)
                start = place
        text += self._cutter.push(self._decoder.push(tokens[start:]))
        return first + text.translate(self._unmarked)

    def finish(self) -> str:
        text = self._cutter.push(self._decoder.finish()) + self._cutter.finish()
        return text.translate(self._unmarked)

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

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Stops, prompt_length: int) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._text: TrimmedText | None = None
        self._prompt_length = self._seen = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> bool:
        if self._text is None or input_ids.shape[1] <= self._seen:  # a round failed, and its tokens were not committed
            prompt, self._seen = input_ids[0, : self._prompt_length].tolist(), self._prompt_length
            self._text = TrimmedText(self._tokenizer, self._stops, prompt)
        self._text.push(input_ids[0, self._seen :].tolist())
        self._seen = input_ids.shape[1]
        return self._text.ends_here
