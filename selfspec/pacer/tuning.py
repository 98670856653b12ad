"""The stopping rule's settings, chosen by playing it on draft traces: tokens per layer, the pre-verifier's passes counted.

A trace tells, for each of its positions, how a draft would fare and what the pre-verifier says of it; so every (b, t, rho) is
played without decoding. Rounds are taken to start at the trace's positions, where the engine's would start at those that
earlier rounds lead to: near enough to rank settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

BLOCKS = (1, 2, 3, 4, 6, 8)
THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
GROWTHS = (1.0, 1.05, 1.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedDraft:
    """One position's draft. estimates: for its rows, that the draft holds up to each; accepted: tokens before the mismatch.
    is_cut: it would go on behind its last row (a mismatch was reached), rather than end there (with the text)."""

    exit_layer: int
    estimates: tuple[float, ...]
    accepted: int
    is_cut: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedSetting:
    """What a setting earned: tokens per layer loaded, pre-verifier included."""

    exit_layer: int
    b: int
    t: float
    rho: float
    tokens_per_layer: float


def play(drafts: Iterable[PlayedDraft], num_layers: int, *, b: int, t: float, rho: float, max_length: int) -> float:
    """Tokens per layer of one round from each position. A block that ends with the draft or the cap is not judged."""
    tokens = layers = 0
    for draft in drafts:
        size = len(draft.estimates)
        drafted = passes = 0
        threshold = t
        while drafted < max_length:
            drafted = min(drafted + b, max_length)
            if drafted >= size and not draft.is_cut:
                drafted = size
                break
            if drafted >= max_length:
                break
            passes += 1
            block = draft.estimates[drafted - b : drafted]
            # Of a block behind all that was recorded nothing is known but that the draft has failed: stop there.
            if not block or sum(block) / len(block) <= threshold or drafted > size:
                break
            threshold *= rho
        tokens += min(draft.accepted, drafted) + 1
        layers += drafted * draft.exit_layer + num_layers + passes
    return tokens / layers


def best_settings(
    drafts: Sequence[PlayedDraft], num_layers: int, *, max_length: int, blocks: Sequence[int] = BLOCKS
) -> list[PlayedSetting]:
    """The best setting of each exit layer, best layer first."""
    best = []
    for layer in sorted({draft.exit_layer for draft in drafts}):
        of_layer = [draft for draft in drafts if draft.exit_layer == layer]
        settings = [
            PlayedSetting(
                exit_layer=layer,
                b=b,
                t=t,
                rho=rho,
                tokens_per_layer=play(of_layer, num_layers, b=b, t=t, rho=rho, max_length=max_length),
            )
            for b, t, rho in product(blocks, THRESHOLDS, GROWTHS)
        ]
        best.append(max(settings, key=lambda setting: setting.tokens_per_layer))
    return sorted(best, key=lambda setting: -setting.tokens_per_layer)
