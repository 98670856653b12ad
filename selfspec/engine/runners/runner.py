"""How a round's rows are run: one protocol with two implementations, eager and captured as CUDA graphs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, get_args

import torch
from torch import Tensor

from layerskip_models.kv_cache import KVCache
from policies import ObservationSpec, Policy
from selfspec.engine.hidden_states import HiddenStates
from selfspec.engine.results import RoundResult
from selfspec.engine.sampling import Sampler

if TYPE_CHECKING:
    from collections.abc import Sequence

_AS_IT_IS = nullcontext()


class CaptureError(RuntimeError):
    """Work could not be captured or replayed, or a replay gave other numbers than the work itself. The message says why.

    Eager passes can go on where captured ones were.
    """


RunnerName = Literal["eager", "captured"]
RunnerChoice = Literal["auto", "eager", "captured"]


def resolve_runner(runner: str, device: torch.device) -> RunnerName:
    """The runner by name: "auto" is captured on CUDA and eager elsewhere. ValueError with the choices for another name."""
    if runner not in get_args(RunnerChoice):
        raise ValueError(f"runner must be one of {', '.join(get_args(RunnerChoice))}, got {runner!r}")
    if runner == "auto":
        return "captured" if device.type == "cuda" else "eager"
    return "captured" if runner == "captured" else "eager"


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Within it a CUDA device is the current one, whose streams and events are meant where none is named."""
    return torch.cuda.device(device) if device.type == "cuda" else _AS_IT_IS


@dataclass(slots=True, kw_only=True, eq=False)  # not frozen: made in every round, and that costs four times as much
class SequenceRound:
    """One text's part in a round.

    cache: of the text; it holds length - 1 rows. tokens: int64 [1, capacity]; the first `length` are committed, the last of
    them is `pending`, not yet run; drafts are written after them. remaining: tokens that may still be committed.
    exit_layer, max_speculations: of the plan; None and 0 if nothing is drafted. copied: tokens that were copied from the
        text, to be looked at after exit_layer layers, or to be verified; match_length: how many before them are alike.
    eos: ends a draft. states: sees hidden states on the policy's behalf, None if it does not look at any in this round.
    learns: whether the round is learned from; learns_next: whether the one after it will be.
    """

    cache: KVCache
    tokens: Tensor
    length: int
    pending: int
    remaining: int
    exit_layer: int | None
    max_speculations: int
    sampler: Sampler
    policy: Policy
    observes: ObservationSpec
    eos: frozenset[int]
    states: HiddenStates | None
    learns: bool
    learns_next: bool
    copied: Sequence[int] = ()
    match_length: int = 0

    @property
    def greedy(self) -> bool:
        """Whether tokens are the model's own choices, with no logits processor: then nobody needs logits."""
        return not self.sampler.do_sample and not self.sampler.processors

    @property
    def most_rows(self) -> int:
        """Rows that the round may come to: of the pending token and of every draft."""
        return 1 + len(self.copied) + self.max_speculations


class Runner(Protocol):
    """Steps 2 to 4 of a round, called in this order, for the turns of all texts at hand.

    copies: whether drafts may be copied from the text.
    """

    copies: bool

    def draft(self, seq_rounds: Sequence[SequenceRound]) -> None:
        """Draft as far as each plan and each policy say. A turn without an exit layer drafts nothing."""
        ...

    def verify(self, seq_rounds: Sequence[SequenceRound]) -> None:
        """Run every row through the layers that it lacks, and the head."""
        ...

    def accept(self, seq_rounds: Sequence[SequenceRound]) -> list[RoundResult]:
        """Return which drafts are accepted and the token that follows, sequence by sequence."""
        ...

    def learning(self) -> AbstractContextManager[None]:
        """Within it the last round is learned from."""
        ...

    def states(self, states: HiddenStates, rows: int) -> HiddenStates:
        """Return what keeps hidden states in a round of `rows` rows: `states` itself, or the runner's own buffers."""
        ...

    def clear(self) -> None:
        """A text broke off on NaN: make sure that no later text sees them."""
        ...
