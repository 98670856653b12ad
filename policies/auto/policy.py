"""`auto`: one quantity, tokens per cost, decides the exit layer, the length and whether to speculate at all.

Think of a long text as rounds that each earn tokens and pay cost. The best achievable rate r of tokens per cost is the
number for which the best round has expected tokens - r * expected cost = 0 (Dinkelbach 1967, as in renewal-reward problems),
so a draft is worth its cost exactly when

    (chance that the drafts before it are accepted) * (its own chance) + (what going on is worth) >= r * (cost of a draft).

Chances come from how drafts of the same confidence fared (`chances.py`), costs from what rounds take (`round_costs.py`).
"What going on is worth" is the left side less the right, one draft later, averaged over the confidences that the drafter has
been showing: a small dynamic program (`best_round.py`), solved again when enough was learned. Its value at the round's start
ranks the drafters, and r falls out of it. So SPIDE's tau is no hyperparameter any more (tau = r * cost, less the value of
going on), nor are the length and the layer, and DEL's TPL is the special case in which confidence says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np

from policies.auto.best_round import MARGIN, MARGIN_OF_SHORT, best_round
from policies.auto.chances import COPIES, Chances, copy_confidence
from policies.auto.round_costs import RoundCosts
from policies.base import NeverStop
from policies.bounds import MAX_DRAFTS, check_layers, check_number
from policies.building import Setup
from policies.cost import CostModel, LayerCost, MeasuredCost, at_rows
from policies.records import Drafter, DraftRow, ObservationSpec, Plan, RoundContext, RoundRecord, Shadow
from policies.spide import draft_outcomes, shadow_outcomes

MAX_LENGTH = 10
"""Longest draft. A longer one of a layer that is this good gains a few percent at most."""
PROMPT_ROWS, LEARN_EVERY = 8, 32
"""The last rows of a prompt for which every exit is looked at, and then one row in so many (docs/log.md, 22)."""
LEARNING, IDLE_LEARNING = 0.02, 0.005
"""Most of the cost of all texts that this may take, and where exits are known not to pay."""
SEEN, KNOWN = 4, 24
"""Rows from which on an exit may draft, and from which on it counts as known."""
MAKING = 20
"""Plain steps that it takes to round the weights to 8 bits: 14 of SmolLM2's on one thread (docs/log.md, 28)."""
TOGETHER, REST, SAMPLE = 16, 32, 4
"""Rounds that are learned from in one go; most plain steps before the next look, and of how many one is learned from."""
SHORT = 2e-3
"""Seconds of a plain step below which a look at each round is felt."""


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Every exit layer up to L/4, then every second one up to L/2.

    A deeper one costs more than half a pass for each draft and was never best. A layer between two others is worth little
    more than they are.
    """
    half, quarter = max(num_layers // 2, 1), max(num_layers // 4, min(num_layers // 2, 4))
    return (*range(1, quarter + 1), *range(quarter + 2, half + 1, 2))


class AutoExit:
    """Draft with what is worth most at the current rate; a plain step where nothing is.

    layers: candidates; None for those of `default_layers`.
    cost: it maximises tokens per cost. copy: copy from the text where that is worth more.
    bits: that drafts may be made in, where weights in fewer bits are at hand: by all layers, and up to an exit where that is
        cheaper. offered_bits: that weights can be made in. A plan that drafts with them means that they are to be made: once
        the rest of the text, and a small share of all texts so far, are worth it.
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
        self._index = {drafter: index for index, drafter in enumerate(self.drafters)}
        self.chances = Chances((*self.drafters, COPIES))
        self.max_speculations, self._num_layers = max_speculations, num_layers
        self._cost, self._repair, self._copy = cost or LayerCost(num_layers), repair, copy
        # Time decides already, so texts may as well decide by each other's experience.
        self.learns_together = isinstance(cost, MeasuredCost) and not cost.fixed
        self.reset()

    @classmethod
    def from_args(
        cls, setup: Setup, *, cost: str = "measured", d_max: int = MAX_LENGTH, bits: bool = True, **options: Any
    ) -> AutoExit:
        """Build it from its name's ARGS (`policies.names`)."""
        found = setup.cost(cost)
        # A pre-verifier's passes are part of the cost, but are no part of the seconds that rounds are compared by.
        repair = cost == "measured" and not found.block and not found.fixed
        made, offered = (setup.draft_bits, setup.offered_bits) if bits else ((), ())
        given = {**options, "max_speculations": d_max, "repair": repair, "bits": made, "offered_bits": offered}
        policy = cls(num_layers=setup.num_layers, cost=found, **given)
        policy.takes_bits = bits
        return policy

    def default_stopping(self) -> AutoStopping:
        """Make the stopping policy that ends its drafts."""
        return AutoStopping(self)

    def reset(self) -> None:
        """Go back to what is usual, and to the cost as it was expected."""
        self.chances.reset()
        self._costs: dict[int, RoundCosts] = {}  # by how many texts share a pass
        self._texts = 1
        self._waiting: list[RoundRecord] = []  # rounds that it has not learned from yet
        self._spent = self._taught = 0.0  # costs of all rounds, and of all looks at every exit, as expected
        self._rows_seen = self._rows_taught = 0  # of rounds
        self._rate, self.tries, self._plain = 0.0, False, Plan(exit_layer=None, max_speculations=0)
        self._plain_steps = self._resting = 0  # since it last drafted or copied; until it looks again
        self._solve()
        self.begin_text()

    def begin_text(self) -> None:
        self._take_in()
        self._text_tokens, self._text_cost = 0, 0.0
        self._plain_steps, self._resting = min(self._plain_steps, REST) // 4, 0

    def expect_batch_size(self, texts: int) -> None:
        """Expect this many texts in passes from now on. The more there are, the less a row costs and a draft gains."""
        texts = self._cost.for_batch_size(texts).batch_size  # a number of texts that changes no cost changes no plan
        if texts != self._texts:
            self._take_in()
            self.costs.forget_unfinished()
            self._texts, self._resting = texts, 0
            self._solve()

    @property
    def costs(self) -> RoundCosts:
        """Return what rounds cost at the present batch size."""
        if self._texts not in self._costs:
            self._costs[self._texts] = RoundCosts(
                self._cost, self.drafters, self.bits, self.max_speculations, self._texts, repair=self._repair
            )
        return self._costs[self._texts]

    # What it learns

    @property
    def observes(self) -> ObservationSpec:
        """Ask for shadow tokens of as many of the prompt's rows as the text to come pays for, after what was spent before."""
        learns = self._share == LEARNING and self._taught <= LEARNING * self._spent
        row_cost = self._look_cost(PROMPT_ROWS) / PROMPT_ROWS
        return ObservationSpec(
            confidence=True,
            copies="welcome" if self._copy else "none",
            shadow_layers=self._watched,
            prompt_rows=PROMPT_ROWS if learns else 0,
            prompt_every=max(ceil(row_cost / (LEARNING * self.costs.plain)), PROMPT_ROWS),
            bits=self.bits,
        )

    def _learns_now(self) -> bool:
        """Return whether a round may look at every exit; of texts that learn together, one at a time."""
        if self._rows_taught * LEARN_EVERY > self._rows_seen:
            return False
        if self._taught >= self._share * self._spent:
            return False
        self._rows_taught += 1
        self._taught += self._look_cost(1)
        return True

    def _look_cost(self, rows: int, sampled: bool = False) -> float:
        """Price looking at the watched exits for so many rows. Sampling doubles it: distributions take as long as heads."""
        return (1 + sampled) * len(self._watched) * at_rows(self._cost.head_seconds, rows)

    def observe_prompt(self, shadow: Shadow) -> None:
        self._learn_shadow(shadow)
        self._take_in()

    def observe(self, record: RoundRecord) -> None:
        self._rows_seen += record.num_accepted + 1
        resting, self._resting = self._resting, max(self._resting - 1, 0)
        teaches = record.shadow or record.copies
        if resting % SAMPLE and not teaches:  # of steps that are all alike some are enough
            self._count(self.costs.plain, 1)
            return
        self._waiting.append(record)
        if (teaches and not resting) or len(self._waiting) >= min(self._rows_seen // 8, TOGETHER) // self._texts:
            self._take_in()

    def _count(self, cost: float, tokens: int) -> None:
        self._spent += cost
        self._text_cost += cost
        self._text_tokens += tokens

    def _take_in(self) -> None:
        """Learn from what rounds drafted or dropped, from what copies would have said, and from shadow tokens."""
        waiting, self._waiting = self._waiting, []
        costs, news = self.costs, False
        for record in waiting:
            drafter = self.index_of(record.drafter)
            self._count(costs.of(drafter, record.num_drafted), len(record.tokens))
            for match_length, right in record.copies if self._copy else ():
                self.chances.learn(-1, copy_confidence(match_length), right)
            if drafter is not None and record.confidences is not None:
                for confidence, accepted in draft_outcomes(record):
                    self.chances.learn(drafter, confidence, accepted, record.acceptance_probabilities is not None)
                    self._news += 1
            if record.shadow is not None:
                self._learn_shadow(record.shadow, record.drafter, record.num_drafted)
                self._rows_taught += record.shadow.num_rows - 1
                self._taught -= self._look_cost(1)  # paid in advance
            news |= costs.observe(record)
        if news or self._news > self._enough:
            self._solve()

    def _learn_shadow(self, shadow: Shadow, drafted: Drafter | None = None, num_drafted: int = 0) -> None:
        """Learn from shadow tokens, as of `shadow_outcomes`."""
        sampled = shadow.acceptance_probabilities is not None
        for drafter, confidence, accepted in shadow_outcomes(shadow, drafted, num_drafted):
            index = self._index.get(drafter)
            if index is not None:  # else a stopping policy asked for it
                self.chances.learn(index, confidence, accepted, sampled)
        self._news += shadow.num_rows
        self._taught += self._look_cost(shadow.num_rows, sampled)

    def index_of(self, drafter: Drafter | None) -> int | None:
        """Return which of `drafters` has its experience: an exit's is the same in fewer bits, which change little of it."""
        return None if drafter is None else self._index.get(drafter, self._index.get(Drafter(drafter.exit_layer)))

    # What it decides

    def _solve(self) -> None:
        """Find the best round with what is there, and what weights that can be made promise beyond that."""
        self._news, self._enough = 0, min(max(sum(self.chances.rows[:-1]) // 2, 3), 256)
        frequency, acceptance = (table[:-1] for table in self.chances.tables())
        right = (frequency * acceptance).sum(axis=1)
        self.acceptance = dict(zip(self.drafters, right.tolist()))
        # Exits that were hardly looked at yet draft nothing: in most models they are rarely right.
        usable = [drafter.bits is not None or rows >= SEEN for drafter, rows in zip(self.drafters, self.chances.rows)]
        there = len(self.drafters) - len(self.offered_bits)
        at_hand = [use and index < there for index, use in enumerate(usable)]
        self._is_short = isinstance(self._cost, MeasuredCost) and self._texts == 1 and self.costs.plain < SHORT
        margin = MARGIN_OF_SHORT if self._is_short else MARGIN
        self.best = best_round(self.costs, frequency, acceptance, at_hand, self._rate, margin)
        self._rate = self.best.rate
        promise = best_round(self.costs, frequency, acceptance, usable, self._rate) if self.offered_bits else self.best
        self._gain = 1 - self.best.rate / promise.rate if promise.pays and promise.index >= there else 0.0
        # By single drafts of this one it is seen what rounds cost that do not seem to pay, but would if rows were free.
        tried = at_hand & (right > [layer * (bits or 16) / 16 / self._num_layers for layer, bits in self.drafters])
        self._tried = int(np.where(tried, (1 + right) / self.costs.rounds[:, 1], 0).argmax()) if any(tried) else None
        # All exits are watched where a draft as good as the last one's would pay at the price of the first, else that alone.
        last = len(self.exit_layers) - 1
        rows, hoped = self.chances.rows[last], 1 + self.acceptance[self.drafters[last]]
        hopeful = rows >= SEEN and hoped * self.costs.plain >= self.costs.rounds[0, 1]
        self._watched = self.exit_layers if hopeful else self.exit_layers[-1:]
        learns = rows < (KNOWN if hopeful else SEEN) or (self.best.pays and self.best.index <= last)
        self._share = LEARNING if learns else IDLE_LEARNING

    def plan(self, context: RoundContext) -> Plan:
        if self._resting and context.batch_size == 1:
            return self._plain
        self.expect_batch_size(context.batch_size)
        copied = self._copied(context.match_length) if context.match_length and self._copy else 0
        if copied:
            self._plain_steps = 0
            return Plan(exit_layer=None, max_speculations=0, copied=copied, acceptance=self.acceptance)
        # The rest of the text, and time set aside for learning, must make up for the rounding of the weights.
        put_aside = LEARNING * self._spent / self.costs.plain
        if self._gain and self._gain * context.remaining_tokens + put_aside >= MAKING:
            self.bits, self.offered_bits = (*self.bits, *self.offered_bits), ()
            self._costs.clear()
            self._solve()
        best, learn = self.best, self._learns_now()
        self.tries = not best.pays and self._tried is not None and self.costs.is_due(self._tried)
        index = self._tried if self.tries else best.index if best.pays and not self.costs.is_due() else None
        if index is not None:
            self._plain_steps *= self.tries
            layer, bits = self.drafters[index].exit_layer, self.costs.bits[index]
            most = 1 if self.tries else self.max_speculations
            return Plan(exit_layer=layer, bits=bits, max_speculations=most, acceptance=self.acceptance, learn=learn)
        if self._is_short and not best.pays:
            self._resting = min(self._plain_steps + 1, REST)
        self._plain_steps += self._resting or 1
        self._plain = Plan(exit_layer=None, max_speculations=0, acceptance=self.acceptance, learn=False)
        return replace(self._plain, learn=learn, rest=self._resting)

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

    def reason(self) -> str:
        """Say in a line what it does at present, and why."""
        self._take_in()
        best, costs = self.best, self.costs
        if not best.pays and best.tokens <= 1:
            return "auto decodes plainly and copies what repeats: nothing that was seen of exits promises more"
        name, steps = self.drafters[best.index], best.cost / costs.plain
        promise = (
            f"{best.tokens:.1f} tokens for {steps:.1f} plain steps, {best.tokens / steps:.2f} times plain decoding"
        )
        if best.pays:
            return f"auto drafts by {name}, of which {self.acceptance[name]:.0%} are right: a round brings {promise}"
        return f"auto decodes plainly and copies what repeats: drafts by {name} would bring {promise}"

    def state(self) -> dict[str, Any]:
        self._take_in()
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
        self._steps = [0.0]

    def start_round(self, plan: Plan) -> None:
        self._reliability = 1.0
        chooser = self._chooser
        if plan.exit_layer is not None:
            self._drafter = chooser.index_of(Drafter(plan.exit_layer, plan.bits)) or 0
            steps = chooser.best.price * chooser.costs.steps[self._drafter]
            self._steps = [0.0] if chooser.tries else steps.tolist()  # what is tried is drafted whatever its confidence

    def stop_before_draw(self, row: DraftRow) -> bool:
        """Tell whether the token is not worth one more pass through the exit layer."""
        assert row.confidence is not None
        reliability = self._reliability * self._chooser.chances.of(self._drafter, row.confidence)
        ahead = self._chooser.best.values.after(self._drafter, row.num_drafted + 1, reliability)
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
