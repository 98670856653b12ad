"""The default policy of looped models: along the diagonal, in rounds that the first loop drafts, or plainly."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from policies.auto.policy import AutoExit
from policies.base import StatelessPolicy
from policies.building import Setup
from policies.cost import CostModel, cost_of_sweep
from policies.records import Plan, RoundContext, RoundRecord

HOPED = 0.8
"""Agreement of the first loop with the last one before anything was seen of it, and again after many plain steps.

While a text is decoded in waves, it is what would make as many sweeps if no other loop corrected drafts.
"""
_MARGIN = 1.05  # what another way must gain: a wave that begins again fills its diagonal first
_SEEN = 32  # drafts that say how many of the next ones are right
_FORGOTTEN = 256  # rounds after which what was seen of another way counts little
_TRIES = 4  # rounds of each way before any is preferred by the time that it takes
_MOST_DRAFTS = 8


class LoopedAuto(StatelessPolicy):
    """Take, in every round, the way that is expected to take least time for a token.

    A text's drafts say how often the first loop is right, and `cost` what that makes of each way. repair: correct that by the
    seconds that rounds take. In a long text, for example, a wave reads more keys and values than other rounds.
    """

    def __init__(self, *, num_layers: int, num_loops: int, cost: CostModel, repair: bool = False) -> None:
        self._loops, self._layers, self._cost, self._repair = num_loops, num_layers // num_loops, cost, repair
        self.exit_layers, self.learns_together = (self._layers,), repair
        self.reset()

    def reset(self) -> None:
        self._agreement, self._way = HOPED, "wave"
        # Of each way, what its rounds took, by what they were expected to; and how many rounds there were.
        self._taken = {"wave": 1.0, "rounds": 1.0, "plain": 1.0}
        self._tried = dict.fromkeys(self._taken, 0)
        self._length, self._sweep, self._expected = 1, 1.0, self._cost

    def state(self) -> dict[str, Any]:
        return {"agreement": self._agreement, "way": self._way}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave; seconds are learned again. Raises ValueError for another policy's state."""
        agreement, way = state.get("agreement"), state.get("way")
        if not (isinstance(agreement, float) and 0 <= agreement <= 1 and way in [*self._taken]):
            raise ValueError(
                f"{type(self).__name__} keeps an agreement and a way, and the saved state holds {sorted(state)}"
            )
        self.reset()
        self._agreement, self._way = agreement, way

    def prices(self, texts: int = 1) -> dict[str, float]:
        """Price a token by each way, where so many texts share the passes."""
        cost = self._expected = self._cost.for_batch_size(texts)
        right, wrong, loops = self._agreement, 1 - self._agreement, self._loops
        tokens = accumulate(right**drafts for drafts in range(_MOST_DRAFTS + 1))
        rounds = {drafts: cost.round(self._layers, drafts) / count for drafts, count in enumerate(tokens) if drafts}
        self._length = min(rounds, key=lambda drafts: rounds[drafts])
        sweeps = right + wrong * loops  # a token
        rows = (loops + wrong * loops * (loops - 1) / 2) / sweeps * cost.batch_size  # in flight, and of no use later
        self._sweep = cost_of_sweep(cost, self._layers, rows) / cost.batch_size
        return {"wave": sweeps * self._sweep, "rounds": rounds[self._length], "plain": cost.autoregressive()}

    def plan(self, context: RoundContext) -> Plan:
        seconds = {way: price * self._taken[way] for way, price in self.prices(context.batch_size).items()}
        best = min(seconds, key=lambda way: seconds[way])
        untried = [way for way, rounds in self._tried.items() if rounds < _TRIES and self._repair]
        if untried or seconds[best] * _MARGIN < seconds[self._way]:
            self._way = untried[0] if untried else best
        if self._way == "rounds":
            return Plan(exit_layer=self._layers, max_speculations=self._length, learn=False)
        return Plan(exit_layer=None, max_speculations=0, wave=int(self._way == "wave"), learn=False)

    def observe(self, record: RoundRecord) -> None:
        sweeps, tokens = record.loaded_layers / self._layers, len(record.tokens)
        seen = [float(index < record.num_accepted) for index in range(min(record.num_accepted + 1, record.num_drafted))]
        if record.exit_layer is None:
            way, expected = "plain", self._expected.autoregressive()
            self._agreement += (HOPED - self._agreement) / (4 * _FORGOTTEN)
        elif record.max_speculations:
            way, expected = "rounds", self._expected.round(self._layers, record.num_drafted)
        else:
            way, expected = "wave", sweeps * self._sweep
            seen = [max(self._loops - sweeps / tokens, 0.0) / (self._loops - 1)] * tokens
        for right in seen:
            self._agreement += (right - self._agreement) / _SEEN
        if self._repair:
            self._tried[way] += 1
            ratio = (record.draft_seconds + record.verify_seconds + record.accept_seconds) / expected
            self._taken[way] += (ratio - self._taken[way]) / min(self._tried[way], _SEEN)
            for other in self._taken:
                self._taken[other] += (self._taken[way] - self._taken[other]) / _FORGOTTEN


def build_auto(setup: Setup, cost: str = "measured", **options: Any) -> LoopedAuto | AutoExit:
    """Build "auto": for a looped model this one, unless the options are about exits, copies or bits."""
    if setup.num_loops == 1 or options:
        return AutoExit.from_args(setup, cost=cost, **options)
    found = setup.cost(cost)
    repair = cost == "measured" and not found.fixed
    return LoopedAuto(num_layers=setup.num_layers, num_loops=setup.num_loops, cost=found, repair=repair)
