"""What `auto` has learned, and what follows from it: chances, the rate, the value of every draft.

`policies.auto.policy` says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.auto.acceptance_model import AcceptanceModel
from policies.auto.constants import TUNING
from policies.auto.copy_values import CopyTable
from policies.auto.draft_values import DraftValues
from policies.cost import CostModel, round_costs
from policies.fixed import MAX_COPY_LENGTH
from policies.records import Drafter, RoundRecord, Shadow
from policies.spide import NUM_BINS, AcceptanceTable, bin_of


@dataclass(frozen=True, slots=True, eq=False)
class _CostTable:
    """bits: that each drafter drafts in, None for the model's own weights. rounds: of 0, 1, .. drafts,
    [drafters, drafts + 1]. look: at one more row, [drafters]."""

    bits: tuple[int | None, ...]
    rounds: NDArray[np.float64]
    look: NDArray[np.float64]


class AutoLearner:
    """What `auto` knows: acceptance tables, how often each confidence occurs, the rate r, and the values that follow.

    drafters: the exits, ascending, and after them all layers in fewer bits. What an exit drafts in fewer bits is experience
        with that exit.
    exits: the exit layers among them.
    offered: how many of `drafters`, the last ones, can be had but are not there. They are chosen where they promise enough
        (`TUNING.promised_gain`); until then all is decided as without them.
    From the last solution: best_drafter, the one whose round is worth most, None if a plain step is worth as much (or nearly,
    see `use_cost`); likeliest_drafter, the best one to draft with, even so; best_tokens and best_cost, of the best round;
    mean_acceptance, by drafter, over all confidences.
    """

    def __init__(self, drafters: tuple[Drafter, ...], cost: CostModel, max_speculations: int, offered: int = 0) -> None:
        self.drafters = drafters
        self.exits = tuple(drafter.exit_layer for drafter in drafters if drafter.bits is None)
        self._offered = offered
        usual = np.array([TUNING.rounded_confidences])
        self._usual = usual / usual.sum()
        self.max_speculations = max_speculations
        self.table = AcceptanceTable(drafters)
        self.model = AcceptanceModel(drafters, cost.num_layers)
        self.copies = CopyTable()
        self._index = {drafter: index for index, drafter in enumerate(drafters)}
        self.use_cost(cost)
        self.reset()

    def use_cost(self, cost: CostModel, margin: float = 0.0) -> None:
        """Decide by this cost from the next solution on. margin: by how much drafts must beat plain steps, as a fraction."""
        self.cost = cost
        self._margin = margin
        rounded = [bits for _, bits in self.drafters if bits is not None]
        self._in_full = self._prices(())
        self._in_bits = self._prices(rounded) if rounded else self._in_full
        self._use_costs(self._in_bits if len(rounded) > self._offered else self._in_full)
        self.copy_costs = [cost.copying(copied) for copied in range(MAX_COPY_LENGTH + 1)]

    def _prices(self, low_bit_options: Sequence[int]) -> _CostTable:
        """Price drafts if exits may also draft in these bits: each does where that makes its usual round cheapest."""
        cost = self.cost
        full = round_costs(cost, self.max_speculations)
        usual = min(TUNING.usual_length, self.max_speculations)
        bits: list[int | None] = []
        rows, looks = [], []
        for layer, found in self.drafters:
            if found is None and low_bit_options:
                price, best = min((cost.rounded_round(layer, usual, number), number) for number in low_bit_options)
                found = best if price < full[layer - 1, usual] else None
            bits.append(found)
            if found is None:  # a row at an exit is needed by verification anyway
                rows.append(full[layer - 1])
                looks.append(cost.head_cost(layer))
            else:  # one that weights in fewer bits ran is not
                counts = range(self.max_speculations + 1)
                rows.append(np.array([cost.rounded_round(layer, count, found) for count in counts]))
                looks.append(cost.drafting(layer, 1, found))
        return _CostTable(bits=tuple(bits), rounds=np.array(rows), look=np.array(looks))

    def _use_costs(self, prices: _CostTable) -> None:
        """Charge these prices from now on."""
        self._bits = prices.bits
        self._rounds, self._look = prices.rounds, prices.look
        self._empty_round = prices.rounds[:, 0]
        self._steps = np.diff(prices.rounds, axis=1) - prices.look[:, None]  # the look is charged when it happens
        self._step_list: list[list[float]] = self._steps.tolist()
        self._round_list: list[list[float]] = prices.rounds.tolist()

    def bits_of(self, drafter: Drafter) -> int | None:
        """Return in how many bits it had best draft; None for the model's own weights."""
        return self._bits[self._index[drafter]]

    def experience_of(self, drafter: Drafter) -> Drafter:
        """Return which of `drafters` has its experience: an exit's is the same in fewer bits, which change little of it."""
        return drafter if drafter.exit_layer == self.cost.num_layers else Drafter(drafter.exit_layer)

    @property
    def drafting_never_pays(self) -> bool:
        """True if no draft would pay even if all were accepted. Then there is nothing to learn for."""
        best = ((np.arange(self.max_speculations + 1) + 1) / self._rounds).max()
        return bool(best <= 1 / self.cost.autoregressive())

    def reset(self) -> None:
        self.table.reset()
        self.copies.reset()
        self.frequency = np.zeros((len(self.drafters), NUM_BINS))
        self.model.reset()
        self._rows = self._solved_at = 0  # observed, of whatever layer
        self._surprise: dict[Drafter, tuple[float, float]] = {}
        self._next_rate = 1 / self.cost.autoregressive()
        self._solve(*self._accepted_and_seen())

    @property
    def known(self) -> float:
        """Observations per exit layer, the mean over these."""
        return sum(sum(self.table.seen[drafter]) for drafter in self.drafters if drafter.bits is None) / len(self.exits)

    def begin_text(self) -> None:
        """Let what earlier texts taught count less from now on, if it was much."""
        if self.known > TUNING.memory:
            kept = TUNING.memory / self.known
            self.table.scale(kept)
            self.frequency *= kept
            self._rows, self._solved_at = int(self._rows * kept), int(self._solved_at * kept)

    def observe_prompt(self, shadow: Shadow) -> None:
        self._count(shadow.layers, self.table.observe_shadow(shadow))
        self.learn()

    def observe(self, record: RoundRecord) -> None:
        """Learn from what a round drafted or dropped, and about all layers if it has shadow tokens."""
        if record.bits is not None and record.exit_layer != self.cost.num_layers:
            record = replace(record, bits=None)
        confidences = self.table.observe(record)
        if record.shadow is not None and confidences is not None:
            self._count(record.shadow.layers, confidences)
        elif record.exit_layer is not None:
            self._rows += min(record.num_accepted + 1, record.num_drafted) + (record.dropped_acceptance is not None)
        if record.bits is not None and record.confidences is not None:  # its confidences are not among shadow tokens
            index = self._index[Drafter(self.cost.num_layers, record.bits)]
            for confidence in record.confidences:
                self.frequency[index, bin_of(confidence)] += 1
        if self._rows > TUNING.resolve_growth * self._solved_at or self._is_surprised(record):
            self.learn()

    def _is_surprised(self, record: RoundRecord) -> bool:
        """Return whether this round's drafter was, since the last solution, not right about as often as supposed."""
        if record.drafter is None or not record.confidences:
            return False
        drafter = record.drafter
        more, variance = self._surprise.get(drafter, (0.0, 0.0))
        for index, confidence in enumerate(record.confidences[: min(record.num_accepted + 1, record.num_drafted)]):
            chance = self.chance(drafter, confidence)
            more += (index < record.num_accepted) - chance
            variance += chance * (1 - chance)
        self._surprise[drafter] = more, variance
        return more**2 > TUNING.surprise**2 * (variance + TUNING.surprise_floor)

    def longest(self, drafter: Drafter) -> int:
        """Return its longest draft: short ones first where all is supposed, as of drafts in fewer bits."""
        is_known = drafter.bits is None or sum(self.table.seen[drafter]) >= TUNING.min_low_bit_drafts
        return self.max_speculations if is_known else min(TUNING.usual_length, self.max_speculations)

    def _count(self, layers: tuple[int, ...], read: list[list[float]]) -> None:
        """Count the confidences of shadow tokens, [layers][rows].

        Drafts alone would count too few of the confidences at which drafting stopped; shadow rows have them all.
        """
        self._rows += len(read[0]) if read else 0
        for layer, confidences in zip(layers, read):
            index = self._index.get(Drafter(layer))
            if index is not None:
                for confidence in confidences:
                    self.frequency[index, bin_of(confidence)] += 1

    def learn(self) -> None:
        """Fit and solve again."""
        self._solved_at = self._rows
        self._surprise.clear()
        counts = self._accepted_and_seen()
        self.model.fit(*counts)
        self._solve(*counts)

    def _accepted_and_seen(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the counts, [drafters, bins] each."""
        accepted, seen = self.table.accepted, self.table.seen
        return np.array([accepted[one] for one in self.drafters]), np.array([seen[one] for one in self.drafters])

    def _solve(self, accepted: NDArray[np.float64], seen: NDArray[np.float64]) -> None:
        """Estimates, values and rate from counts and fit."""
        self.acceptance = self.model.acceptance(accepted, seen)
        counts = self.frequency.copy()
        exits = counts[: len(self.exits)]
        exits += (exits.sum(axis=0) + 1 / NUM_BINS) / max(exits.sum(), 1.0)
        counts[len(self.exits) :] += self._usual
        frequency = counts / counts.sum(axis=1, keepdims=True)
        self._chances: list[list[float]] = self.acceptance.tolist()
        self.mean_acceptance = dict(zip(self.drafters, (frequency * self.acceptance).sum(axis=1).tolist()))
        if not self._offered:
            self._find_best_round(frequency, len(self.drafters))
            return
        there = len(self.drafters) - self._offered
        self._use_costs(self._in_full)
        self._find_best_round(frequency, there)
        if self.known >= TUNING.min_observations_for_offer:
            without = max(self._next_rate, 1 / self.cost.autoregressive())
            self._use_costs(self._in_bits)
            self._find_best_round(frequency, len(self.drafters))
            rounded = self.best_drafter is not None and self.bits_of(self.best_drafter) is not None
            if not rounded or self._next_rate < (1 + TUNING.promised_gain) * without:
                self._use_costs(self._in_full)
                self._find_best_round(frequency, there)

    def _find_best_round(self, frequency: NDArray[np.float64], count: int) -> None:
        """Find the best of the first `count` drafters, its round, and the rate.

        frequency: of each confidence, [drafters, bins].
        """
        plain = self.cost.autoregressive()
        for _ in range(TUNING.max_rate_steps):
            self.rate = self._next_rate
            self.values = DraftValues(frequency, self.acceptance, self.rate * self._steps, self.rate * self._look)
            start = self.values.start()
            rounds = 1 - self.rate * self._empty_round + start
            # Dinkelbach's step: the tokens per cost of the round that is best at the present rate.
            best = int(rounds[:count].argmax())
            tokens = 1 + float(self.values.accepted()[best])
            cost = (tokens - float(rounds[best])) / self.rate
            self._next_rate = max(tokens / cost, 1 / plain)
            if abs(self._next_rate / self.rate - 1) < TUNING.rate_tolerance:
                break
        self.best_tokens, self.best_cost = tokens, cost
        pays = start[best] > 0 and rounds[best] > 1 - self.rate * plain
        pays = pays and self._next_rate * plain >= 1 + self._margin
        if not pays:
            self.best_tokens, self.best_cost = 1.0, plain
        self.likeliest_drafter = self.drafters[best]
        self.best_drafter = self.likeliest_drafter if pays else None

    def round_cost(self, record: RoundRecord) -> float:
        """Return what a round has cost, at present costs."""
        if record.num_copied:
            return self.cost.copying(record.num_copied)
        if record.drafter is None:
            return self.cost.autoregressive()
        return self._round_list[self._index[self.experience_of(record.drafter)]][record.num_drafted]

    def gain(self, drafter: Drafter, depth: int, reliability: float) -> float:
        """Return what keeping draft number depth + 1 is worth, if the whole draft with it holds with `reliability`."""
        index = self._index[drafter]
        step = self.rate * self._step_list[index][depth]
        return reliability + self.values.after(index, depth + 1, reliability) - step

    def going_on(self, drafter: Drafter, depth: int, reliability: float) -> float:
        """Return what looking at one more row is worth after `depth` drafts."""
        return self.values.after(self._index[drafter], depth, reliability)

    def needed(self, drafter: Drafter) -> float:
        """rate * cost of a first draft: the acceptance at which it pays for itself."""
        return self.rate * self._step_list[self._index[drafter]][0]

    def chance(self, drafter: Drafter, confidence: float) -> float:
        """Estimated acceptance of a token of this confidence."""
        return self._chances[self._index[drafter]][bin_of(confidence)]

    def adopt(self, other: AutoLearner) -> None:
        """Take up what another one has learned about the drafters that both have, and about copies."""
        for drafter in set(self.drafters) & set(other.drafters):
            self.table.accepted[drafter] = [*other.table.accepted[drafter]]
            self.table.seen[drafter] = [*other.table.seen[drafter]]
            self.frequency[self._index[drafter]] = other.frequency[other._index[drafter]]
        self.copies.restore(other.copies.state())
        self._rows = other._rows
        self.learn()

    def state(self) -> dict[str, Any]:
        return {
            "places": [drafter.saved_key for drafter in self.drafters],
            "table": self.table.state(),
            "frequency": self.frequency.tolist(),
            "fit": self.model.state(),
            "rate": self.rate,
            "rows": self._rows,
            "copies": self.copies.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave, by a learner that may know weights of other bits, which are then left out or not known.

        Raises ValueError if it is for other exit layers, or from another version.
        """
        if missing := sorted(self.state().keys() - state.keys()):
            raise ValueError(f"the saved state lacks {', '.join(missing)}: it was saved by another version")
        keys = [int(key) for key in state["places"]]
        exits = [key for key in keys if key > 0]
        if exits != [*self.exits]:
            raise ValueError(f"the saved state is for other exit layers ({exits}) than this policy's")
        frequency = np.asarray(state["frequency"], dtype=np.float64)
        if frequency.shape != (len(keys), NUM_BINS):
            raise ValueError(f"the saved state has counts of {len(frequency)} drafters, and names {len(keys)}")
        saved = [Drafter(key) if key > 0 else Drafter(self.cost.num_layers, -key) for key in keys]
        known = dict(zip(saved, frequency))
        own = [drafter.saved_key for drafter in self.drafters]
        nothing = [0.0] * NUM_BINS
        counts = {name: state["table"][name] for name in ("accepted", "seen")}
        self.table.restore(
            {
                **state["table"],
                **{name: {str(key): rows.get(str(key), nothing) for key in own} for name, rows in counts.items()},
            }
        )
        self.model.restore(state["fit"], saved)
        self.copies.restore(state["copies"])
        self.frequency = np.array([known.get(one, np.zeros(NUM_BINS)) for one in self.drafters])
        self._next_rate = float(state["rate"])
        self._rows = self._solved_at = int(state["rows"])
        self._solve(*self._accepted_and_seen())
