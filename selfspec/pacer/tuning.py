"""The stopping rule's settings, chosen by playing it on draft traces: tokens per layer, the pre-verifier's passes counted.

A trace holds, for each of its positions, a draft's fate and the pre-verifier's estimates. So every (b, t, rho) is played
without decoding. Rounds start at the trace's positions here; the engine's start where earlier rounds end. That is near
enough to rank settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from selfspec.pacer.labels import DraftTrace
from selfspec.pacer.network import PreVerifierModule
from selfspec.pacer.quality import trace_estimates

BLOCKS = (1, 2, 3, 4, 6, 8)
THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
GROWTHS = (1.0, 1.05, 1.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedDraft:
    """One position's draft.

    estimates: for each row, the chance that the draft is accepted up to it. accepted: tokens before the mismatch. is_cut:
    the draft would go on after its last row (the recording stopped after a mismatch); otherwise it ends with the text.
    """

    exit_layer: int
    estimates: tuple[float, ...]
    accepted: int
    is_cut: bool


def played_drafts(module: PreVerifierModule, traces: Sequence[DraftTrace], window: int) -> list[PlayedDraft]:
    """Pair the traces' drafts with the network's estimates."""
    played = []
    for trace in traces:
        lengths = trace.lengths.tolist()
        parts = trace_estimates(module, trace)[1].split(lengths)
        played += [
            PlayedDraft(
                exit_layer=trace.exit_layer,
                estimates=tuple(part.tolist()),
                accepted=accepted,
                is_cut=accepted < length < window,
            )
            for part, accepted, length in zip(parts, trace.accepted.tolist(), lengths)
        ]
    return played


def play(drafts: Iterable[PlayedDraft], num_layers: int, *, b: int, t: float, rho: float, max_length: int) -> float:
    """Tokens per layer of one round from each position. A block that ends with the draft or the cap is not pre-verified."""
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
            # All that is known of a block after the recorded rows is that the draft has failed: stop there.
            if not block or sum(block) / len(block) <= threshold or drafted > size:
                break
            threshold *= rho
        tokens += min(draft.accepted, drafted) + 1
        layers += drafted * draft.exit_layer + num_layers + passes
    return tokens / layers


def best_settings(
    drafts: Sequence[PlayedDraft], num_layers: int, *, max_length: int
) -> list[tuple[float, dict[str, float]]]:
    """Find the best setting of each exit layer, best layer first: its tokens per layer, and exit_layer, b, t and rho."""
    best = []
    for layer in sorted({draft.exit_layer for draft in drafts}):
        of_layer = [draft for draft in drafts if draft.exit_layer == layer]
        settings: list[dict[str, Any]] = [
            dict(zip(("b", "t", "rho"), values)) for values in product(BLOCKS, THRESHOLDS, GROWTHS)
        ]
        played = [play(of_layer, num_layers, **setting, max_length=max_length) for setting in settings]
        place = max(range(len(played)), key=played.__getitem__)
        best.append((played[place], {"exit_layer": layer, **settings[place]}))
    return sorted(best, key=lambda found: -found[0])
