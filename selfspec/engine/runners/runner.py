"""What a runner is: it runs rows of sequences through layers, and the head if asked. It neither drafts nor verifies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.choices import Detail, HeadOutput
from layerskip_models.kv_cache import KVCache
from policies import ObservationSpec, Policy
from selfspec.engine.hidden_states import HiddenStates
from selfspec.engine.sampling import Sampler

if TYPE_CHECKING:
    from collections.abc import Sequence

Head = Literal["draft", "full"]
"""The draft head (after an exit, whose adapter the rows pass first), or the full model's head."""


@dataclass(slots=True, kw_only=True, eq=False)  # not frozen: made in every round, and that costs four times as much
class SequenceRound:
    """One sequence's part in a round.

    cache: holds length - 1 rows. tokens: int64 [1, capacity]; the first `length` are committed, and the last of them is
        `pending`, which no layer has seen yet. Drafts are written after them.
    exit_layer, max_speculations, bits: of the plan; None and 0 if nothing is drafted. copied: tokens copied from earlier
        text, to be verified at once.
    eos: ends a draft. states: keeps hidden states for the policy; None if it looks at none in this round.
    learns: whether the policy learns from the round. steering: of steered exits, by the row that was verified last.
    """

    cache: KVCache
    tokens: Tensor
    length: int
    pending: int
    exit_layer: int | None
    max_speculations: int
    sampler: Sampler
    policy: Policy
    observes: ObservationSpec
    eos: frozenset[int]
    states: HiddenStates | None
    learns: bool
    copied: Sequence[int] = ()
    bits: int | None = None
    steering: Tensor | None = None

    @property
    def max_rows(self) -> int:
        """Rows that the round may come to: the pending token and every draft."""
        return 1 + len(self.copied) + self.max_speculations


class RowBuffers:
    """Memory for the rows of one sequence, which later rounds use again, so that the loop allocates no large tensor.

    hidden: [rows, hidden].
    """

    def __init__(self, model: LayerSkipModel, hidden: Tensor) -> None:
        self._model, self.hidden = model, hidden
        self._q = torch.empty(0, dtype=torch.float32, device=model.device)

    def q(self, rows: int) -> Tensor:
        """Return the distributions that drafts are drawn from, float32 [rows or more, vocab]."""
        if self._q.shape[0] < rows:
            size = rows, self._model.vocab_size
            self._q = torch.empty(*size, dtype=torch.float32, device=self._model.device)
        return self._q


class SequenceRows:
    """The rows of one sequence in a round, of which a runner runs [first, end). Row 0 is the pending token, row i draft i.

    tokens: of all rows so far. hidden: [rows, hidden], each row's output of the layers that it has passed.
    exit_layer: 0 without an exit. detail: what to compute of a row at the exit.
    outputs: what the head said of rows [first, end). logits: float32 [end - first, vocab], where tokens are sampled or
        processed; the next run may overwrite them. Then `outputs` may be empty.
    """

    __slots__ = (
        "detail", "end", "exit_layer", "first", "greedy", "hidden", "logits", "outputs", "seq_round",
        "tokens",
    )  # fmt: skip

    def __init__(self, seq_round: SequenceRound, hidden: Tensor, detail: Detail) -> None:
        self.seq_round, self.hidden, self.detail = seq_round, hidden, detail
        self.exit_layer = seq_round.exit_layer or 0
        self.tokens: list[int] = [seq_round.pending, *seq_round.copied]
        self.first, self.end = 0, len(self.tokens)
        # Tokens are the model's own choices, with no logits processor: then nobody needs logits.
        self.greedy = not seq_round.sampler.do_sample and not seq_round.sampler.processors
        self.outputs: Sequence[HeadOutput] = ()
        self.logits: Tensor | None = None


class Runner(Protocol):
    """Runs rows of sequences."""

    @property
    def model(self) -> LayerSkipModel: ...

    def buffers(self, index: int, rows: int) -> RowBuffers:
        """Memory for the sequence of this index in the round, which may come to `rows` rows."""
        ...

    def run(self, groups: Sequence[SequenceRows], start: int, stop: int, head: Head | None) -> None:
        """Run rows through layers [start, stop), and then the head on them.

        Rows follow those that each cache holds for these layers. From layer 0 on, they begin as their tokens; else with
        `hidden`, which then holds the output, unless the full head follows. Sets `outputs` or `logits` if there is a head.
        start may equal stop.
        """
        ...

    def rounded(self, bits: int) -> Runner:
        """Return what runs rows through the model's weights in 8 or 4 bits, on the same caches and buffers.

        Raises ValueError where this runner cannot (`layerskip_models.draft_weights`).
        """
        ...
