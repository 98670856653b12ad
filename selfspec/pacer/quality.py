"""A pre-verifier's estimates on draft traces: their loss, calibration, and quality on held-out traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from policies import Drafter
from policies.spide import AcceptanceTable
from selfspec.pacer.labels import DraftTrace, pack
from selfspec.pacer.network import PreVerifierModule
from selfspec.pacer.tuning import PlayedDraft


def trace_logits(module: PreVerifierModule, trace: DraftTrace) -> Tensor:
    """Compute the network's output for every draft row of a trace, float32 [rows]."""
    packed = pack(trace, scope=module.config.scope, block=module.config.block)
    device = module.head.weight.device
    logits: Tensor = module(*(part.to(device) for part in packed), trace.exit_layer)
    return logits[len(trace.context) :]


def trace_loss(module: PreVerifierModule, trace: DraftTrace) -> Tensor:
    """Binary cross-entropy, mean over rows: those whose fate is known for conditional estimates, all for prefix estimates."""
    trace = _learned_from(module, trace)
    logits = trace_logits(module, trace)
    return F.binary_cross_entropy_with_logits(logits, trace.labels().to(logits.device))


def _learned_from(module: PreVerifierModule, trace: DraftTrace) -> DraftTrace:
    return trace.up_to_mismatch() if module.config.estimates == "conditional" else trace


@torch.inference_mode()
def trace_estimates(module: PreVerifierModule, trace: DraftTrace) -> tuple[Tensor, Tensor]:
    """Return what the network says of each row, and that the draft holds up to it: float32 [rows] each, on the CPU."""
    own = trace_logits(module, trace).sigmoid().cpu()
    return own, running_products(own, trace.lengths) if module.config.estimates == "conditional" else own


def running_products(estimates: Tensor, lengths: Tensor) -> Tensor:
    """Multiply each draft's estimates up to every row, float32 [rows]."""
    return torch.cat([part.cumprod(0) for part in estimates.split(lengths.tolist())])


def played_drafts(module: PreVerifierModule, traces: Sequence[DraftTrace], window: int) -> list[PlayedDraft]:
    """Pair the traces' drafts with the network's estimates, for `selfspec.pacer.tuning`."""
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


@torch.no_grad()
def calibrate_estimates(module: PreVerifierModule, traces: Sequence[DraftTrace]) -> None:
    """Fit the network's `calibration`, per exit layer, to responses that it did not learn from: it is overconfident."""
    module.calibration.copy_(module.calibration.new_tensor([1.0, 0.0]).expand_as(module.calibration))
    for index, layer in enumerate(module.config.exit_layers):
        of_layer = [_learned_from(module, trace) for trace in traces if trace.exit_layer == layer]
        if of_layer:
            logits = torch.cat([trace_logits(module, trace).cpu() for trace in of_layer])
            fitted = fit_calibration(logits, torch.cat([trace.labels() for trace in of_layer]))
            module.calibration[index] = module.calibration.new_tensor(fitted)


def fit_calibration(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """Fit the (a, b) for which a * logits + b has the least binary cross-entropy against labels 0 and 1, [tokens] each.

    Platt's scaling. (1, 0) where all labels are the same, which teach nothing.
    """
    if not 0 < float(labels.mean()) < 1:
        return 1.0, 0.0
    from sklearn.linear_model import LogisticRegression

    fitted = LogisticRegression(C=1e12, tol=1e-9, max_iter=1000)  # without a penalty, as good as
    fitted.fit(logits.double().unsqueeze(1).numpy(), labels.numpy())
    return float(fitted.coef_[0, 0]), float(fitted.intercept_[0])


def confidence_table(traces: Sequence[DraftTrace]) -> AcceptanceTable:
    """SPIDE's table, one row per exit layer, from the tokens whose own acceptance is known."""
    table = AcceptanceTable(map(Drafter, sorted({trace.exit_layer for trace in traces})))
    for trace in traces:
        known = trace.fate_known()
        for confidence, label in zip(trace.features[known, 0].exp().tolist(), trace.labels()[known].tolist()):
            table.add(Drafter(trace.exit_layer), min(confidence, 1.0), label)
    return table


def confidence_estimates(traces: Sequence[DraftTrace], table: AcceptanceTable) -> tuple[Tensor, Tensor]:
    """Look up SPIDE's estimate for each row, and multiply these up to it in each draft: float32 [rows] each."""
    own, products = [], []
    for trace in traces:
        confidences = trace.features[:, 0].exp().clamp(max=1.0).tolist()
        rates = [table.rate(Drafter(trace.exit_layer), confidence) for confidence in confidences]
        own.append(torch.tensor(rates, dtype=torch.float32, device="cpu"))
        products.append(running_products(own[-1], trace.lengths))
    return torch.cat(own), torch.cat(products)


def scikit_learn_metrics() -> Any:
    """Import `sklearn.metrics`. Raises ValueError where scikit-learn, of the extra `dev`, is not installed."""
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
    """Compute the expected calibration error: mean of |mean score - share accepted| over equally filled bins, by their sizes.

    scikit-learn's `calibration_curve` has such bins, but doesn't tell their sizes; torchmetrics' bins are equally wide.
    """
    order = scores.argsort()
    total = 0.0
    for part in order.tensor_split(min(bins, len(order))):
        total += float((scores[part].double().mean() - labels[part].double().mean()).abs()) * len(part)
    return total / len(order)


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateQuality:
    """The quality of estimates on some tokens.

    stop_precision, stop_recall: of "stop here" (score <= 0.5) as a forecast of rejection; NaN where nothing is stopped or
    rejected.
    """

    auc: float
    calibration_error: float
    stop_precision: float
    stop_recall: float
    num_tokens: int
    share_accepted: float


def quality(scores: Tensor, labels: Tensor) -> EstimateQuality:
    """Measure scores in [0, 1] against labels 0 and 1, float32 [tokens] each."""
    metrics = scikit_learn_metrics()
    stops, rejected = (scores <= 0.5).numpy(), (labels < 0.5).numpy()
    return EstimateQuality(
        auc=auc(scores, labels),
        calibration_error=calibration_error(scores, labels),
        stop_precision=float(metrics.precision_score(rejected, stops, zero_division=float("nan"))),
        stop_recall=float(metrics.recall_score(rejected, stops, zero_division=float("nan"))),
        num_tokens=len(labels),
        share_accepted=float(labels.mean()),
    )


@torch.inference_mode()
def evaluate(
    module: PreVerifierModule, held_out: Sequence[DraftTrace], train: Sequence[DraftTrace]
) -> dict[str, dict[str, Any]]:
    """Held-out quality of the network and of SPIDE's table filled from the training data, for each exit layer and all.

    "token": each token up to and including the first mismatch, by its own estimate. "prefix": every drafted token, by the
    estimate that it and all before it are accepted (the running product of its draft's estimates).
    """
    table = confidence_table(train)
    results: dict[str, dict[str, Any]] = {}
    for layers in [(layer,) for layer in module.config.exit_layers] + [module.config.exit_layers]:
        traces = [trace for trace in held_out if trace.exit_layer in layers]
        if not traces:
            continue
        labels = torch.cat([trace.labels() for trace in traces])
        known = torch.cat([trace.fate_known() for trace in traces])
        own, products = zip(*(trace_estimates(module, trace) for trace in traces))
        results["/".join(map(str, layers))] = {
            name: {
                "token": asdict(quality(of_tokens[known], labels[known])),
                "prefix": asdict(quality(of_prefixes, labels)),
            }
            for name, (of_tokens, of_prefixes) in (
                ("preverifier", (torch.cat(own), torch.cat(products))),
                ("confidence", confidence_estimates(traces, table)),
            )
        }
    return results


def quality_lines(measured: dict[str, dict[str, Any]]) -> list[str]:
    """Write the held-out figures as a Markdown table."""
    lines = [
        "| exit layer | estimates | AUC, token | calibration error, token | AUC, prefix | calibration error, prefix |"
        " stop precision | stop recall |",
        "| :-- | :-- | --: | --: | --: | --: | --: | --: |",
    ]
    for layers, by_name in measured.items():
        for name, figures in by_name.items():
            token, prefix = figures["token"], figures["prefix"]
            lines.append(
                f"| {layers} | {name} | {token['auc']:.4f} | {token['calibration_error']:.4f} | {prefix['auc']:.4f} |"
                f" {prefix['calibration_error']:.4f} | {token['stop_precision']:.3f} | {token['stop_recall']:.3f} |"
            )
    return lines
