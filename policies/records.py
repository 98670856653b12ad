"""What the engine and a policy tell each other: what a policy asks for, what it plans, and what a round came to.

Records of numbers, never the model: ten of them test a policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

StopCause = Literal["cap", "before_draw", "after_draw", "eos", "none"]
Copies = Literal["none", "welcome", "needed"]


class Drafter(NamedTuple):
    """The part of the model that makes drafts; tables of acceptance have a row for each.

    exit_layer: layers that a draft goes through; all of them only in fewer bits. bits: of their weights, 8 or 4; None for the
    weights as loaded.
    """

    exit_layer: int
    bits: int | None = None

    def __str__(self) -> str:
        """Name it in a table: "exit 3" or "8 bits"."""
        return f"exit {self.exit_layer}" if self.bits is None else f"{self.bits} bits"

    @property
    def saved_key(self) -> int:
        """Return how saved states name it: 3 is exit 3, and -8 is 8 bits."""
        return self.exit_layer if self.bits is None else -self.bits


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationSpec:
    """What a policy asks the engine to compute; everything costs time, so the default is nothing.

    confidence: top-1 probability of the *unfiltered* draft distribution at temperature 1.
    entropy: of that same distribution, in nats.
    exit_hidden: the hidden state at the exit layer of every draft row.
    features: log p1, log p1 - log p2 and entropy of every draft row's unfiltered distribution, as a tensor.
    context_layers: exit layers at which the hidden states of the whole text's rows are kept.
    probability: the one that each draft was drawn with, when sampling.
    shadow_layers: exit layers whose shadow tokens are computed after a round, each in [1, L-1].
    rejected_rows: shadow tokens also of rows behind the first rejected draft, as far as verification judged them.
    prompt_rows: how many of the last prompt positions get shadow tokens as well (DEL starts from 32).
    prompt_every: with fewer than prompt_rows * prompt_every tokens to come, proportionally fewer prompt rows; 0: always all.
    learn_every: shadow tokens of about one row in so many; 0: of the prompt's rows only. A round is learned from whole or not
        at all, so rows count, not rounds: a long round costs as much as many short ones.
    copies: whether plans may copy from the text; "welcome" where the engine can, "needed" if there is nothing without it.
    bits: that plans may draft in, ascending (`Plan.bits`).
    """

    confidence: bool = False
    entropy: bool = False
    exit_hidden: bool = False
    features: bool = False
    context_layers: tuple[int, ...] = ()
    probability: bool = False
    shadow_layers: tuple[int, ...] = ()
    rejected_rows: bool = False
    prompt_rows: int = 0
    prompt_every: int = 0
    learn_every: int = 1
    copies: Copies = "none"
    bits: tuple[int, ...] = ()

    def learns(self, rows_learned: int, rows_seen: int) -> bool:
        """Return whether to ask for shadow tokens in the coming round, given how many rows of the call have had them."""
        if not self.shadow_layers or not self.learn_every:
            return False
        return rows_learned * self.learn_every <= rows_seen

    def prompt_rows_for(self, num_prompt_tokens: int, max_new_tokens: int) -> int:
        """Return how many of the prompt's last rows get shadow tokens."""
        rows = min(self.prompt_rows, num_prompt_tokens) if self.shadow_layers else 0
        return min(rows, max_new_tokens // self.prompt_every) if self.prompt_every else rows

    def __or__(self, other: ObservationSpec) -> ObservationSpec:
        """Everything that either of the two asks for."""
        schedules = [n.learn_every for n in (self, other) if n.shadow_layers]
        often = [schedule for schedule in schedules if schedule] or schedules
        return ObservationSpec(
            confidence=self.confidence or other.confidence,
            entropy=self.entropy or other.entropy,
            exit_hidden=self.exit_hidden or other.exit_hidden,
            features=self.features or other.features,
            context_layers=tuple(sorted({*self.context_layers, *other.context_layers})),
            probability=self.probability or other.probability,
            shadow_layers=tuple(sorted({*self.shadow_layers, *other.shadow_layers})),
            rejected_rows=self.rejected_rows or other.rejected_rows,
            prompt_rows=max(self.prompt_rows, other.prompt_rows),
            prompt_every=min((n.prompt_every for n in (self, other) if n.prompt_rows), default=0),
            learn_every=min(often, default=1),
            copies=max(self.copies, other.copies, key=get_args(Copies).index),
            bits=tuple(sorted({*self.bits, *other.bits})),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The exit policy's decision for one round.

    exit_layer: in [1, L-1], or None: nothing is drafted. Without copies the round is then one autoregressive step.
    bits: of the weights that drafts are made with, 8 or 4; None for the model's own. Such a draft may go through all layers
        (exit_layer = L), and verification runs all layers for all rows, since none of them was computed in full.
    max_speculations: most tokens to draft, >= 0; the engine may lower it (budget, context), never raise it.
    copied: most tokens to copy from the text, >= 0, and then exit_layer must be None: they are verified at once. The engine
        may lower it, too.
    acceptance: the acceptance per drafter that the plan was made with, for the trace; None where none is estimated.
    learn: False if there is nothing to be gained from learning in this round, whatever `ObservationSpec` say.
    rest: rounds, this one included, in which nobody looks at the index of what may be copied.
    wave: of a looped model, the loops after which drafts are chosen while all rows go on through the loops, each of which
        may choose another draft; 0 for a round of drafts and then verification. Nothing else of the plan counts in a wave,
        and stopping policies are not asked.
    """

    exit_layer: int | None
    max_speculations: int
    bits: int | None = None
    copied: int = 0
    wave: int = 0
    acceptance: Mapping[Drafter, float] | None = None
    learn: bool = True
    rest: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundContext:
    """What is known before a round: its number, counted from 0, and how long the text is (tokens).

    batch_size: how many texts share the round's passes, this one included. A row costs less in a batch, and so does a draft
    gain less.
    match_length: how many of the last tokens occurred before, so that what followed can be copied; 0 if nothing can.
    """

    round_index: int
    num_committed: int
    remaining_tokens: int
    batch_size: int = 1
    match_length: int = 0


class ContextStates(Protocol):
    """The exit hidden states of one text's rows; another text has another object."""

    @property
    def max_length(self) -> int:
        """Rows that the text can come to."""
        ...

    def rows(self, exit_layer: int, start: int, stop: int) -> Tensor:
        """[stop - start, hidden], of the rows at these positions, which must be before the first row that is drafted from."""
        ...


class PreVerifier(Protocol):
    """What the stopping rule asks; the engine's is `selfspec.pacer.inference.PreVerification`."""

    @property
    def exit_layers(self) -> tuple[int, ...]:
        """The layers whose drafts it was trained on."""
        ...

    @property
    def defaults(self) -> Mapping[str, float]:
        """Its own best settings: exit_layer, and b, t, rho of the rule; any may be missing."""
        ...

    def estimate(
        self,
        context: ContextStates,
        exit_layer: int,
        position: int,
        first_index: int,
        hidden: Tensor,
        features: Tensor,
    ) -> list[float]:
        """Chance that each draft of a block is accepted (so all before it are), one pass over the block.

        position: of the row that produced the block's first draft. first_index: that draft's number in the round, from 1; the
        blocks of a round come in order. hidden [rows, hidden], features [rows, F]: of the rows that produced the drafts.
        """
        ...

    def pass_seconds(self, block: int) -> float:
        """Seconds that one pass over a block of this many drafts takes on this machine."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftRow:
    """A draft row before its token is drawn; everything in it is fixed by the rows before it.

    num_drafted: drafts kept so far in this round, j; the row would produce d_{j+1}.
    position: of the row in the text.
    confidence, entropy, exit_hidden [hidden], features [3], context: as in `ObservationSpec`, None unless asked for. The
    tensors stay as they are until the round is over. bits: as in `Plan`. probability: known once the token is drawn, so
    `stop_before_draw` never sees it; None when greedy.
    """

    num_drafted: int
    exit_layer: int
    position: int
    bits: int | None = None
    confidence: float | None = None
    entropy: float | None = None
    exit_hidden: Tensor | None = None
    features: Tensor | None = None
    context: ContextStates | None = None
    probability: float | None = None

    @property
    def drafter(self) -> Drafter:
        return Drafter(self.exit_layer, self.bits)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCost:
    """What a stopping policy itself ran in a round: layers loaded in addition to the model's, and seconds."""

    layers: int = 0
    seconds: float = 0.0

    def __add__(self, other: PolicyCost) -> PolicyCost:
        return PolicyCost(layers=self.layers + other.layers, seconds=self.seconds + other.seconds)


class Shadow(Protocol):
    """What candidate layers would have said for some rows, and what the full model said.

    Layers may be computed when they are asked for.
    layers: the exit layers, in the order of the tensors' first dimension.
    tokens: int64 [layers, rows], argmax of norm + head at each layer.
    confidences: float32 [layers, rows], probability of that argmax at that layer (unfiltered, temperature 1).
    target_tokens: int64 [rows], the full model's choice: its argmax, after processors in a round.
    acceptance_probabilities: float32 [layers, rows], when sampling: the chance that a token drawn there is accepted, the sum
        over tokens of min(p, q) after the processors; None when greedy.
    """

    @property
    def layers(self) -> tuple[int, ...]: ...
    @property
    def tokens(self) -> Tensor: ...
    @property
    def confidences(self) -> Tensor: ...
    @property
    def target_tokens(self) -> Tensor: ...
    @property
    def acceptance_probabilities(self) -> Tensor | None: ...
    @property
    def num_rows(self) -> int: ...

    def rows_of(self, layer: int) -> list[tuple[bool, float]]:
        """For one layer, row by row: whether its token is the full model's choice, and its confidence."""
        ...

    def compute(self, layer: int, others: Sequence[Shadow]) -> None:
        """Make `rows_of` of this layer cheap for itself and for others of the same text: all their rows in one go."""
        ...


def read_matches(tokens: Tensor, target_tokens: Tensor, confidences: Tensor) -> list[tuple[bool, float]]:
    """For each row, whether its token is the target's, and its confidence; [rows] each. In one copy from a device, since each
    copy waits for it."""
    matches = tokens == target_tokens
    if matches.is_cpu:
        return list(zip(matches.tolist(), confidences.tolist()))
    found, kept = torch.stack([matches.to(confidences.dtype), confidences]).tolist()
    return [(match == 1, confidence) for match, confidence in zip(found, kept)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShadowTokens:
    """A `Shadow` that was computed for all its layers at once."""

    layers: tuple[int, ...]
    tokens: Tensor
    confidences: Tensor
    target_tokens: Tensor
    acceptance_probabilities: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the round, or of the prompt."""
        return self.target_tokens.shape[0]

    def rows_of(self, layer: int) -> list[tuple[bool, float]]:
        index = self.layers.index(layer)
        return read_matches(self.tokens[index], self.target_tokens, self.confidences[index])

    def compute(self, layer: int, others: Sequence[Shadow]) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundRecord:
    """One finished round, as statistics and policies see it.

    num_committed_before: tokens of prompt and text before the round, n; its rows sit at positions n-1 ..
    exit_layer: None if the round did not speculate. bits: of the weights that drafted; None for the model's own.
    draft_tokens: the kept drafts d_1..d_k; num_accepted (m) counts how many verification accepted. num_copied: how many of
        them were copied from the text, which is all or none.
    copies: for every token since the last look at the index, before this round, of which it had an opinion: how many tokens
        before it were alike, and whether it was what followed there. Empty where nothing can be copied.
    tokens: what was committed, m+1 of them, or fewer if a stop fell inside the round. A wave may end with an accepted draft;
        its draft_tokens are those that the last loop judged in this round, or dropped behind a rejected one, without those
        that earlier loops replaced; max_speculations is 0.
    loaded_layers: draft steps * E + (E if the last row still needed it) + (L - E); L for an autoregressive step. A layer in
        fewer bits counts as a layer. Of a wave, the layers of one loop for each of its `sweeps`.
    stop_cause: why drafting ended: the cap, the stopping policy before or after a draw, a drafted EOS, or "none" when the
        round did not speculate. A row that gives no token (NaN, say) ends a draft "before_draw", too.
    confidences: one per row that was looked at, if a policy asked (one more than drafts after a stop before a draw,
        unless that row's is NaN).
    acceptance_probabilities: when sampling and a policy asked for confidences, one for each of these rows up to the first
        rejected draft's: the chance that a token drawn there is accepted, given that those before it are. It is the same
        whichever was drawn. None when greedy.
    dropped_acceptance: the same for the row that a policy stopped before; when greedy 1.0 if what it would have drafted
        is the target's choice, else 0.0. None if nothing was dropped, or if a draft before it was rejected.
    shadow: for rows 0..m, if a policy asked. rejected: for the rows behind them, which saw a rejected draft; without chances
        of acceptance.
    acceptance, threshold: what the exit policy estimated per drafter, and what the stopping policy compared with, at the
        round's start; None where a policy has no such thing.
    preverifier_layers, preverify_seconds: layers that the stopping policy loaded itself (Pacer's, one per pass; not among
        loaded_layers), and their time (not in draft_seconds).
    batch_size: how many texts shared the round's passes; draft_seconds (with the plan's), verify_seconds and accept_seconds
        are this text's share of the time.
    """

    index: int
    num_committed_before: int
    exit_layer: int | None
    max_speculations: int
    draft_tokens: tuple[int, ...]
    num_accepted: int
    tokens: tuple[int, ...]
    loaded_layers: int
    stop_cause: StopCause
    confidences: tuple[float, ...] | None = None
    acceptance_probabilities: tuple[float, ...] | None = None
    dropped_acceptance: float | None = None
    shadow: Shadow | None = None
    rejected: Shadow | None = None
    acceptance: Mapping[Drafter, float] | None = None
    threshold: float | None = None
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accept_seconds: float = 0.0
    preverifier_layers: int = 0
    preverify_seconds: float = 0.0
    batch_size: int = 1
    num_copied: int = 0
    copies: tuple[tuple[int, bool], ...] = ()
    bits: int | None = None
    sweeps: int = 0

    @property
    def drafter(self) -> Drafter | None:
        """Return what drafted; None if the round did not speculate."""
        return None if self.exit_layer is None else Drafter(self.exit_layer, self.bits)

    @property
    def num_drafted(self) -> int:
        """Kept drafts, k, copied ones among them."""
        return len(self.draft_tokens)

    @property
    def counted_drafts(self) -> tuple[int, int]:
        """(drafted, accepted) as statistics count them: nothing after a stop inside the round."""
        if len(self.tokens) > self.num_accepted:
            return self.num_drafted, self.num_accepted
        return len(self.tokens), len(self.tokens)

    @property
    def counted_copies(self) -> tuple[int, int]:
        """(copied, accepted): those of `counted_drafts` that were copied from the text."""
        return self.counted_drafts if self.num_copied else (0, 0)
