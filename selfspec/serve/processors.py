"""What a request adds to generation: penalties, biases, log-probabilities and stop strings; and text cut before those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase, SequenceBiasLogitsProcessor, StoppingCriteria

from layerskip_models import LayerSkipModel
from selfspec.detokenize import IncrementalDecoder, StopCutter, before_stop

_ROWS = 64  # of a prompt whose logits are in memory at once
_FEW = 64
"""Most pending tokens that are searched for a stop string, since all of them are decoded again for every token."""


class PenaltyProcessor(LogitsProcessor):
    """presence_penalty and frequency_penalty, counted over the generated tokens.

    A token that was generated c > 0 times loses presence + c * frequency of its logit.
    Source: OpenAI's API reference, "frequency and presence penalties".
    """

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self._presence, self._frequency, self._prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids: int64 [1, n]. scores: [1, vocab]. Returns the penalised scores."""
        tokens, counts = input_ids[0, self._prompt_length :].unique(return_counts=True)
        if tokens.numel() == 0:
            return scores
        penalties = self._presence + self._frequency * counts.to(scores.dtype)
        return scores.index_add(-1, tokens, -penalties.unsqueeze(0))


def bias_processor(bias: Mapping[str, float], vocab_size: int) -> SequenceBiasLogitsProcessor:
    """logit_bias: adds to the logits of given tokens. Raises ValueError for an id outside the vocabulary."""
    for key in bias:
        if not key.isascii() or not key.isdecimal() or int(key) >= vocab_size:
            raise ValueError(f"logit_bias: {key!r} is no token id in [0, {vocab_size - 1}], the model's vocabulary")
    return SequenceBiasLogitsProcessor({(int(key),): value for key, value in bias.items()})


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its natural log-probability (None for a prompt's first), and the likeliest tokens there, best first."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


def _token_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> list[TokenLogprob]:
    """logits: [n, vocab], those that the tokens were chosen from. tokens: int64 [n]."""
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(-1, tokens[:, None])[:, 0]
    values, ids = logprobs.topk(num_top)
    rows = zip(*(column.tolist() for column in (tokens, chosen, ids, values)))
    return [TokenLogprob(token, logprob, tuple(zip(*top))) for token, logprob, *top in rows]


class LogprobRecorder(LogitsProcessor):
    """Keeps the model's logits for each position of the text, and changes nothing. Must be the first processor.

    Drafting writes the exit's logits first; verification replaces them by the full model's before a token is committed. So
    the logits of a committed position are the full model's, before temperature, penalties and biases.
    """

    def __init__(self, prompt_length: int, num_top: int) -> None:
        self._next, self._num_top = prompt_length, num_top
        self._rows: dict[int, Tensor] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids: int64 [1, n]. scores: [1, vocab], returned as they are."""
        self._rows[input_ids.shape[1]] = scores[0].clone()
        return scores

    def committed(self, tokens: Sequence[int]) -> list[TokenLogprob]:
        """Give the log-probabilities of newly committed tokens, at least one. Call it once for each block, in order."""
        first, self._next = self._next, self._next + len(tokens)
        rows = torch.stack([self._rows[place] for place in range(first, self._next)])
        self._rows = {place: row for place, row in self._rows.items() if place >= self._next}
        return _token_logprobs(rows, torch.tensor(tokens, device=rows.device), self._num_top)


class PromptLogprobs:
    """Log-probabilities of all of a prompt's tokens, computed while it is read (as `Request.watch_prompt`)."""

    def __init__(self, model: LayerSkipModel, prompt: Tensor, num_top: int) -> None:
        self._model, self._prompt, self._num_top = model, prompt, num_top
        self.tokens = [TokenLogprob(int(prompt[0]), None, ())]

    def __call__(self, first: int, hidden: Tensor) -> None:
        """hidden: [rows, hidden], the last layer's output for the prompt's rows from position `first` on."""
        targets = self._prompt[first + 1 : first + 1 + hidden.shape[0]].to(hidden.device)
        for rows, following in zip(hidden[: targets.numel()].split(_ROWS), targets.split(_ROWS)):
            self.tokens += _token_logprobs(self._model.logits(rows), following, self._num_top)


class Stops:
    """Strings that end a text, the same for all texts of a request.

    min_tokens: in the text of this many first tokens they are not looked for. special: special tokens with their texts, which
    an answer does not show, but which can complete a stop string.
    marks: for the special tokens that occur in the strings, a character that no text has. originals: the strings, by what is
    looked for in their place.
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
        self.originals = {**dict(zip(marked, texts)), **{text: text for text in texts}}
        self.texts = tuple(dict.fromkeys([*texts, *marked]))


class TrimmedText:
    """The text of one answer, cut before the first stop string. prompt: the ids that it follows."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Stops, prompt: Sequence[int] = ()) -> None:
        self._uncut, self._marks, self._originals = stops.min_tokens, stops.marks, stops.originals
        self._unmarked = {ord(mark): None for mark in stops.marks.values()}
        self._decoder, self._cutter = IncrementalDecoder(tokenizer, prompt), StopCutter(stops.texts)

    @property
    def ended(self) -> bool:
        """Return whether a stop string has come. What `push` and `finish` returned ends before it."""
        return self._cutter.ended

    @property
    def found(self) -> str | None:
        """Return the stop string that has come."""
        return self._originals.get(self._cutter.found)

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
        """Return whether a stop string has come if no token follows, with incomplete characters decoded as they are."""
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
