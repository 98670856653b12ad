"""A pre-verifier's estimates on draft traces: their calibration and quality, and the stopping rule's best settings.

A trace holds, for each of its positions, a draft's fate and the pre-verifier's estimates. So every (b, t, rho) is played
without decoding, and gives tokens per layer, the pre-verifier's passes counted. Rounds start at the trace's positions here;
the engine's start where earlier rounds end. That is near enough to rank settings.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.pacer import PAPER
from selfspec.pacer.labels import DraftTrace, pack
from selfspec.pacer.network import PreVerifierModule

Quality = dict[str, dict[str, dict[str, float]]]
BLOCKS = (1, 2, 3, 4, 6, 8)
THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
GROWTHS = (1.0, 1.05, 1.1)


def trace_logits(module: PreVerifierModule, trace: DraftTrace) -> Tensor:
    """Compute the network's output for every draft row of a trace, float32 [rows]."""
    device = module.head.weight.device
    packed = {name: part.to(device) for name, part in pack(trace).items()}
    logits: Tensor = module(**packed, exit_layer=trace.exit_layer)
    return logits[len(trace.context) :]


@torch.inference_mode()
def trace_estimates(module: PreVerifierModule, trace: DraftTrace) -> tuple[Tensor, Tensor]:
    """Return what the network says of each row, and that the draft holds up to it: float32 [rows] each, on the CPU."""
    own = trace_logits(module, trace).sigmoid().cpu()
    if module.config.design == PAPER:
        return own, own
    return own, torch.cat([part.cumprod(0) for part in own.split(trace.lengths.tolist())])


@torch.no_grad()
def calibrate_estimates(module: PreVerifierModule, traces: Sequence[DraftTrace]) -> None:
    """Fit the network's `calibration`, per exit layer, to responses that it did not learn from: it is overconfident."""
    module.calibration.copy_(module.calibration.new_tensor([1.0, 0.0]).expand_as(module.calibration))
    for index, layer in enumerate(module.config.exit_layers):
        of_layer = [trace.up_to_mismatch() for trace in traces if trace.exit_layer == layer]
        if of_layer:
            logits = torch.cat([trace_logits(module, trace).cpu() for trace in of_layer])
            fitted = fit_calibration(logits, torch.cat([trace.labels() for trace in of_layer]))
            module.calibration[index] = module.calibration.new_tensor(fitted)


@torch.enable_grad()
def fit_calibration(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """Fit the (a, b) for which a * logits + b has the least binary cross-entropy against labels 0 and 1, [tokens] each.

    Platt's scaling. (1, 0) where all labels are the same, which teach nothing.
    """
    if not 0 < float(labels.mean()) < 1:
        return 1.0, 0.0
    fitted = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([fitted], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        found = F.binary_cross_entropy_with_logits(fitted[0] * logits.double() + fitted[1], labels.double())
        found.backward()
        return found

    optimizer.step(loss)
    scale, shift = fitted.tolist()
    return scale, shift


def auc(scores: Tensor, labels: Tensor) -> float:
    """Chance that an accepted token has a higher score than a rejected one, ties counting half; NaN if either is missing."""
    accepted = int(labels.sum())
    pairs = accepted * (len(labels) - accepted)
    if pairs == 0:
        return math.nan
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[place].double()  # from 1, equal scores share their mean rank
    return (float(ranks[labels > 0.5].sum()) - accepted * (accepted + 1) / 2) / pairs


def evaluate(module: PreVerifierModule, held_out: Sequence[DraftTrace]) -> Quality:
    """Held-out quality for each exit layer and all: {layers: {kind: {"auc", "num_tokens", "share_accepted"}}}.

    Kind "token": each token up to and including the first mismatch, by its own estimate. Kind "prefix": every drafted token,
    by the estimate that it and all before it are accepted (the running product of its draft's estimates).
    """
    results: Quality = {}
    for layers in [(layer,) for layer in module.config.exit_layers] + [module.config.exit_layers]:
        traces = [trace for trace in held_out if trace.exit_layer in layers]
        if not traces:
            continue
        labels = torch.cat([trace.labels() for trace in traces])
        known = torch.cat([trace.fate_known() for trace in traces])
        own, products = (torch.cat(part) for part in zip(*(trace_estimates(module, trace) for trace in traces)))
        results["/".join(map(str, layers))] = {
            kind: {
                "auc": auc(scores, accepted),
                "num_tokens": len(accepted),
                "share_accepted": float(accepted.mean()),
            }
            for kind, scores, accepted in (("token", own[known], labels[known]), ("prefix", products, labels))
        }
    return results


def quality_lines(measured: Quality) -> list[str]:
    """Write the held-out figures as a Markdown table."""
    lines = ["| exit layer | AUC, token | AUC, prefix |", "| :-- | --: | --: |"]
    for layers, by_kind in measured.items():
        lines.append(f"| {layers} | {by_kind['token']['auc']:.4f} | {by_kind['prefix']['auc']:.4f} |")
    return lines


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
