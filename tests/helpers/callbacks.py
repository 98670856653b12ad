"""What a caller hands over, for tests: streamers, logits processors and stopping criteria that watch, stop or fail."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from policies import RoundRecord


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.values: list[Tensor] = []
        self.records: list[RoundRecord] = []
        self.ends = 0

    @property
    def pieces(self) -> list[list[int]]:
        return [value.tolist() for value in self.values]

    def put(self, value: Tensor) -> None:
        assert value.dtype == torch.int64
        assert value.dim() == 1
        self.values.append(value)

    def on_round(self, record: RoundRecord) -> None:
        self.records.append(record)

    def end(self) -> None:
        self.ends += 1


class Acting(Recorder):
    """Calls something at its n-th `put`; the first one brings the prompt."""

    def __init__(self, at: int, action: Any) -> None:
        super().__init__()
        self.at, self.action = at, action

    def put(self, value: Tensor) -> None:
        super().put(value)
        if len(self.values) == self.at:
            self.action()


class StopAt(StoppingCriteria):
    """Holds once the text has some length, or raises an error then; writes down every prefix it is shown."""

    def __init__(self, length: int, error: Exception | None = None) -> None:
        self.length, self.error = length, error
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen.append(input_ids[0].tolist())
        if self.error is not None and input_ids.shape[1] >= self.length:
            raise self.error
        return torch.tensor([input_ids.shape[1] >= self.length])


class Spoiling(LogitsProcessor):
    """Spoils the scores of texts of some length and longer: "masked", "nan", "infinite", or an error is raised.

    "fewer": leaves some out for every second text.
    """

    def __init__(self, length: int, how: str = "raises") -> None:
        self.length, self.how = length, how

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] < self.length:
            return scores
        if self.how == "raises":
            raise ZeroDivisionError("a fault of a processor")
        if self.how == "fewer":
            return scores[:, :5] if input_ids.shape[1] % 2 else scores
        if self.how == "infinite":
            return scores.masked_fill(scores == scores.max(), torch.inf)
        return torch.full_like(scores, torch.nan if self.how == "nan" else -torch.inf)


class Grammar(LogitsProcessor):
    """Raises for every text whose new tokens are not the beginning of one text."""

    def __init__(self, start: int, text: list[int]) -> None:
        self.start, self.text = start, text

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        new = input_ids[0, self.start :].tolist()
        if new != self.text[: len(new)]:
            raise ValueError(f"{new} is not in this language")
        return scores


class Spy(LogitsProcessor):
    """Writes down the text that it is shown with every row, and what it does with it makes the output depend on it."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.shape[0] == scores.shape[0] == 1
        self.seen.append(tuple(input_ids[0].tolist()))
        scores[0, int(input_ids.sum()) % scores.shape[1]] += 3.0
        return scores


class InDtype(LogitsProcessor):
    """Returns scores in another floating type, as processors do that compute in it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.to(self.dtype)
