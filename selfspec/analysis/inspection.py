"""`selfspec inspect`: is a checkpoint worth self-speculating with? Agreement per layer, predicted and measured speed-up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from layerskip_models import LayerSkipModel
from layerskip_models.draft_weights import draft_bytes, why_no_drafter
from layerskip_models.kv_cache import KVCache
from layerskip_models.prefill import prefill
from policies import CostModel, LayerCost
from selfspec.analysis.comparison import Comparison, Generate, compare, warm_up
from selfspec.analysis.replay import AgreementTrace, Setting, fixed_settings, trace_agreement
from selfspec.engine.calibrate import measured_cost
from selfspec.engine.request import encode_prompt
from selfspec.engine.results import mean
from selfspec.generator import SelfSpecGenerator

_CHUNK = 256  # rows per pass over the sample text
WORTH = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedDrafts:
    """A run with drafts by the model's weights in fewer bits. num_bytes: of these weights. policy: that was run."""

    bits: int
    num_bytes: int
    policy: str
    comparison: Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The findings of `inspect_model`.

    text_agreement, own_agreement: by exit layer, 1 .. L-1, share of positions where its argmax is the last layer's: of the
    sample texts, and of the model's own greedy continuations. best: the setting with most tokens per measured second, by
    these continuations. predicted: its speed-up over plain decoding. predicted_by_layers: that of the best setting by layers
    loaded alone. kernels: `LayerSkipModel.kernels`. comparison: the best setting, run against plain decoding. rounded: drafts
    in fewer bits, where they are possible, each run against plain decoding.
    """

    text_agreement: Mapping[int, float]
    own_agreement: Mapping[int, float]
    best: Setting
    predicted: float
    predicted_by_layers: float
    kernels: str | None
    comparison: Comparison
    rounded: tuple[RoundedDrafts, ...] = ()

    def verdict(self) -> str:
        measured, best = self.comparison.speedup, self.best.policy
        rounded = max(self.rounded, key=lambda one: one.comparison.speedup, default=None)
        if rounded is not None and rounded.comparison.speedup >= max(WORTH, measured):
            return (
                f"worth it: {rounded.policy} runs {rounded.comparison.speedup:.2f} times as fast as plain decoding here"
                f" (draft_weights='int{rounded.bits}' lets the default policy draft so)"
            )
        if measured >= WORTH:
            return f"worth it: {best} runs {measured:.2f} times as fast as plain decoding here"
        quarter = self.own_agreement[max((len(self.own_agreement) + 1) // 4, 1)]
        if self.predicted < WORTH and quarter < 0.5:
            return (
                f"not worth it: after a quarter of the layers only {quarter:.0%} of the tokens are the last layer's, so"
                " drafts are mostly rejected; it was probably not trained to exit early (selfspec train --init does that)"
            )
        return f"hardly worth it here: {best}, the best fixed setting, runs {measured:.2f} times as fast as plain"


def inspect_model(
    generator: SelfSpecGenerator,
    texts: Sequence[str],
    *,
    max_new_tokens: int = 64,
    repeats: int = 3,
    on_progress: Callable[[str], None] = lambda label: None,
) -> Inspection:
    """Inspect a model with sample texts; the first half of each is the prompt of a continuation.

    on_progress: called with a label after each of 2 * texts + 2 steps.
    Raises ValueError without a text of at least 4 tokens.
    """
    model, tokenizer = generator.model, generator.tokenizer
    assert tokenizer is not None
    limit = model.max_positions - max_new_tokens
    encoded = [encode_prompt(text, tokenizer, model.vocab_size)[:limit] for text in texts if text]
    encoded = [ids for ids in encoded if ids.numel() >= 4]
    if not encoded:
        raise ValueError("there must be a sample text of at least 4 tokens")
    cost = measured_cost(model)
    on_progress("calibrating")
    agreements, traces = [], []
    for ids in encoded:
        agreements.append(text_agreement(model, ids))
        on_progress("reading sample text")
        traces.append(trace_agreement(generator, ids[: ids.numel() // 2], max_new_tokens))
        on_progress("tracing every layer")
    best, predicted = _best(traces, cost)
    longest = max(encoded, key=len)
    generate = partial(
        generator.generate, longest[: longest.numel() // 2], max_new_tokens=max_new_tokens, eos_token_id=[],
        do_sample=False, exit_layer=best.exit_layer, num_speculations=best.num_speculations,
    )  # fmt: skip
    comparison = _compared(generate, repeats)
    rounded = _rounded_drafts(generator, generate, repeats)
    on_progress("comparing with plain decoding")
    layers = range(1, model.num_layers)
    return Inspection(
        text_agreement={layer: mean(row[layer - 1] for row in agreements) or 0.0 for layer in layers},
        own_agreement={layer: mean(trace.agreement(layer) for trace in traces) or 0.0 for layer in layers},
        best=best,
        predicted=predicted,
        predicted_by_layers=_best(traces, LayerCost(cost.num_layers))[1],
        kernels=model.kernels,
        comparison=comparison,
        rounded=rounded,
    )


def _compared(generate: Generate, repeats: int) -> Comparison:
    warm_up(generate, 8)
    comparison = compare(generate, repeats=repeats, greedy=True)
    assert comparison is not None
    return comparison


def _rounded_drafts(generator: SelfSpecGenerator, generate: Generate, repeats: int) -> tuple[RoundedDrafts, ...]:
    """Make weights in fewer bits, run them, and let them go again, unless they were there before."""
    model, found = generator.model, []
    for bits, length in ((8, 4), (4, 3)):  # near the best lengths for acceptances of .95 and .75
        if why_no_drafter(model, bits) is not None:
            continue
        there, policy = bits in model.drafters, f"bits:{bits}-{length}"
        try:
            run = partial(generate, exit_layer=None, num_speculations=None, policy=policy)
            comparison = _compared(run, repeats)
        finally:
            if not there:
                model.drafters.pop(bits, None)
        found.append(RoundedDrafts(bits=bits, num_bytes=draft_bytes(model, bits), policy=policy, comparison=comparison))
    return tuple(found)


def text_agreement(model: LayerSkipModel, ids: torch.Tensor) -> list[float]:
    """Return the share of positions of a text, int64 [n], where each exit's argmax is the last layer's; length L-1."""
    ids = ids.to(model.device)
    cache = KVCache(model, ids.numel())
    hits = torch.zeros(model.num_layers, dtype=torch.float64, device="cpu")
    states: list[torch.Tensor] = []
    before: list[torch.Tensor] = []  # all layers' states of the row before these

    def choose(first: int, layers_done: int, hidden: torch.Tensor) -> None:
        states.append(hidden.clone())
        if layers_done < model.num_layers:
            return
        steering = None
        if model.steering is not None:
            outputs = torch.stack([rows.to(model.device) for rows in states])
            steering = model.steering.rows_before(outputs, before.pop() if before else None)
            before.append(outputs[:, -1])
        final = model.logits(states.pop()).argmax(dim=-1)
        for layer, rows in enumerate(states, start=1):
            chosen = model.draft_logits(model.at_exit(rows, layer, steering)).argmax(dim=-1)
            hits[layer - 1] += (chosen == final).sum().cpu()
        hits[-1] += len(final)
        states.clear()

    with torch.inference_mode():
        prefill(model, ids, cache, capture=choose, most=_CHUNK)
    return (hits[:-1] / ids.numel()).tolist()


def _best(traces: Sequence[AgreementTrace], cost: CostModel) -> tuple[Setting, float]:
    """Find the setting with most tokens per cost over all traces, and that over plain decoding's."""
    by_policy: dict[str, list[Setting]] = {}
    for trace in traces:
        for setting in fixed_settings(trace, cost):
            by_policy.setdefault(setting.policy, []).append(setting)
    means = {name: mean(setting.tokens_per_cost for setting in found) or 0.0 for name, found in by_policy.items()}
    name = max(means, key=lambda key: means[key])
    return by_policy[name][0], means[name] * cost.autoregressive()


def kernels_in_words(variant: str | None) -> str:
    """Say what `LayerSkipModel.kernels` means, for people."""
    return "PyTorch's operators" if variant is None else f"selfspec's own kernels for {variant}"


def inspection_lines(inspection: Inspection) -> list[str]:
    measured = inspection.comparison
    lines = ["exit_layer  agreement on sample text  on its own text"]
    for layer, own in inspection.own_agreement.items():
        lines.append(f"{layer:10d}  {inspection.text_agreement[layer]:24.3f}  {own:15.3f}")
    lines += [
        f"best fixed setting by prediction: {inspection.best.policy}; speed-up predicted {inspection.predicted:.2f}"
        f" (by layers loaded alone, at the best setting for that, {inspection.predicted_by_layers:.2f})",
        f"measured: {measured.speedup:.2f} ({measured.speedup_min:.2f} to {measured.speedup_max:.2f}),"
        f" {measured.repeats} alternated pairs of runs on one of the texts",
    ]
    for one in inspection.rounded:
        runs = one.comparison.runs
        acceptance = sum(run.num_accepted for run in runs) / max(sum(run.num_drafted for run in runs), 1)
        lines.append(
            f"drafts with the weights in {one.bits} bits, {one.num_bytes / 1e6:,.0f} MB more: {one.policy} runs"
            f" {one.comparison.speedup:.2f} times as fast as plain decoding, {acceptance:.0%} of the drafts accepted"
        )
    return [*lines, f"layers ran on {kernels_in_words(inspection.kernels)}", inspection.verdict()]
