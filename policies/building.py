"""What a named policy is built for: the model's layers, its costs and pre-verifier, and the policy that it runs with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from policies.cost import CostModel, LayerCost
from policies.records import PreVerifier

COSTS = ("layers", "measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a name is resolved for.

    num_loops: how often a looped model runs its layers; num_layers counts them in each loop. 1 for other models.
    measure, preverifier: get the model's measured cost, and a pre-verifier; None where there is none.
    ended_by: the pre-verifier that ends the drafts after every `block` of them, if one does: its passes are part of the cost.
    drafts_in: the bits that the exit policy drafts in, for the stopping policy that runs with it; None for the model's own.
    draft_bits: in which the model may draft with all its layers, beside its exits, for policies that choose. offered_bits:
        in which it could, with weights that are made once a plan asks for them.
    exit_layers: those that the exit policy may choose, for the stopping policy that runs with it; None for any.
    """

    num_layers: int
    num_loops: int = 1
    measure: Callable[[], CostModel] | None = None
    preverifier: Callable[[str | None], PreVerifier] | None = None
    ended_by: PreVerifier | None = None
    block: int = 0
    drafts_in: int | None = None
    draft_bits: tuple[int, ...] = ()
    offered_bits: tuple[int, ...] = ()
    exit_layers: tuple[int, ...] | None = None

    @property
    def layers_to_learn(self) -> tuple[int, ...]:
        """The exit layers that a stopping policy may be asked about."""
        return tuple(range(1, self.num_layers)) if self.exit_layers is None else self.exit_layers

    def cost(self, kind: str) -> CostModel:
        """Make the cost model of a `cost=` option."""
        if kind not in COSTS:
            raise ValueError(f"cost must be one of {', '.join(COSTS)}, got {kind!r}")
        if kind == "measured" and self.measure is None:
            raise ValueError("cost=measured needs measured seconds: pass `measure`, or use cost=layers")
        cost = LayerCost(self.num_layers) if self.measure is None or kind == "layers" else self.measure()
        if self.ended_by is None:
            return cost
        seconds = self.ended_by.pass_seconds(self.block) if kind == "measured" else None
        return replace(cost, block=self.block, block_seconds=seconds)
