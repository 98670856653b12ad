"""`auto`: one quantity, tokens per cost, decides the exit layer, the length and whether to speculate at all.

Think of a long text as rounds that each earn tokens and pay cost. The best achievable rate r of tokens per cost is the
number for which the best round has expected tokens - r * expected cost = 0 (Dinkelbach 1967, as in renewal-reward problems),
so a draft is worth its cost exactly when

    (chance that the drafts before it are accepted) * (its own chance) + (what going on is worth) >= r * (cost of a draft).

Chances come from how drafts of the same confidence fared (`chances.py`), and costs from what rounds take (`round_costs.py`).
"What going on is worth" is the left side less the right, one draft later, averaged over the confidences that the drafter has
been showing: a small dynamic program (`draft_values.py`), solved again when enough was learned. Its value at the round's start
ranks the drafters, and r falls out of it. So SPIDE's tau is no hyperparameter any more (tau = r * cost, less the value of going
on), nor are the length and the layer, and DEL's TPL is the special case in which confidence says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np

from policies.auto.chances import COPIES, Chances, copy_confidence
from policies.auto.draft_values import DraftValues
from policies.auto.round_costs import RoundCosts
from policies.base import NeverStop, StatelessPolicy
from policies.bounds import MAX_DRAFTS, check_layers, check_number
from policies.building import Setup
from policies.cost import CostModel, LayerCost, MeasuredCost, at_rows
from policies.records import Drafter, DraftRow, ObservationSpec, Plan, RoundContext, RoundRecord, Shadow
from policies.spide import draft_acceptance, read_shadow

MAX_LENGTH = 10
"""Longest draft. A longer one of a layer that is this good gains a few percent at most."""
PROMPT_ROWS, LEARN_EVERY = 8, 32
"""Rows of a prompt that teach what every exit would have said, and one row in so many after that (docs/log.md, 22)."""
LEARNING, IDLE_LEARNING = 0.02, 0.005
"""Most of a text's cost that this may take: of one whose exits may pay, and of one whose exits are known not to."""
KNOWN = 24
"""Rows from which on an exit counts as known."""
MAKING = 20
"""Plain steps that it takes to round the weights to fewer bits, about."""
PROMISING = 0.8
"""A drafter that promises less of a plain step's rate is not tried."""


@dataclass(frozen=True, slots=True)
class _Best:
    """The best round at hand: what drafts in it, its tokens and cost, and whether it beats a plain step."""

    index: int
    tokens: float
    cost: float
    pays: bool
    values: DraftValues
    rate: float


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Every exit layer up to L/4, then every second one up to L/2.

    A deeper one costs more than half a pass for each draft and was never best. A layer between two others is worth little
    more than they are.
    """
    half, quarter = max(num_layers // 2, 1), max(num_layers // 4, min(num_layers // 2, 4))
    return (*range(1, quarter + 1), *range(quarter + 2, half + 1, 2))


class AutoExit(StatelessPolicy):
    """Draft with what is worth most at the current rate; a plain step where nothing is.

    layers: candidates; None for those of `default_layers`.
    cost: it maximises tokens per cost. copy: copy from the text where that is worth more.
    bits: that drafts may be made in, where weights in fewer bits are at hand: by all layers, and up to an exit where that is
        cheaper. offered_bits: that weights can be made in. A plan that drafts with them means that they are to be made.
    repair: correct the cost by the seconds that rounds take.
    Deterministic: the same records and costs give the same plans. Records hold seconds only where rounds were timed.
    """

    takes_bits = True
    """Whether it is to be told of weights in fewer bits that are made, or can be made, after it."""

    def __init__(
        self,
        *,
        num_layers: int,
        layers: Iterable[int] | None = None,
        cost: CostModel | None = None,
        max_speculations: int = MAX_LENGTH,
        repair: bool = False,
        copy: bool = True,
        bits: Iterable[int] = (),
        offered_bits: Iterable[int] = (),
    ) -> None:
        check_number("d_max (max_speculations)", max_speculations, 1, MAX_DRAFTS)
        self.exit_layers = check_layers(tuple(default_layers(num_layers) if layers is None else layers), num_layers)
        self.bits, self.offered_bits = tuple(sorted(bits)), tuple(sorted(offered_bits))
        rounded = (Drafter(num_layers, number) for number in (*self.bits, *self.offered_bits))
        self.drafters = (*map(Drafter, self.exit_layers), *rounded)
        self.index = {drafter: index for index, drafter in enumerate(self.drafters)}
        self.chances = Chances((*self.drafters, COPIES))
        self.max_speculations = max_speculations
        self._cost, self._repair, self._copy = cost or LayerCost(num_layers), repair, copy
        # Time decides already, so texts may as well decide by each other's experience.
        self.learns_together = isinstance(cost, MeasuredCost) and not cost.fixed
        self.reset()

    @classmethod
    def from_args(
        cls, setup: Setup, *, cost: str = "measured", d_max: int = MAX_LENGTH, bits: bool = True, **options: Any
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
        return AutoStopping(self)

    def reset(self) -> None:
        """Go back to what is usual, and to the cost as it was expected."""
        self.chances.reset()
        self._by_texts: dict[int, RoundCosts] = {}
        self._texts, self._text_tokens, self._text_cost = 1, 0, 0.0
        self._spent = self._taught = 0.0  # costs of rounds, and of looking at every exit
        self._rows_seen = self._rows_taught = 0
        self._rate = 0.0
        self._solve()

    def begin_text(self) -> None:
        self._text_tokens, self._text_cost = 0, 0.0

    def expect_batch_size(self, texts: int) -> None:
        """Expect this many texts in passes from now on. The more there are, the less a row costs and a draft gains."""
        if texts != self._texts:
            self.costs.forget_unfinished()
            self._texts = texts
            self._solve()

    @property
    def costs(self) -> RoundCosts:
        """What rounds cost at the present batch size."""
        if self._texts not in self._by_texts:
            self._by_texts[self._texts] = RoundCosts(
                self._cost, self.drafters, self.bits, self.max_speculations, self._texts, repair=self._repair
            )
        return self._by_texts[self._texts]

    # What it learns from

    @property
    def observes(self) -> ObservationSpec:
        share = self._learning
        rows = PROMPT_ROWS if share else 0
        every = ceil(self._teaching / (share * self.costs.plain)) if share else 0
        return ObservationSpec(
            confidence=True,
            copies="welcome" if self._copy else "none",
            shadow_layers=self.exit_layers,
            prompt_rows=rows,
            prompt_every=max(every, PROMPT_ROWS),
            bits=self.bits,
        )

    def _learns_now(self) -> bool:
        """Return whether a round may look at every exit; of texts that learn together, one at a time."""
        if self._rows_taught * LEARN_EVERY > self._rows_seen or self._taught >= self._learning * self._spent:
            return False
        self._pay_for(1)
        return True

    def _pay_for(self, rows: int) -> None:
        self._rows_taught += rows
        self._taught += self._teaching * rows

    @property
    def _learning(self) -> float:
        """Share of the cost that may go to learning about exits; none where no draft pays if all were accepted."""
        best = self.best
        if self._texts > 1 and not self.costs.drafts_may_pay:
            return 0.0
        by_exit = best.pays and self.drafters[best.index].bits is None
        known = min(self.chances.rows[: len(self.exit_layers)]) >= KNOWN
        return LEARNING if by_exit or not known else IDLE_LEARNING

    @property
    def _teaching(self) -> float:
        """Cost of looking at every exit for one row, of several that share the head's weights."""
        return len(self.exit_layers) * at_rows(self._cost.head_seconds, PROMPT_ROWS) / PROMPT_ROWS

    def observe_prompt(self, shadow: Shadow) -> None:
        self._learn_shadow(shadow)
        self._taught += self._teaching * shadow.num_rows
        if self._news > self._wait:
            self._solve()

    def observe(self, record: RoundRecord) -> None:
        """Learn from what a round drafted or dropped, and about all exits if it has shadow tokens."""
        for match_length, right in record.copies if self._copy else ():
            self.chances.learn(-1, copy_confidence(match_length), right)
        drafter, drafted = self._index_of(record.drafter), 0
        cost = self.costs.of(drafter, record.num_drafted)
        self._spent += cost
        self._rows_seen += record.num_accepted + 1
        self._text_tokens += len(record.tokens)
        self._text_cost += cost
        if drafter is not None and record.confidences is not None:
            for confidence in record.confidences:
                self.chances.look(drafter, confidence)
            known = draft_acceptance(record)
            for confidence, accepted in zip(record.confidences, known):
                self.chances.learn(drafter, confidence, accepted)
            drafted = len(known)
            if record.dropped_acceptance is not None and record.shadow is None:
                self.chances.learn(drafter, record.confidences[-1], record.dropped_acceptance)
                drafted += 1
            self._news += drafted
        if record.shadow is not None:
            self._learn_shadow(record.shadow, drafter if record.bits is None else None, record.num_drafted)
            self._pay_for(record.shadow.num_rows - 1)
        if self.costs.observe(record) or self._news > self._wait:
            self._solve()

    def _learn_shadow(self, shadow: Shadow, drafter: int | None = None, drafted: int = 0) -> None:
        """Learn from shadow tokens; of `drafter` the first `drafted` rows are known as drafts."""
        for layer, confidences, accepted in zip(shadow.layers, *read_shadow(shadow)):
            index = self.index.get(Drafter(layer))
            if index is None:
                continue
            first = drafted if index == drafter else 0
            for confidence, value in zip(confidences[first:], accepted[first:]):
                self.chances.look(index, confidence)
                self.chances.learn(index, confidence, value)
        self._news += shadow.num_rows

    def _index_of(self, drafter: Drafter | None) -> int | None:
        """Return whose experience it is: an exit's is the same in fewer bits, which change little of it."""
        if drafter is None or drafter in self.index:
            return None if drafter is None else self.index[drafter]
        return self.index.get(Drafter(drafter.exit_layer))

    # What it decides

    def _solve(self) -> None:
        """Find the best drafter that is there, its round, and the rate; and the same with those that could be made."""
        self._news, rows = 0, sum(self.chances.rows[:-1])
        self._wait = min(max(rows // 2, 3), 128)
        frequency, acceptance = (table[:-1] for table in self.chances.tables())
        self.acceptance = dict(zip(self.drafters, (frequency * acceptance).sum(axis=1).tolist()))
        there = len(self.drafters) - len(self.offered_bits)
        self.best = self._find_best(frequency[:there], acceptance[:there])
        self._rate = self.best.tokens / self.best.cost
        self.promised: Drafter | None = None
        self._gain = 0.0
        if self.offered_bits:
            best = self._find_best(frequency, acceptance)
            if best.pays and best.index >= there:
                self.promised = self.drafters[best.index]
                self._gain = 1 - best.cost / best.tokens * self.rate

    def _find_best(self, frequency: Any, acceptance: Any) -> _Best:
        costs, count = self.costs, len(frequency)
        rounds, looks, steps = costs.rounds[:count], costs.looks[:count], costs.steps[:count]
        rate = max(self._rate, 1 / costs.plain)
        for _ in range(5):
            values = DraftValues(frequency, acceptance, rate * steps, rate * looks)
            start = values.start()
            worth = 1 - rate * rounds[:, 0] + start
            index = int(worth.argmax())
            tokens = 1 + float(values.accepted()[index])
            cost = (tokens - float(worth[index])) / rate
            before, rate = rate, max(tokens / cost, 1 / costs.plain)
            if abs(rate / before - 1) < 0.1:
                break
        pays = start[index] > 0 and tokens / cost > 1 / costs.plain
        return _Best(index, tokens, cost, bool(pays), values, before)

    @property
    def rate(self) -> float:
        """Tokens per cost at which drafts are judged."""
        return self.best.rate

    def plan(self, context: RoundContext) -> Plan:
        self.expect_batch_size(context.batch_size)
        if context.match_length and self._copy:
            copied = self._copied(context.match_length)
            if copied:
                return Plan(exit_layer=None, max_speculations=0, copied=copied, acceptance=self.acceptance)
        best, costs = self.best, self.costs
        drafter = self.drafters[best.index] if best.pays else None
        if self.promised is not None and self._gain * context.remaining_tokens + 0.1 * self._spent / costs.plain >= MAKING:
            drafter = self.promised
            self.bits, self.offered_bits = self.offered_bits, ()
            self._by_texts.clear()
            self._solve()
            costs = self.costs
        elif drafter is not None and costs.is_due():
            drafter = None
        elif drafter is None and best.tokens / best.cost > PROMISING / costs.plain:
            likeliest = self.drafters[best.index]
            drafter = likeliest if costs.is_due(costs.bits[best.index], drafts=True) else None
        return Plan(
            exit_layer=None if drafter is None else drafter.exit_layer,
            bits=None if drafter is None else costs.bits[self.index[drafter]],
            max_speculations=0 if drafter is None else self.max_speculations,
            acceptance=self.acceptance,
            learn=self._learns_now(),
        )

    def _copied(self, match_length: int) -> int:
        """Return how many tokens to copy: 0 unless that is worth more than drafting at the rate that the text is decoded at.

        Where much is copied, that rate is well above the rate of drafts, and time has a higher price.
        """
        tokens, cost = (self.best.tokens, self.best.cost) if self.best.pays else (1.0, self.costs.plain)
        rate = max(tokens / cost, self._text_tokens / self._text_cost if self._text_cost else 0.0)
        best, copied, reliability, expected = tokens - rate * cost, 0, 1.0, 1.0
        for count, price in enumerate(self.costs.copying[1:], 1):
            reliability *= self.chances.of(-1, copy_confidence(match_length + count - 1))
            expected += reliability
            if expected - rate * price > best:
                best, copied = expected - rate * price, count
        return copied

    def adopt(self, other: AutoExit) -> None:
        """Take up what another one has learned about the drafters that both have, and about copies."""
        self.restore(other.state())

    def state(self) -> dict[str, Any]:
        return {"layers": [*self.exit_layers], "chances": self.chances.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave, by a policy that may have known weights of other bits.

        Raises ValueError if it is for other exit layers, or if another version saved it.
        """
        if missing := sorted(self.state().keys() - state.keys()):
            raise ValueError(f"the saved state lacks {', '.join(missing)}: it was saved by another version")
        if state["layers"] != [*self.exit_layers]:
            raise ValueError(f"the saved state is for other exit layers ({state['layers']}) than this policy's")
        self.chances.restore(state["chances"])
        self._solve()


class AutoStopping(NeverStop):
    """Draft on while one more draft is worth its cost. It belongs to an `AutoExit`, whose values it asks.

    What it looks at is known before the token is drawn, so it may drop (see policies.base).
    """

    observes = ObservationSpec(confidence=True)

    def __init__(self, chooser: AutoExit) -> None:
        self._chooser, self._drafter, self._reliability = chooser, 0, 1.0

    def start_round(self, plan: Plan) -> None:
        self._reliability = 1.0
        if plan.exit_layer is not None:
            self._drafter = self._chooser._index_of(Drafter(plan.exit_layer, plan.bits)) or 0
            best, costs = self._chooser.best, self._chooser.costs
            self._steps = (best.rate * costs.steps[self._drafter]).tolist()

    def stop_before_draw(self, row: DraftRow) -> bool:
        """Tell whether the token is not worth one more pass through the exit layer."""
        assert row.confidence is not None
        chooser = self._chooser
        reliability = self._reliability * chooser.chances.of(self._drafter, row.confidence)
        ahead = chooser.best.values.after(self._drafter, row.num_drafted + 1, reliability)
        if reliability + ahead < self._steps[row.num_drafted]:
            return True
        self._reliability = reliability
        return False

    def stop_after_draw(self, row: DraftRow, token: int) -> bool:
        """Tell whether not even looking at the next row is worth its head."""
        return self._chooser.best.values.after(self._drafter, row.num_drafted + 1, self._reliability) <= 0

    def threshold(self, drafter: Drafter) -> float:
        """Return the acceptance that a first draft needs to be worth its pass, were it the only one: rate * cost."""
        return self._steps[0]
