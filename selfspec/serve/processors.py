"""Logits processors of a request: OpenAI's penalties and biases, and one that keeps log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessor

from layerskip_models import LayerSkipModel

_ROWS = 64  # of a prompt whose logits are in memory at once


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


class BiasProcessor(LogitsProcessor):
    """logit_bias: adds to the logits of given tokens. -100 practically forbids a token, 100 forces it.

    Raises ValueError for an id outside the vocabulary.
    """

    def __init__(self, bias: Mapping[str, float], vocab_size: int, device: torch.device) -> None:
        for key in bias:
            if not key.isascii() or not key.isdecimal() or int(key) >= vocab_size:
                raise ValueError(f"logit_bias: {key!r} is no token id in [0, {vocab_size - 1}], the model's vocabulary")
        self._bias = torch.zeros(1, vocab_size, dtype=torch.float32)
        self._bias[0, [int(key) for key in bias]] = torch.tensor([*bias.values()], dtype=torch.float32)
        self._bias = self._bias.to(device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores: [1, vocab]. Returns the biased scores."""
        return scores + self._bias


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its natural log-probability, and the most likely tokens at its position with theirs, best first.

    logprob: None for the first token of a prompt.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


def _token_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> list[TokenLogprob]:
    """logits: [n, vocab], those that the tokens were chosen from. tokens: int64 [n]."""
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(-1, tokens[:, None])[:, 0]
    values, ids = logprobs.topk(num_top)
    return [
        TokenLogprob(token, logprob, tuple(zip(*top)))
        for token, logprob, *top in zip(tokens.tolist(), chosen.tolist(), ids.tolist(), values.tolist())
    ]


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
    """Log-probabilities of a prompt's tokens, computed while the prompt is read (as `Request.watch_prompt`).

    tokens: one for each token of the prompt.
    """

    def __init__(self, model: LayerSkipModel, prompt: Tensor, num_top: int) -> None:
        self._model, self._prompt, self._num_top = model, prompt, num_top
        self.tokens = [TokenLogprob(int(prompt[0]), None, ())]

    def __call__(self, first: int, hidden: Tensor) -> None:
        """hidden: [rows, hidden], the last layer's output for the prompt's rows from position `first` on."""
        targets = self._prompt[first + 1 : first + 1 + hidden.shape[0]].to(hidden.device)
        for rows, following in zip(hidden[: targets.numel()].split(_ROWS), targets.split(_ROWS)):
            self.tokens += _token_logprobs(self._model.logits(rows), following, self._num_top)
