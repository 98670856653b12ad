"""Training data of Pacer's pre-verifier: draft traces -> labels, one packed sequence per response with its mask; metrics.

Knows traces only: neither the model that drafted them nor the network that learns from them.
Source: Pacer (Zhang et al. 2025), section 3.3 and Appendix D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from policies.acceptance_table import AcceptanceTable
from policies.base import check_exit_layer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftTrace:
    """One response at one exit layer: the text's exit hidden states, and drafts from several of its positions.

    context: [n, hidden], exit hidden states of the text's rows. starts: int64 [drafts], tokens committed before each draft:
    its first row, at position start - 1, sees the context's rows 0 .. start - 2. lengths: int64 [drafts], rows of each.
    accepted: int64 [drafts], tokens before the first mismatch with the response. hidden: [rows, hidden], of the rows that
    produced the drafts. features: float32 [rows, features], see selfspec.pacer.network.FEATURES.
    """

    exit_layer: int
    context: Tensor
    starts: Tensor
    lengths: Tensor
    accepted: Tensor
    hidden: Tensor
    features: Tensor

    def __post_init__(self) -> None:
        check_exit_layer(self.exit_layer, self.exit_layer + 1)
        rows = int(self.lengths.sum())
        if not len(self.hidden) == len(self.features) == rows or len(self.starts) != len(self.lengths):
            raise ValueError(f"the trace has {len(self.hidden)} rows, its lengths add up to {rows}")

    def draft_index(self) -> Tensor:
        """The number of each row in its draft, from 1: int64 [rows]."""
        return torch.cat([_numbers(1, length + 1) for length in self.lengths.tolist()])

    def draft_of_row(self) -> Tensor:
        """Which draft each row belongs to: int64 [rows]."""
        return _numbers(0, len(self.lengths)).repeat_interleave(self.lengths)

    def labels(self) -> Tensor:
        """1 for the tokens before the draft's first mismatch, 0 from there on: float32 [rows]."""
        return (self.draft_index() <= self.accepted[self.draft_of_row()]).float()

    def fate_known(self) -> Tensor:
        """Rows up to and including the first mismatch, whose own acceptance verification decides: bool [rows]."""
        return self.draft_index() <= self.accepted[self.draft_of_row()] + 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """A response's context and all its drafts as one sequence.

    hidden [rows, hidden], features [rows, F], draft_index and position int64 [rows] (0 and the row's place in the text for
    context), mask bool [rows, rows], labels float32 [rows] and scored bool [rows] (context rows are not).
    """

    exit_layer: int
    hidden: Tensor
    features: Tensor
    draft_index: Tensor
    position: Tensor
    mask: Tensor
    labels: Tensor
    scored: Tensor


def pack(trace: DraftTrace, *, scope: str = "full", block: int = 4) -> Packed:
    """Pack a trace (Appendix D, Figure 5).

    A draft row attends to the context before its draft's start, the earlier rows of its own draft and itself: all of that
    with scope "full", only its own draft with "draft", only its own block of `block` rows with "block".
    """
    size = len(trace.context)
    index, draft = trace.draft_index(), trace.draft_of_row()
    starts = trace.starts[draft]
    rows = len(index)
    own = (draft.unsqueeze(1) == draft) & (index.unsqueeze(1) >= index)
    if scope == "block":
        number = (index - 1) // block
        own &= number.unsqueeze(1) == number
    context = _numbers(0, size).expand(rows, -1) < (starts - 1).unsqueeze(1)
    if scope != "full":
        context = torch.zeros_like(context)
    mask = torch.zeros(size + rows, size + rows, dtype=torch.bool, device="cpu")
    mask[:size, :size] = torch.ones(size, size, dtype=torch.bool, device="cpu").tril()
    mask[size:, :size], mask[size:, size:] = context, own
    no_features = torch.zeros(size, trace.features.shape[1], dtype=torch.float32, device="cpu")
    return Packed(
        exit_layer=trace.exit_layer,
        hidden=torch.cat([trace.context, trace.hidden]).float(),
        features=torch.cat([no_features, trace.features]),
        draft_index=torch.cat([torch.zeros(size, dtype=torch.long, device="cpu"), index]),
        position=torch.cat([_numbers(0, size), starts - 2 + index]),
        mask=mask,
        labels=torch.cat([torch.zeros(size, dtype=torch.float32, device="cpu"), trace.labels()]),
        scored=torch.cat(
            [torch.zeros(size, dtype=torch.bool, device="cpu"), torch.ones(rows, dtype=torch.bool, device="cpu")]
        ),
    )


def _numbers(start: int, stop: int) -> Tensor:
    """start, start + 1, .. stop - 1: int64 on the CPU."""
    return torch.arange(start, stop, dtype=torch.long, device="cpu")


def cut(trace: DraftTrace, lengths: Tensor) -> DraftTrace:
    """The trace with draft i no longer than lengths[i]."""
    lengths = torch.minimum(trace.lengths, lengths)
    keep = trace.draft_index() <= lengths[trace.draft_of_row()]
    return DraftTrace(
        exit_layer=trace.exit_layer,
        context=trace.context,
        starts=trace.starts,
        lengths=lengths,
        accepted=torch.minimum(trace.accepted, lengths),
        hidden=trace.hidden[keep],
        features=trace.features[keep],
    )


def behind_mismatch(trace: DraftTrace, rows: int) -> DraftTrace:
    """The trace with at most `rows` rows of a draft behind its first mismatch."""
    return cut(trace, trace.accepted + 1 + rows)


def confidence_estimates(traces: Sequence[DraftTrace], table: AcceptanceTable) -> tuple[Tensor, Tensor]:
    """What SPIDE's table estimates for each row, and the running product of that over each draft: float32 [rows] each."""
    own, products = [], []
    for trace in traces:
        confidences = trace.features[:, 0].exp().clamp(max=1.0).tolist()
        rates = torch.tensor(
            [table.rate(trace.exit_layer, confidence) for confidence in confidences], dtype=torch.float32, device="cpu"
        )
        own.append(rates)
        products.append(running_products(rates, trace.lengths))
    return torch.cat(own), torch.cat(products)


def running_products(estimates: Tensor, lengths: Tensor) -> Tensor:
    """The product of each draft's estimates up to every row, float32 [rows]."""
    return torch.cat([part.cumprod(0) for part in estimates.split(lengths.tolist())])


def confidence_table(traces: Sequence[DraftTrace]) -> AcceptanceTable:
    """SPIDE's table, one row per exit layer, from the tokens whose own acceptance is known."""
    table = AcceptanceTable(sorted({trace.exit_layer for trace in traces}))
    for trace in traces:
        known = trace.fate_known()
        for confidence, label in zip(trace.features[known, 0].exp().tolist(), trace.labels()[known].tolist()):
            table.add(trace.exit_layer, min(confidence, 1.0), label)
    return table


def fit_calibration(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """(a, b) for which a * logits + b has the least binary cross-entropy against labels 0 and 1, [tokens] each.

    Platt's scaling. Of labels that are all alike (1, 0): there is nothing to learn from them.
    """
    if not 0 < float(labels.mean()) < 1:
        return 1.0, 0.0
    x, y = logits.double(), labels.double()
    with torch.enable_grad():
        fitted = torch.tensor([1.0, 0.0], dtype=torch.double, device="cpu", requires_grad=True)
        optimizer = torch.optim.LBFGS([fitted], max_iter=200, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            value = F.binary_cross_entropy_with_logits(x * fitted[0] + fitted[1], y)
            value.backward()
            return value

        optimizer.step(loss)
    scale, shift = fitted.tolist()
    return scale, shift


def scikit_learn_metrics() -> Any:
    """The module `sklearn.metrics`. Raises ValueError where scikit-learn, of the extra `dev`, is not installed."""
    try:
        from sklearn import metrics
    except ImportError:
        raise ValueError("measuring a pre-verifier needs scikit-learn: pip install scikit-learn") from None
    return metrics


def auc(scores: Tensor, labels: Tensor) -> float:
    """Chance that an accepted token has a higher score than a rejected one, ties counting half; NaN if either is missing."""
    if not 0 < float(labels.mean()) < 1:
        return float("nan")
    return float(scikit_learn_metrics().roc_auc_score(labels.numpy(), scores.double().numpy()))


def calibration_error(scores: Tensor, labels: Tensor, bins: int = 20) -> float:
    """Expected calibration error: mean of |mean score - share accepted| over equally filled bins, by their sizes.

    scikit-learn's `calibration_curve` has such bins, but doesn't tell their sizes; torchmetrics' bins are equally wide.
    """
    order = scores.argsort()
    total = 0.0
    for part in order.tensor_split(min(bins, len(order))):
        total += float((scores[part].double().mean() - labels[part].double().mean()).abs()) * len(part)
    return total / len(order)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """How good estimates are on some tokens. stop_precision, stop_recall: of "stop here" (score <= 0.5) as a forecast of
    rejection; NaN where nothing is stopped or rejected."""

    auc: float
    calibration_error: float
    stop_precision: float
    stop_recall: float
    num_tokens: int
    share_accepted: float


def quality(scores: Tensor, labels: Tensor, threshold: float = 0.5) -> Quality:
    """Measure scores in [0, 1] against labels 0 and 1, float32 [tokens] each."""
    metrics = scikit_learn_metrics()
    stops, rejected = (scores <= threshold).numpy(), (labels < 0.5).numpy()
    return Quality(
        auc=auc(scores, labels),
        calibration_error=calibration_error(scores, labels),
        stop_precision=float(metrics.precision_score(rejected, stops, zero_division=float("nan"))),
        stop_recall=float(metrics.recall_score(rejected, stops, zero_division=float("nan"))),
        num_tokens=len(labels),
        share_accepted=float(labels.mean()),
    )
