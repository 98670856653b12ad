"""What a policy is: the two protocols, and the records that the engine shows them.

A policy decides two things in every round: which layer to exit at (an `ExitPolicy`, asked once, before drafting) and
when to stop drafting (a `StoppingPolicy`, asked at every drafted token). `Policy` puts one of each together. Policies see
records of numbers, never the model, so ten numbers test one.

Why a stopping policy is asked twice per token: with a sampled draft, throwing a token away is only exact if the decision
was fixed before the token was drawn. `stop_before_draw` is therefore asked while the token does not exist yet (a stop
means that it never will), and `stop_after_draw`, which sees the token, can only keep it and stop. No policy can express a
biased stop. (A token t with p(t) = q(t) = 0.4, dropped whenever it is drawn, would come out with probability 0.16.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

StopCause = Literal["cap", "before_draw", "after_draw", "eos", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a policy asks the engine to compute; everything costs time, so the default is nothing.

    confidence: top-1 probability of the *unfiltered* draft distribution at temperature 1.
    entropy: of that same distribution, in nats.
    exit_hidden: the hidden state at the exit layer of every draft row.
    features: log p1, log p1 - log p2 and entropy of every draft row's unfiltered distribution, as a tensor.
    context_layers: exit layers at which the hidden states of the whole text's rows are kept.
    shadow_layers: exit layers whose shadow tokens are computed after a round, each in [1, L-1].
    prompt_rows: how many of the last prompt positions get shadow tokens as well (DEL starts from 32).
    prompt_every: with fewer than prompt_rows * prompt_every tokens to come, proportionally fewer prompt rows; 0: always all.
    learn_every, learn_first: shadow tokens of about one row in `learn_every`, after those of the first `learn_first` rows of
        a call. A round is learned from whole or not at all, so rows count, not rounds: a long round costs as much as many
        short ones.
    """

    confidence: bool = False
    entropy: bool = False
    exit_hidden: bool = False
    features: bool = False
    context_layers: tuple[int, ...] = ()
    shadow_layers: tuple[int, ...] = ()
    prompt_rows: int = 0
    prompt_every: int = 0
    learn_every: int = 1
    learn_first: int = 0

    def learns(self, rows_learned: int, rows_seen: int) -> bool:
        """Whether shadow tokens are asked for in the coming round, when so many of a call's rows have got them."""
        if not self.shadow_layers:
            return False
        return rows_learned < self.learn_first or rows_learned * self.learn_every <= rows_seen

    def prompt_rows_for(self, num_prompt_tokens: int, max_new_tokens: int) -> int:
        """How many of the prompt's last rows get shadow tokens."""
        rows = min(self.prompt_rows, num_prompt_tokens) if self.shadow_layers else 0
        return min(rows, max_new_tokens // self.prompt_every) if self.prompt_every else rows

    def __or__(self, other: Needs) -> Needs:
        """Everything that either of the two asks for."""
        schedules = [n.learn_every for n in (self, other) if n.shadow_layers]
        return Needs(
            confidence=self.confidence or other.confidence,
            entropy=self.entropy or other.entropy,
            exit_hidden=self.exit_hidden or other.exit_hidden,
            features=self.features or other.features,
            context_layers=tuple(sorted({*self.context_layers, *other.context_layers})),
            shadow_layers=tuple(sorted({*self.shadow_layers, *other.shadow_layers})),
            prompt_rows=max(self.prompt_rows, other.prompt_rows),
            prompt_every=min((n.prompt_every for n in (self, other) if n.prompt_rows), default=0),
            learn_every=min(schedules, default=1),
            learn_first=max(self.learn_first, other.learn_first),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The exit policy's decision for one round.

    exit_layer: in [1, L-1], or None for "no speculation": the round is one autoregressive step.
    max_speculations: most tokens to draft, >= 0; the engine may lower it (budget, context), never raise it.
    acceptance: the acceptance per exit layer that the plan was made with, for the trace; None where none is estimated.
    """

    exit_layer: int | None
    max_speculations: int
    acceptance: Mapping[int, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundContext:
    """What is known before a round: its number, counted from 0, and how long the text is (tokens)."""

    round_index: int
    num_committed: int
    remaining_tokens: int


class ContextStates(Protocol):
    """The exit hidden states of one text's rows; another text has another object."""

    @property
    def max_length(self) -> int:
        """Rows that the text can come to."""
        ...

    def rows(self, exit_layer: int, start: int, stop: int) -> Tensor:
        """[stop - start, hidden], of the rows at these positions, which must all be committed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftRow:
    """A draft row before its token is drawn; everything in it is fixed by the rows before it.

    num_drafted: drafts kept so far in this round, j; the row would produce d_{j+1}. position: of the row in the text.
    confidence, entropy, exit_hidden [hidden], features [3], context: as in `Needs`, None unless asked for. The tensors stay
    as they are until the round is over.
    """

    num_drafted: int
    exit_layer: int
    position: int = 0
    confidence: float | None = None
    entropy: float | None = None
    exit_hidden: Tensor | None = None
    features: Tensor | None = None
    context: ContextStates | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What a stopping policy itself ran in a round: layers loaded beside the model's, and seconds."""

    layers: int = 0
    seconds: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        """Both together."""
        return Spent(layers=self.layers + other.layers, seconds=self.seconds + other.seconds)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShadowTokens:
    """What every candidate layer would have said for some rows, and what the full model said.

    layers: the exit layers, in the order of the tensors' first dimension.
    tokens: int64 [layers, rows], argmax of norm + head at each layer.
    confidences: float32 [layers, rows], probability of that argmax at that layer (unfiltered, temperature 1).
    target_tokens: int64 [rows], the full model's choice: its argmax, after processors in a round.
    target_probabilities: float32 [layers, rows], p(shadow token) under the processed target distribution when
        sampling; None when greedy.
    """

    layers: tuple[int, ...]
    tokens: Tensor
    confidences: Tensor
    target_tokens: Tensor
    target_probabilities: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundRecord:
    """One finished round, as statistics and policies see it.

    num_committed_before: tokens of prompt and text before the round, n; its rows sit at positions n-1 ..
    exit_layer: None if the round did not speculate.
    draft_tokens: the kept drafts d_1..d_k; num_accepted (m) counts how many verification accepted.
    tokens: what was committed, m+1 of them, or fewer if a stop fell inside the round.
    loaded_layers: draft steps * E + (E if the last row still needed it) + (L - E); L for an autoregressive step.
    stop_cause: why drafting ended: the cap, the stopping policy before or after a draw, a drafted EOS, or "none" when the
        round did not speculate.
    confidences: one per row that was looked at, if a policy asked (one more than drafts after a stop before a draw).
    acceptance_probabilities: min(1, p/q) of each draft when sampling, else None.
    dropped_acceptance: of the row that a policy stopped before: 1.0 if what it would have drafted is the target's choice,
        else 0.0; None when sampling, if nothing was dropped, or if a draft before it was rejected.
    shadow: for rows 0..m, if a policy asked.
    acceptance, threshold: what the exit policy estimated per layer, and what the stopping policy compared with, at the
        round's start; None where a policy has no such thing.
    preverifier_layers, preverify_seconds: layers that the stopping policy loaded itself (Pacer's, one per pass; not among
        loaded_layers), and their time (not in draft_seconds).
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
    shadow: ShadowTokens | None = None
    acceptance: Mapping[int, float] | None = None
    threshold: float | None = None
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    preverifier_layers: int = 0
    preverify_seconds: float = 0.0

    @property
    def num_drafted(self) -> int:
        """Kept drafts, k."""
        return len(self.draft_tokens)

    @property
    def counted_drafts(self) -> tuple[int, int]:
        """(drafted, accepted) as statistics count them: nothing behind a stop inside the round."""
        if len(self.tokens) > self.num_accepted:
            return self.num_drafted, self.num_accepted
        return len(self.tokens), len(self.tokens)


class Learner(Protocol):
    """What both kinds of policy have: they look at outcomes, and what they learned can be dropped, kept and taken up."""

    @property
    def needs(self) -> Needs:
        """What the engine shall compute; asked at the start of every call."""
        ...

    def observe_prompt(self, shadow: ShadowTokens) -> None:
        """Called after prefill with the last prompt rows, if `needs.prompt_rows` asked for them."""
        ...

    def observe(self, record: RoundRecord) -> None:
        """Called after every round."""
        ...

    def reset(self) -> None:
        """Forget all that was learned."""
        ...

    def state(self) -> dict[str, Any]:
        """What was learned, as JSON can hold it."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` of an equal policy gave. Raises ValueError if it does not fit."""
        ...


class ExitPolicy(Learner, Protocol):
    """Chooses the exit layer, and a cap on the length, once per round."""

    def plan(self, context: RoundContext) -> Plan:
        """The decision for the coming round."""
        ...


class StoppingPolicy(Learner, Protocol):
    """Decides at every drafted token whether to go on."""

    def start_round(self, plan: Plan) -> None:
        """Called after the plan is made, before the first row."""
        ...

    def stop_before_draw(self, row: DraftRow) -> bool:
        """True: draw no token from this row; what was kept so far goes to verification."""
        ...

    def stop_after_draw(self, row: DraftRow, token: int) -> bool:
        """True: the token is kept, and drafting ends."""
        ...

    def threshold(self, exit_layer: int) -> float | None:
        """What a row of this layer is compared with at the moment, for the trace; None if there is no such number."""
        ...

    def spent(self) -> Spent:
        """What its decisions cost in this round beside the rows that it looked at."""
        ...


class Unlearning:
    """Defaults for a policy that learns nothing: inherit it and override what differs."""

    needs = Needs()

    def observe_prompt(self, shadow: ShadowTokens) -> None:
        """Nothing to learn."""

    def observe(self, record: RoundRecord) -> None:
        """Nothing to learn."""

    def reset(self) -> None:
        """Nothing to forget."""

    def state(self) -> dict[str, Any]:
        """Empty."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Nothing to take up; ValueError if there is something."""
        if state:
            raise ValueError(f"{type(self).__name__} learns nothing, but the saved state holds {sorted(state)}")


class NeverStop(Unlearning):
    """Defaults for a stopping policy: drafts to the plan's cap and learns nothing."""

    def start_round(self, plan: Plan) -> None:
        """Nothing to do."""

    def stop_before_draw(self, row: DraftRow) -> bool:
        """Never."""
        return False

    def stop_after_draw(self, row: DraftRow, token: int) -> bool:
        """Never."""
        return False

    def threshold(self, exit_layer: int) -> float | None:
        """None."""
        return None

    def spent(self) -> Spent:
        """Nothing."""
        return Spent()


@dataclass(frozen=True, slots=True)
class Policy:
    """An exit policy and, unless the plan's cap is all there is to it, a stopping policy.

    also: what somebody else wants to see in the records (the explanation of a run, say).
    """

    exit: ExitPolicy
    stopping: StoppingPolicy | None = None
    name: str = field(default="custom")
    also: Needs = field(default=Needs())

    @property
    def needs(self) -> Needs:
        """What they ask for together."""
        own = self.exit.needs | self.stopping.needs if self.stopping is not None else self.exit.needs
        return own | self.also

    def observe_prompt(self, shadow: ShadowTokens) -> None:
        """Show the last prompt rows to both."""
        self.exit.observe_prompt(shadow)
        if self.stopping is not None:
            self.stopping.observe_prompt(shadow)

    def observe(self, record: RoundRecord) -> None:
        """Show a finished round to both."""
        self.exit.observe(record)
        if self.stopping is not None:
            self.stopping.observe(record)

    def reset(self) -> None:
        """Make both forget what they learned."""
        self.exit.reset()
        if self.stopping is not None:
            self.stopping.reset()

    def state(self) -> dict[str, Any]:
        """What both have learned, as JSON can hold it."""
        return {"exit": self.exit.state(), "stopping": None if self.stopping is None else self.stopping.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` of an equal policy gave. ValueError, and nothing changed, if it does not fit."""
        before = self.exit.state()
        self.exit.restore(state["exit"])
        try:
            if self.stopping is not None:
                self.stopping.restore(state["stopping"])
        except ValueError:
            self.exit.restore(before)
            raise

    def save(self, path: str | Path) -> None:
        """Write what both have learned to a JSON file."""
        Path(path).write_text(json.dumps({"policy": self.name, **self.state()}), encoding="utf-8")

    def load(self, path: str | Path) -> None:
        """Take up what a policy of the same name saved. ValueError, and nothing changed, for another one's file."""
        saved = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(saved, dict) or saved.get("policy") != self.name:
            found = saved.get("policy") if isinstance(saved, dict) else None
            raise ValueError(f"{path} holds the state of policy {found!r}, this one is {self.name!r}")
        self.restore(saved)


def check_exit_layer(exit_layer: int, num_layers: int) -> int:
    """Return `exit_layer` if a model of `num_layers` layers can exit there; ValueError with the range if not."""
    if isinstance(exit_layer, bool) or not isinstance(exit_layer, int) or not 1 <= exit_layer < num_layers:
        raise ValueError(
            f"exit_layer must be in [1, {num_layers - 1}] for this {num_layers}-layer model, got {exit_layer!r}"
        )
    return exit_layer


def check_layers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Sorted, distinct exit layers, each checked by `check_exit_layer`."""
    return tuple(sorted({check_exit_layer(layer, num_layers) for layer in layers}))
