"""Log-probabilities of the generated tokens, read from the passes that verified them: nothing is computed twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import LogitsProcessor

from layerskip_models import LayerSkipModel

_ROWS = 64  # of a prompt whose logits are in memory at a time


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its natural log-probability, and the likeliest tokens at its place with theirs, best first.

    logprob: None for the first token of a prompt, which nothing precedes.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


class LogprobRecorder(LogitsProcessor):
    """Changes nothing, and remembers the model's logits for each place of the text. Must be the first processor.

    Drafts write the draft's logits first. Verification writes the full model's over them before a token is committed, so
    what stands at a committed place is the full model's, before temperature, penalties and biases.
    """

    def __init__(self, prompt_length: int, num_top: int) -> None:
        self._next, self._num_top = prompt_length, num_top
        self._rows: dict[int, Tensor] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids: int64 [1, n]. scores: [1, vocab], returned as they are."""
        self._rows[input_ids.shape[1]] = scores[0].clone()
        return scores

    def __reduce__(self) -> tuple[Callable[[], LogitsProcessor], tuple[()]]:
        """In another process that decodes the same text, nobody reads what would be remembered."""
        return _Unchanged, ()

    def committed(self, tokens: Sequence[int]) -> list[TokenLogprob]:
        """The log-probabilities of tokens that were committed now. Called once for each block, in order."""
        found = []
        for token in tokens:
            logprobs = self._rows.pop(self._next).float().log_softmax(dim=-1)
            values, ids = logprobs.topk(self._num_top)
            top = tuple(zip(ids.tolist(), values.tolist()))
            found.append(TokenLogprob(token, float(logprobs[token]), top))
            self._next += 1
        self._rows = {place: row for place, row in self._rows.items() if place >= self._next}
        return found


class PromptLogprobs:
    """Log-probabilities of a prompt's tokens, worked out as the prompt is read: `Request.watch_prompt` calls it.

    tokens: one for each token of the prompt, once it is read.
    """

    def __init__(self, model: LayerSkipModel, prompt: Tensor, num_top: int) -> None:
        self._model, self._prompt, self._num_top = model, prompt, num_top
        self.tokens = [TokenLogprob(int(prompt[0]), None, ())]

    def __call__(self, first: int, hidden: Tensor) -> None:
        """hidden: [rows, hidden], what the last layer put out for the prompt's rows from position `first` on."""
        targets = self._prompt[first + 1 : first + 1 + hidden.shape[0]].to(hidden.device)
        for rows, following in zip(hidden[: targets.numel()].split(_ROWS), targets.split(_ROWS)):
            logprobs = self._model.logits(rows).float().log_softmax(dim=-1)
            chosen = logprobs.gather(-1, following[:, None])[:, 0].tolist()
            values, ids = logprobs.topk(self._num_top)
            for token, logprob, top in zip(following.tolist(), chosen, zip(ids.tolist(), values.tolist())):
                self.tokens.append(TokenLogprob(token, logprob, tuple(zip(*top))))


class _Unchanged(LogitsProcessor):
    """Stands where a recorder does on rank 0."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores
