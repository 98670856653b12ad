"""Policies that follow a fixed rule: LayerSkip's layer and length, fewer bits, copies, and the finite-state length."""

from __future__ import annotations

from typing import Any

from policies.base import NeverStop, StatelessPolicy
from policies.bounds import MAX_DRAFTS, check_draft_layer, check_loop, check_number
from policies.building import Setup
from policies.records import DraftRow, ObservationSpec, Plan, RoundContext, RoundRecord

COPY_LENGTH = 10
"""Longest copy by default, as in prompt lookup decoding (Saxena 2023)."""
MAX_COPY_LENGTH = 32
"""Longest copy that may be asked for: a pass over more rows costs what their arithmetic costs, on any device."""
MIN_MATCH = 2
"""Shortest match that is copied from: a shorter one is no more than a guess."""
_MAX_MATCH = 1 << 20  # that may be asked for; it costs nothing: a text without one is not copied from


class FixedExit(StatelessPolicy):
    """Draft `num_speculations` tokens in every round, after `exit_layer` layers.

    num_speculations = 0 is plain autoregressive decoding (`exit_layer` is then not used).
    bits: of the weights that draft, 8 or 4, by default through all layers; None for the model's own.
    Raises ValueError if the model cannot exit at `exit_layer`, or for `num_speculations` outside [0, MAX_DRAFTS].
    Source: LayerSkip (Elhoushi et al. 2024), section 4.3; written LS(E-gamma) in DEL's tables. For bits ML-SpecQD (arXiv
    2503.13565), where a model's 4-bit cast drafts for it.
    """

    def __init__(
        self, exit_layer: int | None, num_speculations: int, *, num_layers: int, bits: int | None = None
    ) -> None:
        if bits is not None and bits not in (4, 8):
            raise ValueError(f"bits must be 8 or 4, got {bits if bits < 100 else 'more'}")
        check_number("num_speculations", num_speculations, 0 if bits is None else 1, MAX_DRAFTS)
        if exit_layer is None and bits is not None:
            exit_layer = num_layers
        if exit_layer is not None:
            check_draft_layer(exit_layer, num_layers, bits)
        self.exit_layers = ()
        self._plan = Plan(exit_layer=None, max_speculations=0)
        if num_speculations > 0:
            if exit_layer is None:
                raise ValueError("exit_layer is missing: give one in [1, num_layers - 1], or num_speculations=0")
            self.exit_layers = (exit_layer,)
            self._plan = Plan(exit_layer=exit_layer, max_speculations=num_speculations, bits=bits)
        self.observes = ObservationSpec(bits=() if bits is None else (bits,))

    @classmethod
    def from_args(
        cls,
        setup: Setup,
        exit_layer: int | None = None,
        length: int = 0,
        bits: int | None = None,
        layer: int | None = None,
    ) -> FixedExit:
        """Build it from "E-G", or from "B-G,layer=E"."""
        return cls(layer if exit_layer is None else exit_layer, length, num_layers=setup.num_layers, bits=bits)

    def plan(self, context: RoundContext) -> Plan:
        return self._plan


class WaveExit(StatelessPolicy):
    """Decode a looped model along the diagonal: each sweep over the layers takes every row in flight one loop further.

    Drafts are the choices after `loop` loops. Raises ValueError for a model without loops, or a loop outside [1, loops - 1].
    Source: LoopSpec (arXiv 2609.17184) and WaveFront Decoding (arXiv 2609.23033).
    """

    exit_layers = ()  # nothing is left to a stopping policy

    def __init__(self, loop: int = 1, *, num_loops: int) -> None:
        self._plan = Plan(exit_layer=None, max_speculations=0, wave=check_loop(loop, num_loops), learn=False)

    @classmethod
    def from_args(cls, setup: Setup, loop: int = 1) -> WaveExit:
        return cls(loop, num_loops=setup.num_loops)

    def plan(self, context: RoundContext) -> Plan:
        return self._plan


class CopyExit(StatelessPolicy):
    """Copy what followed a match of `shortest` tokens or more, up to `length` tokens, and verify it; elsewhere a plain step.

    Raises ValueError for a length outside [1, MAX_COPY_LENGTH], and for a match shorter than `MIN_MATCH`.
    """

    observes = ObservationSpec(copies="needed")
    exit_layers = ()

    def __init__(self, length: int = COPY_LENGTH, shortest: int = MIN_MATCH) -> None:
        if not 1 <= length <= MAX_COPY_LENGTH:
            raise ValueError(f"the length must be in [1, {MAX_COPY_LENGTH}], got {length}")
        self._length, self._shortest = length, check_number("min", shortest, MIN_MATCH, _MAX_MATCH)

    @classmethod
    def from_args(cls, setup: Setup, length: int = COPY_LENGTH, **options: Any) -> CopyExit:
        return cls(length, options.get("min", MIN_MATCH))

    def plan(self, context: RoundContext) -> Plan:
        copied = self._length if context.match_length >= self._shortest else 0
        return Plan(exit_layer=None, max_speculations=0, copied=copied)


class FiniteStateLength(NeverStop):
    """Draft `length` tokens in the first round; then one more after a round whose drafts were all accepted, else one fewer.

    The length has no bounds of its own, so 0 is a plain step, all of whose drafts were accepted. A round drafts no more than
    its plan, which is at most MAX_DRAFTS, and counts by what it drafted. Each prompt starts from `length`.
    Raises ValueError for a length outside [1, MAX_DRAFTS].
    Source: the finite-state baseline of DEL (Entezari Zarch et al. 2025), section 5 and Appendix B, and its release.
    """

    max_length = MAX_DRAFTS

    def __init__(self, length: int = 4) -> None:
        self._start = self.length = check_number("the first length", length, 1, MAX_DRAFTS)

    def begin_text(self) -> None:
        self.length = self._start

    def stop_before_draw(self, row: DraftRow) -> bool:
        return self.length == 0

    def stop_after_draw(self, row: DraftRow, token: int) -> bool:
        return row.num_drafted + 1 >= self.length

    def observe(self, record: RoundRecord) -> None:
        if record.exit_layer is not None:
            self.length += 1 if record.num_accepted == record.num_drafted else -1

    def reset(self) -> None:
        self.begin_text()


class AssistLength(FiniteStateLength):
    """Draft two tokens more after a round whose drafts were all accepted, else one fewer, from 5 on and never below 1.

    Source: the dynamic length of assisted generation (Gante 2023), "heuristic" in transformers, Assist in Pacer's tables.
    """

    def __init__(self, length: int = 5) -> None:
        super().__init__(length)

    def observe(self, record: RoundRecord) -> None:
        if record.exit_layer is not None:
            self.length = max(1, self.length + (2 if record.num_accepted == record.num_drafted else -1))
