"""`auto`: one quantity, tokens per cost, decides the exit layer, the length and whether to speculate at all.

Think of a long text as rounds that each earn tokens and pay cost. The best achievable rate r of tokens per cost is the
number for which the best round has expected tokens - r * expected cost = 0 (Dinkelbach 1967, as in renewal-reward problems),
so a draft is worth its cost exactly when

    (chance that the drafts before it are accepted) * (its own chance) + (what going on is worth) >= r * (cost of a draft).

Chances come from SPIDE's confidence -> acceptance tables, one per exit layer, fed with shadow tokens, and from what such
tables have in common (`acceptance_model.py`). "What going on is worth" is the left side less the right, one draft later,
averaged over the confidences that the layer has been showing: a small dynamic program, solved again whenever something was
learned. Its value at the round's start ranks the exit layers, and r falls out of it. So SPIDE's tau is no hyperparameter
any more (tau = r * cost, less the value of going on), nor are the length and the layer, and DEL's TPL is the special case in
which confidence says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from policies.auto.constants import TUNING
from policies.auto.copy_values import best_copy
from policies.auto.drift import CostDrift
from policies.auto.learner import AutoLearner
from policies.base import DelegatingPolicy, NeverStop
from policies.bounds import MAX_DRAFTS, MAX_LEARN_EVERY, MAX_PROMPT_ROWS, check_layers, check_number
from policies.building import Setup
from policies.cost import CostModel, LayerCost, MeasuredCost
from policies.records import Drafter, DraftRow, ObservationSpec, Plan, RoundContext, RoundRecord


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Every exit layer up to L/4, then every second one up to L/2.

    A deeper one costs more than half a pass for each draft and was never best. A layer between two others is worth little
    more than they are.
    """
    half, quarter = max(num_layers // 2, 1), max(num_layers // 4, min(num_layers // 2, 4))
    return (*range(1, quarter + 1), *range(quarter + 2, half + 1, 2))


class AutoExit(DelegatingPolicy):
    """Exit at the layer whose round is worth most at the current rate; a plain step where none is.

    layers: candidates; None for those of `default_layers`.
    cost: it maximises tokens per cost. copy: copy from the text where that is worth more.
    bits: that drafts may be made in, where weights in fewer bits are at hand: by all layers, and up to an exit where that is
        cheaper. What all layers would have said is not known for nothing: that is learned from what they drafted, from a
        prior. offered_bits: that weights can be made in. A plan that drafts with them means that they are to be made; it
        comes only where they promise much more than the model's own.
    prompt_rows, learn_every: it asks for shadow tokens of a prompt's last `prompt_rows` rows, and of one row in `learn_every`
        after them. What it drafts or drops teaches in every round.
    repair: correct the cost by the seconds that rounds take (`policies.auto.drift`).
    Deterministic: the same records and costs give the same plans. Records hold seconds only where rounds were timed.
    """

    learner: AutoLearner
    takes_bits = True
    """Whether it is to be told of weights in fewer bits that are made, or can be made, after it."""

    def __init__(
        self,
        *,
        num_layers: int,
        layers: Iterable[int] | None = None,
        cost: CostModel | None = None,
        max_speculations: int = TUNING.max_speculations,
        prompt_rows: int = TUNING.prompt_rows,
        learn_every: int = TUNING.learn_every,
        repair: bool = False,
        copy: bool = True,
        bits: Iterable[int] = (),
        offered_bits: Iterable[int] = (),
    ) -> None:
        check_number("d_max (max_speculations)", max_speculations, 1, MAX_DRAFTS)
        check_number("prompt_rows", prompt_rows, 0, MAX_PROMPT_ROWS)
        check_number("learn_every", learn_every, 1, MAX_LEARN_EVERY)
        candidates = check_layers(tuple(default_layers(num_layers) if layers is None else layers), num_layers)
        bits, self.offered_bits = tuple(sorted(bits)), tuple(sorted(offered_bits))
        drafters = (
            *(Drafter(layer) for layer in candidates),
            *(Drafter(num_layers, number) for number in (*bits, *self.offered_bits)),
        )
        self.learner = AutoLearner(drafters, cost or LayerCost(num_layers), max_speculations, len(self.offered_bits))
        self._cost = self.learner.cost
        self._repair = repair
        self._drifts: dict[int, CostDrift] = {}  # by batch size
        self._text_tokens, self._text_cost = 0, 0.0  # of the text's rounds
        self._observes = ObservationSpec(
            confidence=True,
            copies="welcome" if copy else "none",
            shadow_layers=candidates,
            prompt_rows=prompt_rows,
            prompt_every=TUNING.prompt_every,
            learn_every=learn_every,
            bits=bits,
        )
        self._batch_size, self._hopeless = 1, False
        self._plans = 0  # of all texts of the batch
        # Time decides already, so texts may as well decide by each other's experience.
        self.learns_together = isinstance(cost, MeasuredCost) and not cost.fixed

    @classmethod
    def from_args(
        cls,
        setup: Setup,
        *,
        cost: str = "measured",
        d_max: int = TUNING.max_speculations,
        bits: bool = True,
        **options: Any,
    ) -> AutoExit:
        """Built from its name's ARGS (`policies.names`)."""
        found = setup.cost(cost)
        # A pre-verifier's passes are part of the cost, but are no part of the seconds that rounds are compared by.
        repair = cost == "measured" and not found.block and not found.fixed
        made = cls(
            num_layers=setup.num_layers,
            cost=found,
            max_speculations=d_max,
            repair=repair,
            bits=setup.draft_bits if bits else (),
            offered_bits=setup.offered_bits if bits else (),
            **options,
        )
        made.takes_bits = bits
        return made

    def default_stopping(self) -> AutoStopping:
        """Make the stopping policy that ends its drafts."""
        return AutoStopping(self.learner)

    @property
    def observes(self) -> ObservationSpec:
        """Fewer of the next prompt's rows when earlier calls have taught enough, none where no draft pays."""
        if self._hopeless or self._idle:
            return replace(self._observes, prompt_rows=0)
        if self.learner.known < TUNING.enough_observations:
            return self._observes
        rows = min(TUNING.prompt_rows_taught, self._observes.prompt_rows)
        return replace(self._observes, prompt_rows=-(-rows // self._sharing))

    @property
    def exit_layers(self) -> tuple[int, ...]:
        return self.learner.exits

    def adopt(self, other: AutoExit) -> None:
        """Take up what another one has learned about the same layers, and about copies."""
        self.learner.adopt(other.learner)

    def begin_text(self) -> None:
        self.learner.begin_text()
        self._text_tokens, self._text_cost = 0, 0.0

    def expect_batch_size(self, texts: int) -> None:
        """Expect this many texts in passes from now on. The more there are, the less a row costs and a draft gains."""
        if texts != self._batch_size:
            self._batch_size = texts
            self._drift.forget_unfinished()
            self._decide_by_cost()

    def _decide_by_cost(self) -> None:
        """Solve again for the present cost at the present batch size."""
        cost = self._drift.cost
        if cost == self.learner.cost:  # a batch size that changes no cost must change no plan
            return
        self.learner.use_cost(cost, margin=TUNING.margin_in_batch if self._batch_size > 1 else 0.0)
        self._hopeless = self._batch_size > 1 and self.learner.drafting_never_pays
        if not self._hopeless:
            self.learner.learn()

    @property
    def _drift(self) -> CostDrift:
        """What rounds at the present batch size say about its cost."""
        if self._batch_size not in self._drifts:
            cost = self._cost.for_batch_size(self._batch_size)
            self._drifts[self._batch_size] = CostDrift(cost, self._batch_size, repair=self._repair)
        return self._drifts[self._batch_size]

    def plan(self, context: RoundContext) -> Plan:
        self.expect_batch_size(context.batch_size)
        copying = self._copying(context) if context.match_length and self._observes.copies != "none" else None
        if copying is not None:
            return copying
        if self._hopeless:
            return Plan(exit_layer=None, max_speculations=0, learn=False)
        drafter = self.learner.best_drafter
        due = self._drift.due
        if due is not None:
            drafter = self.learner.likeliest_drafter if due == "draft" else None
        return Plan(
            exit_layer=None if drafter is None else drafter.exit_layer,
            bits=None if drafter is None else self.learner.bits_of(drafter),
            max_speculations=0 if drafter is None else self.learner.longest(drafter),
            acceptance=self.learner.mean_acceptance,
            learn=self._learns_now(),
        )

    def _copying(self, context: RoundContext) -> Plan | None:
        """Plan a copy, if it is worth more than drafting at the rate of tokens per cost that the text is decoded at.

        Where much is copied, that rate is well above the rate of drafts, and time has a higher price.
        """
        learner = self.learner
        plain = learner.cost.autoregressive()
        tokens, cost = (1.0, plain) if self._hopeless else (learner.best_tokens, learner.best_cost)
        rate = tokens / cost
        if self._text_cost > 0:
            rate = max(rate, self._text_tokens / self._text_cost)
        choice = best_copy(learner.copies, learner.copy_costs, context.match_length, rate)
        if choice.value <= tokens - rate * cost:
            return None
        return Plan(exit_layer=None, max_speculations=0, copied=choice.copied, acceptance=learner.mean_acceptance)

    def _learns_now(self) -> bool:
        """Let at most one of the texts that learn together learn in a round: they learn as much as one text alone."""
        self._plans += 1
        return self._plans % (self._sharing * (TUNING.idle_learning_divisor if self._idle else 1)) == 0

    @property
    def _sharing(self) -> int:
        """How many texts share what they learn."""
        return self._batch_size if self.learns_together else 1

    @property
    def _idle(self) -> bool:
        """True if it knows that no exit pays. Learning about exits is then most of what `auto` costs."""
        best = self.learner.best_drafter
        return (best is None or best.bits is not None) and self.learner.known >= TUNING.enough_observations

    def observe(self, record: RoundRecord) -> None:
        if self._observes.copies != "none":
            self.learner.copies.observe(record.copies)
            self._text_tokens += len(record.tokens)
            self._text_cost += self.learner.round_cost(record)
        self.learner.observe(record)
        if self._drift.observe(record):
            self._decide_by_cost()

    def reset(self) -> None:
        """Go back to the prior, and to the cost as it was measured."""
        self._drifts.clear()
        self._batch_size, self._hopeless = 1, False
        self._text_tokens, self._text_cost = 0, 0.0
        self.learner.use_cost(self._cost)
        self.learner.reset()


class AutoStopping(NeverStop):
    """Draft on while one more draft is worth its cost. It belongs to an `AutoExit`, whose learner it asks.

    What it looks at is known before the token is drawn, so it may drop (see policies.base).
    """

    observes = ObservationSpec(confidence=True)

    def __init__(self, learner: AutoLearner) -> None:
        self._learner = learner
        self._reliability = 1.0
        self._drafter = learner.drafters[0]

    def start_round(self, plan: Plan) -> None:
        self._reliability = 1.0
        if plan.exit_layer is not None:
            self._drafter = self._learner.experience_of(Drafter(plan.exit_layer, plan.bits))

    def stop_before_draw(self, row: DraftRow) -> bool:
        """Tell whether the token is not worth one more pass through the exit layer."""
        assert row.confidence is not None
        drafter = self._learner.experience_of(row.drafter)
        reliability = self._reliability * self._learner.chance(drafter, row.confidence)
        if self._learner.gain(drafter, row.num_drafted, reliability) < 0:
            return True
        self._reliability = reliability
        return False

    def stop_after_draw(self, row: DraftRow, token: int) -> bool:
        """Tell whether not even looking at the next row is worth its head."""
        drafter = self._learner.experience_of(row.drafter)
        return self._learner.going_on(drafter, row.num_drafted + 1, self._reliability) <= 0

    def threshold(self, drafter: Drafter) -> float:
        """Return the acceptance that a first draft needs to be worth its pass, were it the only one: rate * cost."""
        return self._learner.needed(self._drafter)
