"""`auto`: one quantity, tokens per cost, decides the exit layer, the length and whether to speculate at all.

Think of a long text as rounds that each earn tokens and pay cost. The best achievable rate r of tokens per cost is the
number for which the best round has expected tokens - r * expected cost = 0 (Dinkelbach 1967, as in renewal-reward problems),
so a draft is worth its cost exactly when

    (chance that the drafts before it are accepted) * (its own chance) + (what going on is worth) >= r * (cost of a draft).

Chances come from SPIDE's confidence -> acceptance tables, one per exit layer, fed with shadow tokens, and from what such
tables have in common (`acceptance_model.py`). "What going on is worth" is the left side less the right, one draft later,
averaged over the confidences which that layer has been showing: a small dynamic program, solved anew whenever something was
learned. Its value at the round's start ranks the exit layers, and r falls out of it. So SPIDE's tau is no hyperparameter
any more (tau = r * cost, less the value of going on), nor are the length and the layer, and DEL's TPL is the special case in
which confidence says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.acceptance_table import DOUBT_BINS, AcceptanceTable
from policies.auto.acceptance_model import AcceptanceModel
from policies.auto.constants import TUNING
from policies.auto.draft_values import DraftValues
from policies.auto.drift import CostDrift
from policies.base import NeverStop, check_layers
from policies.building import Setup
from policies.cost import CostModel, LayerCost, MeasuredCost, WithPreVerifier
from policies.records import DraftRow, Needs, Plan, RoundContext, RoundRecord, Shadow


class AutoLearner:
    """What `auto` knows: acceptance tables, how often each confidence occurs, the rate r, and the values that follow.

    best_layer: the exit layer whose round is worth most, None if a plain step is worth as much (or nearly, see `use_cost`).
    layer_acceptance: by exit layer, over all confidences. Both follow from the last solution.
    """

    def __init__(self, layers: tuple[int, ...], cost: CostModel, max_speculations: int, decay: float) -> None:
        self.layers = layers
        self.max_speculations = max_speculations
        self.table = AcceptanceTable(layers, decay=decay)
        self.model = AcceptanceModel(layers, cost.num_layers)
        self._decay = decay
        self._index = {layer: index for index, layer in enumerate(layers)}
        self.use_cost(cost)
        self.reset()

    def use_cost(self, cost: CostModel, margin: float = 0.0) -> None:
        """Decide by this cost from the next solution on. margin: by which part drafts must beat plain steps."""
        self.cost = cost
        self._margin = margin
        counts = range(self.max_speculations + 1)
        rounds = np.array([[cost.round(layer, count) for count in counts] for layer in self.layers])
        self._rounds = rounds
        self._look = np.array([cost.look(layer) for layer in self.layers])
        self._empty_round = rounds[:, 0]
        self._steps = np.diff(rounds, axis=1) - self._look[:, None]  # the look is charged when it happens
        self._step_list: list[list[float]] = self._steps.tolist()

    @property
    def hopeless(self) -> bool:
        """Whether no draft would pay even if all were accepted: then there is nothing to learn for."""
        best = ((np.arange(self.max_speculations + 1) + 1) / self._rounds).max()
        return bool(best <= 1 / self.cost.autoregressive())

    def reset(self) -> None:
        """Back to the prior."""
        self.table.reset()
        self.frequency = np.zeros((len(self.layers), len(DOUBT_BINS)))
        self.model.reset()
        self._rows = self._solved_at = 0  # observed, of whatever layer
        self._next_rate = 1 / self.cost.autoregressive()
        self._solve(*self._accepted_and_seen())

    @property
    def known(self) -> float:
        """Observations per layer, the mean over layers."""
        return self.table.observations / len(self.layers)

    def begin_text(self) -> None:
        """What earlier texts taught counts less from now on, if it was much."""
        if self.known > TUNING.memory:
            kept = TUNING.memory / self.known
            self.table.scale(kept)
            self.frequency *= kept
            self._rows, self._solved_at = int(self._rows * kept), int(self._solved_at * kept)

    def observe_prompt(self, shadow: Shadow) -> None:
        """Learn from the prompt's last rows."""
        self.table.observe_shadow(shadow)
        self._count(shadow)
        self.learn()

    def observe(self, record: RoundRecord) -> None:
        """Learn from a round: what it drafted or dropped always, all layers when it has shadow tokens."""
        self.table.observe(record)
        if record.shadow is not None:
            self._count(record.shadow)
        elif record.exit_layer is not None:
            self._rows += min(record.num_accepted + 1, record.num_drafted) + (record.dropped_acceptance is not None)
        if self._rows > TUNING.news * self._solved_at:
            self.learn()

    def _count(self, shadow: Shadow) -> None:
        # Drafts alone would count too few of the confidences at which drafting stopped: shadow rows have them all.
        self._rows += shadow.confidences.shape[1]
        if self._decay < 1:
            self.frequency *= self._decay
        for layer, confidences in zip(shadow.layers, shadow.confidences.tolist()):
            index = self._index.get(layer)
            if index is not None:
                for confidence in confidences:
                    self.frequency[index, DOUBT_BINS.index(confidence)] += 1

    def learn(self) -> None:
        """Everything from the counts."""
        self._solved_at = self._rows
        counts = self._accepted_and_seen()
        self.model.fit(*counts)
        self._solve(*counts)

    def _accepted_and_seen(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Counts, [layers, bins] each."""
        accepted, seen = self.table.accepted, self.table.seen
        return np.array([accepted[layer] for layer in self.layers]), np.array([seen[layer] for layer in self.layers])

    def _solve(self, accepted: NDArray[np.float64], seen: NDArray[np.float64]) -> None:
        """Estimates, values and rate from counts and fit."""
        self.acceptance = self.model.acceptance(accepted, seen)
        counts = self.frequency + (self.frequency.sum(axis=0) + 1 / len(DOUBT_BINS)) / max(self.frequency.sum(), 1.0)
        frequency = counts / counts.sum(axis=1, keepdims=True)
        self._chances: list[list[float]] = self.acceptance.tolist()
        self.layer_acceptance = dict(zip(self.layers, (frequency * self.acceptance).sum(axis=1).tolist()))
        plain = self.cost.autoregressive()
        for _ in range(TUNING.passes):
            self.rate = self._next_rate
            self.values = DraftValues(frequency, self.acceptance, self.rate * self._steps, self.rate * self._look)
            start = self.values.start()
            rounds = 1 - self.rate * self._empty_round + start
            # Dinkelbach's step: the tokens per cost of the round that is best at the present rate.
            best = int(rounds.argmax())
            tokens = 1 + float(self.values.accepted()[best])
            cost = (tokens - float(rounds[best])) / self.rate
            self._next_rate = max(tokens / cost, 1 / plain)
            if abs(self._next_rate / self.rate - 1) < TUNING.settled:
                break
        pays = start[best] > 0 and rounds[best] > 1 - self.rate * plain
        pays = pays and self._next_rate * plain >= 1 + self._margin
        self.likeliest_layer = self.layers[best]
        self.best_layer = self.likeliest_layer if pays else None

    def gain(self, layer: int, depth: int, reliability: float) -> float:
        """What keeping draft number depth + 1 is worth, when all of the draft including it holds with `reliability`."""
        index = self._index[layer]
        step = self.rate * self._step_list[index][depth]
        return reliability + self.values.after(index, depth + 1, reliability) - step

    def going_on(self, layer: int, depth: int, reliability: float) -> float:
        """What looking at one more row is worth after `depth` drafts."""
        return self.values.after(self._index[layer], depth, reliability)

    def needed(self, layer: int) -> float:
        """rate * cost of a first draft: the acceptance at which it pays for itself."""
        return self.rate * self._step_list[self._index[layer]][0]

    def chance(self, layer: int, confidence: float) -> float:
        """Estimated acceptance of a token of this confidence at this layer."""
        return self._chances[self._index[layer]][DOUBT_BINS.index(confidence)]

    def state(self) -> dict[str, Any]:
        """Tables, frequencies and rate, for JSON."""
        return {
            "table": self.table.state(),
            "frequency": self.frequency.tolist(),
            "fit": self.model.state(),
            "rate": self.rate,
            "rows": self._rows,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave. Raises ValueError if it is for other layers, or from another version."""
        if missing := sorted(self.state().keys() - state.keys()):
            raise ValueError(f"the saved state lacks {', '.join(missing)}: it was saved by another version")
        frequency = np.asarray(state["frequency"], dtype=np.float64)
        if frequency.shape != self.frequency.shape:
            raise ValueError(f"the saved state is for {len(frequency)} exit layers, this policy has {len(self.layers)}")
        self.table.restore(state["table"])
        self.model.restore(state["fit"])
        self.frequency = frequency
        self._next_rate = float(state["rate"])
        self._rows = self._solved_at = int(state["rows"])
        self._solve(*self._accepted_and_seen())


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Every exit layer up to L/4, then every second one up to L/2: a deeper one costs more than half a pass per draft and
    was never best, and one layer between two that are learned is worth little more than they are."""
    half, quarter = max(num_layers // 2, 1), max(num_layers // 4, min(num_layers // 2, 4))
    return (*range(1, quarter + 1), *range(quarter + 2, half + 1, 2))


class AutoExit:
    """Exit at the layer whose round is worth most at the current rate; a plain step where none is.

    layers: candidates; None for those of `default_layers`.
    cost: tokens per what is maximised. decay: of observations per round; 1 keeps all, which measured best.
    prompt_rows, learn_first, learn_every: shadow tokens of a prompt's last rows, of a call's first, and of one in so many
        after them; what it drafts or drops teaches in every round.
    repair: correct the cost by the seconds that rounds take (`policies.auto.drift`).
    Deterministic: same records, same cost, same plans. Records hold seconds only where rounds were timed.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        layers: Iterable[int] | None = None,
        cost: CostModel | None = None,
        max_speculations: int = TUNING.max_speculations,
        decay: float = 1.0,
        prompt_rows: int = TUNING.prompt_rows,
        learn_every: int = TUNING.learn_every,
        learn_first: int = 0,
        repair: bool = False,
    ) -> None:
        for name, value, least in (
            ("max_speculations", max_speculations, 1),
            ("prompt_rows", prompt_rows, 0),
            ("learn_every", learn_every, 1),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        candidates = check_layers(tuple(default_layers(num_layers) if layers is None else layers), num_layers)
        self.learner = AutoLearner(candidates, cost or LayerCost(num_layers), max_speculations, decay)
        self._cost = self.learner.cost
        self._repair = repair
        self._drifts: dict[int, CostDrift] = {}  # by how many texts share the passes
        self._needs = Needs(
            confidence=True,
            shadow_layers=candidates,
            prompt_rows=prompt_rows,
            prompt_every=TUNING.prompt_every,
            learn_every=learn_every,
            learn_first=learn_first,
        )
        self._needs_taught = replace(self._needs, prompt_rows=min(TUNING.prompt_rows_taught, prompt_rows))
        self._texts, self._hopeless = 1, False
        self._plans = 0  # of all texts in company
        # Decided by time already, so texts that learn together may decide by each other's experience as well.
        timed = cost.cost if isinstance(cost, WithPreVerifier) else cost
        self.learns_together = isinstance(timed, MeasuredCost) and not timed.fixed

    @classmethod
    def from_args(
        cls, setup: Setup, *, cost: str = "measured", d_max: int = TUNING.max_speculations, **options: Any
    ) -> AutoExit:
        """Built from its name's ARGS (`policies.names`)."""
        found = setup.cost(cost)
        # A pre-verifier's passes are part of the cost, but are no part of the seconds that rounds are compared by.
        repair = cost == "measured" and setup.ends is None and not getattr(found, "fixed", False)
        return cls(num_layers=setup.num_layers, cost=found, max_speculations=d_max, repair=repair, **options)

    def own_stopping(self) -> AutoStopping:
        """The half that ends its drafts."""
        return AutoStopping(self.learner)

    @property
    def needs(self) -> Needs:
        """Fewer of the next prompt's rows when earlier calls have taught enough, none where no draft pays."""
        if self._hopeless or self._idle:
            return replace(self._needs, prompt_rows=0)
        if self.learner.known < TUNING.taught:
            return self._needs
        return replace(self._needs_taught, prompt_rows=-(-self._needs_taught.prompt_rows // self._sharing))

    @property
    def exit_layers(self) -> tuple[int, ...]:
        """The candidates."""
        return self.learner.layers

    def begin_text(self) -> None:
        """Make room for what the new text teaches."""
        self.learner.begin_text()

    def expect_company(self, texts: int) -> None:
        """So many texts share the passes from now on: with others a row costs less, and a draft gains less."""
        if texts != self._texts:
            self._texts = texts
            drift = self._drift
            if drift is not None:
                drift.forget_unfinished()
            self._decide_by_cost()

    def _decide_by_cost(self) -> None:
        """Solve for the present cost in the present company."""
        drift = self._drift
        cost = self._cost.in_company(self._texts) if drift is None else drift.cost
        if cost == self.learner.cost:  # company changes nothing, so nothing may change by company
            return
        self.learner.use_cost(cost, margin=TUNING.margin_in_company if self._texts > 1 else 0.0)
        self._hopeless = self._texts > 1 and self.learner.hopeless
        if not self._hopeless:
            self.learner.learn()

    @property
    def _drift(self) -> CostDrift | None:
        """What rounds in the present company say about its cost."""
        if not self._repair:
            return None
        if self._texts not in self._drifts:
            self._drifts[self._texts] = CostDrift(self._cost.in_company(self._texts), self._texts)
        return self._drifts[self._texts]

    def plan(self, context: RoundContext) -> Plan:
        """The best layer and the cap, or a plain step."""
        self.expect_company(context.company)
        if self._hopeless:
            return Plan(exit_layer=None, max_speculations=0, learn=False)
        layer = self.learner.best_layer
        drift = self._drift
        due = None if drift is None else drift.due
        if due is not None:
            layer = self.learner.likeliest_layer if due == "draft" else None
        return Plan(
            exit_layer=layer,
            max_speculations=0 if layer is None else self.learner.max_speculations,
            acceptance=self.learner.layer_acceptance,
            learn=self._learns_now(),
        )

    def _learns_now(self) -> bool:
        """Of texts that learn together one learns in a round at most: together they learn as much as a text alone."""
        self._plans += 1
        return self._plans % (self._sharing * (TUNING.idle if self._idle else 1)) == 0

    @property
    def _sharing(self) -> int:
        """Texts that share what they learn."""
        return self._texts if self.learns_together else 1

    @property
    def _idle(self) -> bool:
        """Whether texts in company know that drafts do not pay: learning is then most of what `auto` costs."""
        return self._sharing > 1 and self.learner.best_layer is None and self.learner.known >= TUNING.taught

    def observe_prompt(self, shadow: Shadow) -> None:
        """The prompt's last positions are the first observations."""
        self.learner.observe_prompt(shadow)

    def observe(self, record: RoundRecord) -> None:
        """Learn from a round."""
        self.learner.observe(record)
        drift = self._drift
        if drift is not None and drift.observe(record):
            self._decide_by_cost()

    def reset(self) -> None:
        """Back to the prior, and to the cost as it was measured."""
        self._drifts.clear()
        self._texts, self._hopeless = 1, False
        self.learner.use_cost(self._cost)
        self.learner.reset()

    def state(self) -> dict[str, Any]:
        """What was learned."""
        return self.learner.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave."""
        self.learner.restore(state)


class AutoStopping(NeverStop):
    """Draft on while one more draft is worth its cost; the other half of `AutoExit`, whose learner it asks.

    What it looks at is known before the token is drawn, so it may drop (see policies.base).
    """

    def __init__(self, learner: AutoLearner) -> None:
        self.needs = Needs(confidence=True)
        self._learner = learner
        self._reliability = 1.0

    def start_round(self, plan: Plan) -> None:
        """Nothing is drafted yet: reliability 1."""
        self._reliability = 1.0

    def stop_before_draw(self, row: DraftRow) -> bool:
        """When the token is not worth one more pass through the exit layer."""
        assert row.confidence is not None
        reliability = self._reliability * self._learner.chance(row.exit_layer, row.confidence)
        if self._learner.gain(row.exit_layer, row.num_drafted, reliability) < 0:
            return True
        self._reliability = reliability
        return False

    def stop_after_draw(self, row: DraftRow, token: int) -> bool:
        """When not even looking at the next row is worth its head."""
        return self._learner.going_on(row.exit_layer, row.num_drafted + 1, self._reliability) <= 0

    def threshold(self, exit_layer: int) -> float:
        """The acceptance that a first draft needs to be worth its pass, were it the only one: rate * cost."""
        return self._learner.needed(exit_layer)
