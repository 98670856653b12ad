"""Rounds and shadow tokens written by hand, for tests of policies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from policies import DraftRow, RoundRecord, ShadowTokens
from policies.records import StopCause


def shadow(
    layers: Sequence[int],
    matches: Sequence[Sequence[bool | int]],
    confidences: Sequence[Sequence[float]],
    probabilities: Sequence[Sequence[float]] | None = None,
) -> ShadowTokens:
    """Shadow tokens whose layers agree with the target (token 1) where `matches` says so."""
    tokens = torch.tensor(matches, dtype=torch.long)
    return ShadowTokens(
        layers=tuple(layers),
        tokens=tokens,
        confidences=torch.tensor(confidences),
        target_tokens=torch.ones(tokens.shape[1], dtype=torch.long),
        acceptance_probabilities=None if probabilities is None else torch.tensor(probabilities),
    )


def finished(
    drafted: int,
    accepted: int,
    *,
    exit_layer: int = 1,
    cause: StopCause = "after_draw",
    confidences: Sequence[float] | None = None,
    acceptance: Sequence[float] | None = None,
    seen: ShadowTokens | None = None,
) -> RoundRecord:
    return RoundRecord(
        index=0,
        num_committed_before=5,
        exit_layer=exit_layer,
        max_speculations=20,
        draft_tokens=tuple(range(drafted)),
        num_accepted=accepted,
        tokens=tuple(range(accepted + 1)),
        loaded_layers=8,
        stop_cause=cause,
        confidences=None if confidences is None else tuple(confidences),
        acceptance_probabilities=None if acceptance is None else tuple(acceptance),
        shadow=seen,
    )


def row(
    num_drafted: int = 0, *, exit_layer: int = 1, confidence: float | None = None, entropy: float | None = None
) -> DraftRow:
    """A draft row behind a text of 8 tokens, before its token is drawn."""
    return DraftRow(
        num_drafted=num_drafted,
        exit_layer=exit_layer,
        position=7 + num_drafted,
        confidence=confidence,
        entropy=entropy,
    )
