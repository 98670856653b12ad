"""What a policy is built for when it is named: the model's layers, costs, a pre-verifier, the policy that it runs beside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from policies.cost import CostModel, LayerCost, PacerCost

if TYPE_CHECKING:
    from policies.pacer import PacerStopping, PreVerifier

COSTS = ("layers", "measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a name is resolved for: the model's layers, and how to get its measured cost and a pre-verifier (None: neither can
    be had). ends: Pacer, if it ends the drafts: the passes of its pre-verifier are part of the cost. exit_layers: those
    that the exit policy may choose, for a stopping policy behind it; None for any."""

    num_layers: int
    measure: Callable[[], CostModel] | None = None
    preverifier: Callable[[str | None], PreVerifier] | None = None
    ends: PacerStopping | None = None
    exit_layers: tuple[int, ...] | None = None

    @property
    def layers_to_learn(self) -> tuple[int, ...]:
        """The exit layers that a stopping policy may be asked about."""
        return tuple(range(1, self.num_layers)) if self.exit_layers is None else self.exit_layers

    def cost(self, kind: str) -> CostModel:
        """The cost model of a `cost=` option."""
        cost = self._cost(kind)
        if self.ends is None:
            return cost
        block = self.ends.b
        return PacerCost(cost, block, self.ends.preverifier.pass_seconds(block) if kind == "measured" else None)

    def _cost(self, kind: str) -> CostModel:
        if kind == "layers":
            return LayerCost(self.num_layers)
        if kind != "measured":
            raise ValueError(f"cost must be one of {', '.join(COSTS)}, got {kind!r}")
        if self.measure is None:
            raise ValueError("cost=measured needs measured seconds: pass `measure`, or use cost=layers")
        return self.measure()
