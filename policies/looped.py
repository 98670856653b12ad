"""The default policy of looped models: along the diagonal, in rounds that the first loop drafts, or plainly."""

from __future__ import annotations

from typing import Any, Literal

from policies.auto.policy import AutoExit
from policies.base import StatelessPolicy
from policies.building import Setup
from policies.cost import CostModel, at_rows
from policies.records import Plan, RoundContext, RoundRecord

Way = Literal["wave", "rounds", "plain"]
HOPED = 0.8
"""Agreement of the first loop with the last one before anything was seen of it, and again after many plain steps."""
_MARGIN = 1.05  # what another way must gain: a wave that begins again fills its diagonal first
_SEEN = 32  # drafts that say how many of the next ones are right
_FORGOTTEN = 256  # rounds after which what was seen of another way counts little
_TRIES = 4  # rounds of each way that was never tried
_MOST_DRAFTS = 8


class LoopedAuto(StatelessPolicy):
    """Take, in every round, the way that is expected to take least time for a token.

    A text's drafts say how often the first loop is right, and `cost` what that makes of each way. repair: correct that by the
    seconds that rounds take. In a long text, for example, a wave reads more keys and values than other rounds.
    """

    def __init__(self, *, num_layers: int, num_loops: int, cost: CostModel, repair: bool = False) -> None:
        self._loops, self._layers, self._cost, self._repair = num_loops, num_layers // num_loops, cost, repair
        self.exit_layers = (self._layers,)
        self.reset()

    @classmethod
    def from_args(cls, setup: Setup, cost: str = "measured") -> LoopedAuto:
        found = setup.cost(cost)
        repair = cost == "measured" and not found.fixed
        return cls(num_layers=setup.num_layers, num_loops=setup.num_loops, cost=found, repair=repair)

    def reset(self) -> None:
        self._agreement = HOPED
        self._way: Way = "wave"
        # Of each way, what its rounds took, by what they were expected to; and how many rounds there were.
        self._taken: dict[Way, float] = {"wave": 1.0, "rounds": 1.0, "plain": 1.0}
        self._tried = dict.fromkeys(self._taken, 0)
        self._expected = self._cost

    def _sweep(self) -> float:
        """Price a sweep: one loop of the rows that are in flight on average, and the head for two of them."""
        cost, wrong, loops = self._expected, 1 - self._agreement, self._loops
        rows = (loops + wrong * loops * (loops - 1) / 2) / self._sweeps * cost.batch_size
        heads = at_rows(cost.head_seconds, 2 * cost.batch_size)
        return (self._layers * at_rows(cost.layer_seconds, rows) + heads) / cost.batch_size

    @property
    def _sweeps(self) -> float:
        """Expect so many sweeps a token."""
        return self._agreement + (1 - self._agreement) * self._loops

    def _rounds(self) -> tuple[float, int]:
        """Price a token of rounds of the best length, and say which that is."""
        chances = [self._agreement**drafts for drafts in range(_MOST_DRAFTS + 1)]
        each = ((self._expected.round(self._layers, k) / sum(chances[: k + 1]), k) for k in range(1, _MOST_DRAFTS + 1))
        return min(each)

    def plan(self, context: RoundContext) -> Plan:
        self._expected = self._cost.for_batch_size(context.batch_size)
        rounds, length = self._rounds()
        prices: dict[Way, float] = {"wave": self._sweeps * self._sweep(), "rounds": rounds}
        prices["plain"] = self._expected.autoregressive()
        seconds = {way: price * self._taken[way] for way, price in prices.items()}
        best = min(seconds, key=lambda way: seconds[way])
        untried = [way for way, rounds in self._tried.items() if rounds < _TRIES and self._repair]
        if untried or seconds[best] * _MARGIN < seconds[self._way]:
            self._way = untried[0] if untried else best
        if self._way == "rounds":
            return Plan(exit_layer=self._layers, max_speculations=length, learn=False)
        return Plan(exit_layer=None, max_speculations=0, wave=int(self._way == "wave"), learn=False)

    def observe(self, record: RoundRecord) -> None:
        for index in range(min(record.num_accepted + 1, record.num_drafted)):
            self._agreement += ((index < record.num_accepted) - self._agreement) / _SEEN
        if self._way == "plain":
            self._agreement += (HOPED - self._agreement) / (4 * _FORGOTTEN)
            expected = self._expected.autoregressive()
        elif self._way == "rounds":
            expected = self._expected.round(self._layers, record.num_drafted)
        else:
            expected = record.loaded_layers / self._layers * self._sweep()
        if not self._repair:
            return
        ratio = (record.draft_seconds + record.verify_seconds + record.accept_seconds) / expected
        self._tried[self._way] += 1
        self._taken[self._way] += (ratio - self._taken[self._way]) / min(self._tried[self._way], _SEEN)
        for way in self._taken:
            self._taken[way] += (self._taken[self._way] - self._taken[way]) / _FORGOTTEN


def build_auto(setup: Setup, **options: Any) -> LoopedAuto | AutoExit:
    """Build "auto": for a looped model this one, unless the options are about exits, copies or bits."""
    looped = setup.num_loops > 1 and options.keys() <= {"cost"}
    return LoopedAuto.from_args(setup, **options) if looped else AutoExit.from_args(setup, **options)
