"""OpenAI's penalties and biases as logits processors: pure functions of the text so far."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import LogitsProcessor


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
