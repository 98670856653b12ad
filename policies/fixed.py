"""LayerSkip's own policy: one exit layer and one speculation length for the whole run, LS(E-gamma)."""

from __future__ import annotations

from policies.base import StatelessPolicy
from policies.bounds import MAX_DRAFTS, check_draft_layer, check_exit_layer, check_number
from policies.building import Setup
from policies.records import ObservationSpec, Plan, RoundContext


class FixedExit(StatelessPolicy):
    """Exit after `exit_layer` layers and draft `num_speculations` tokens, every round.

    num_speculations = 0 is plain autoregressive decoding (`exit_layer` is then not used).
    Raises ValueError if the model cannot exit at `exit_layer`, or for `num_speculations` outside [0, MAX_DRAFTS].
    Source: LayerSkip (Elhoushi et al. 2024), section 4.3; written LS(E-gamma) in DEL's tables.
    """

    def __init__(self, exit_layer: int | None, num_speculations: int, *, num_layers: int) -> None:
        check_number("num_speculations", num_speculations, 0, MAX_DRAFTS)
        if exit_layer is not None:
            check_exit_layer(exit_layer, num_layers)
        if num_speculations == 0:
            self._plan = Plan(exit_layer=None, max_speculations=0)
            self.exit_layers = ()
        else:
            if exit_layer is None:
                raise ValueError("exit_layer is missing: give one in [1, num_layers - 1], or num_speculations=0")
            self._plan = Plan(exit_layer=exit_layer, max_speculations=num_speculations)
            self.exit_layers = (exit_layer,)

    @classmethod
    def from_args(cls, setup: Setup, exit_layer: int | None = None, length: int = 0) -> FixedExit:
        return cls(exit_layer, length, num_layers=setup.num_layers)

    def plan(self, context: RoundContext) -> Plan:
        return self._plan


class FewBits(StatelessPolicy):
    """Draft `num_speculations` tokens in every round with the model's weights in 8 or 4 bits.

    exit_layer: how many layers a draft goes through, up to all of them, which is the default.
    Raises ValueError for a layer that the model lacks, or for `num_speculations` outside [1, MAX_DRAFTS].
    Source: ML-SpecQD (arXiv 2503.13565), where a model's 4-bit cast drafts for it.
    """

    def __init__(self, bits: int, num_speculations: int, *, num_layers: int, exit_layer: int | None = None) -> None:
        if bits not in (4, 8):
            raise ValueError(f"bits must be 8 or 4, got {bits if bits < 100 else 'more'}")
        check_number("num_speculations", num_speculations, 1, MAX_DRAFTS)
        layer = check_draft_layer(num_layers if exit_layer is None else exit_layer, num_layers, bits)
        self._plan = Plan(exit_layer=layer, max_speculations=num_speculations, bits=bits)
        self.exit_layers = (layer,)
        self.observes = ObservationSpec(bits=(bits,))

    @classmethod
    def from_args(cls, setup: Setup, bits: int, length: int, layer: int | None = None) -> FewBits:
        return cls(bits, length, num_layers=setup.num_layers, exit_layer=layer)

    def plan(self, context: RoundContext) -> Plan:
        return self._plan
