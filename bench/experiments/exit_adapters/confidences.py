"""Does the sum of products of confidences, which D-PACE's weights come from, foretell how much of a draft is accepted?

Source: Wu et al. 2026, "D-PACE", appendix A, table 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.experiments.exit_adapters.arms import Measured
from bench.experiments.exit_adapters.forms import LENGTHS
from bench.experiments.exit_adapters.other_forms import adapted_states
from layerskip_models.exits.adapter import ExitAdapters


@torch.no_grad()
def correlations(measured: Measured, adapters: ExitAdapters) -> Iterator[dict[str, Any]]:
    """A line for each exit: Spearman's rank correlation of two sums over drafts with the number of accepted tokens.

    A draft of the longest length starts at every row with enough rows after it. The confidence of a place is the exit's
    probability of the model's own token there.
    """
    length = max(LENGTHS)
    found: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {layer: [] for layer in adapters.config.exit_layers}
    for sequence in measured.sequences:
        rows = sequence.scored_rows()
        states = adapted_states(adapters, sequence, measured.depths, rows, torch.ones_like(rows))
        for parts, hidden in zip(found.values(), states):
            labels = sequence.labels[rows]
            if len(labels) < length:
                continue
            logits = measured.head.logits(hidden)
            sure = logits.softmax(dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1).double().unfold(0, length, 1)
            hits = (logits.argmax(dim=-1) == labels).long().unfold(0, length, 1)
            parts.append((sure.cumprod(-1).sum(-1), sure.sum(-1), hits.cumprod(-1).sum(-1).double()))
    for layer, parts in found.items():
        if parts:
            products, plain, accepted = (torch.cat(one) for one in zip(*parts))
            yield {
                "kind": "correlation",
                "exit_layer": layer,
                "drafts": len(accepted),
                "products": rank_correlation(products, accepted),
                "sums": rank_correlation(plain, accepted),
            }


def rank_correlation(left: Tensor, right: Tensor) -> float:
    """Spearman's rho of two lists of numbers, [n] each; equal numbers share the mean of their ranks."""
    return float(torch.corrcoef(torch.stack([_ranks(left), _ranks(right)]))[0, 1])


def _ranks(values: Tensor) -> Tensor:
    _, places, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts.double() - 1) / 2)[places]
