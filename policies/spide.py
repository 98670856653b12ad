"""SPIDE's serial drafting: go on while the product of the drafts' estimated acceptance stays above tau."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from policies.acceptance_table import BINS, PRIOR_COUNT, AcceptanceTable
from policies.base import NeverStop
from policies.bounds import MAX_DRAFTS, MAX_LEARN_EVERY, MAX_PROMPT_ROWS, check_draft_layer, check_number
from policies.building import Setup
from policies.records import Drafter, DraftRow, ObservationSpec, Plan, RoundRecord, Shadow

TAU = 0.7
MAX_LENGTH = 18
PROMPT_ROWS = 0


class SpideStopping(NeverStop):
    """Stop, keeping the token, when the reliability Gamma = product of table rates over the draft falls to tau or below.

    layers: exit layers to keep tables for. The one that drafts learns from its drafts in every round. bits: of the weights
        that draft; None for the model's own. tau in (0, 1); the paper uses 0.5 to 0.9.
    bins: "doubt" or the paper's, see `policies.acceptance_table`.
    shadow: whether all layers learn from shadow tokens, too, those of one row in learn_every; None where there are several
    layers. A lone layer's drafts say nearly all that its shadow tokens would. prompt_rows: how many of the prompt's last
    rows teach it, whatever `shadow` says; more, if another policy asks for more.
    Deviations (docs/policies.md): one table per exit layer; the bins; a stated prior.
    Raises ValueError for values out of range.
    Source: SPIDE (2025), section 3.2 and Figure 4.
    """

    def __init__(
        self,
        layers: Iterable[int],
        *,
        num_layers: int,
        bits: int | None = None,
        tau: float = TAU,
        max_length: int = MAX_LENGTH,
        prior_count: float = PRIOR_COUNT,
        learn_every: int = 1,
        shadow: bool | None = None,
        prompt_rows: int = PROMPT_ROWS,
        bins: str = "doubt",
    ) -> None:
        if not 0 < tau < 1:
            raise ValueError(f"tau must be in (0, 1), got {tau}")
        check_number("max_length", max_length, 1, MAX_DRAFTS)
        check_number("learn_every", learn_every, 1, MAX_LEARN_EVERY)
        check_number("prompt_rows", prompt_rows, 0, MAX_PROMPT_ROWS)
        if bins not in BINS:
            raise ValueError(f"bins must be one of {', '.join(BINS)}, got {bins!r}")
        candidates = tuple(sorted({check_draft_layer(layer, num_layers, bits) for layer in layers}))
        self._shadow = len(candidates) > 1 if shadow is None else shadow
        self.table = AcceptanceTable(
            (Drafter(layer, bits) for layer in candidates), bins=BINS[bins], prior_count=prior_count
        )
        self.observes = ObservationSpec(confidence=True)
        self._prompt = self._shadow or prompt_rows > 0
        if self._prompt:
            schedule = learn_every if self._shadow else 0
            self.observes = replace(
                self.observes, shadow_layers=candidates, learn_every=schedule, prompt_rows=prompt_rows
            )
        self.tau = tau
        self.reliability = 1.0
        self.max_length = max_length

    @classmethod
    def from_args(cls, setup: Setup, **options: Any) -> SpideStopping:
        built = cls(setup.layers_to_learn, num_layers=setup.num_layers, bits=setup.drafts_in, **options)
        if "learn_every" in options and not built.learns_from_shadow_tokens:
            raise ValueError("learn_every= changes nothing without shadow tokens: say shadow=on")
        return built

    @property
    def learns_from_shadow_tokens(self) -> bool:
        """True if rounds teach it more than the fate of its drafts."""
        return self._shadow

    def start_round(self, plan: Plan) -> None:
        self.reliability = 1.0

    def stop_after_draw(self, row: DraftRow, token: int) -> bool:
        assert row.confidence is not None
        self.reliability *= self.table.rate(row.drafter, row.confidence)
        return self.reliability <= self.tau or row.num_drafted + 1 >= self.max_length

    def threshold(self, drafter: Drafter) -> float:
        return self.tau

    def observe_prompt(self, shadow: Shadow) -> None:
        """Learn from the prompt's last rows, whoever asked for them."""
        if self._prompt:
            self.table.observe_shadow(shadow)

    def observe(self, record: RoundRecord) -> None:
        self.table.observe(record if self._shadow else replace(record, shadow=None))

    def reset(self) -> None:
        self.table.reset()

    def state(self) -> dict[str, Any]:
        return self.table.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.table.restore(state)
