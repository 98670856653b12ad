"""Where one run's time went, what limited its speed-up, and what every fixed setting would have given."""

from __future__ import annotations

from dataclasses import dataclass

from policies import CostModel, LayerCost, ObservationSpec, Policy, cost_of_round
from selfspec.analysis.replay import AgreementTrace, Setting, agreement_trace, fixed_settings
from selfspec.engine.stats import ratio, sources_text
from selfspec.generator import GenerationResult


def watching_all_layers(policy: Policy, num_layers: int) -> Policy:
    """The same policy, with the shadow tokens of all layers in every record. They cost time, and it learns from them."""
    return Policy(
        policy.exit, policy.stopping, policy.name, also=ObservationSpec(shadow_layers=tuple(range(1, num_layers)))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One run, explained. All speed-ups are over plain decoding of the same rounds' tokens.

    phases: share of the call's time per phase, summing to 1. etpl: committed tokens per loaded layer.
    layers_speedup: what layers loaded allow (eTPL * L). cost_speedup: what is left of it with heads and numbers of rows at
    their measured cost. real_speedup: with everything, learning and bookkeeping too, against the plain step's measured
    cost. full_acceptance_speedup: `cost_speedup` if every draft of these rounds had been accepted. None without rounds.
    settings: fixed ones by measured tokens per second, best first; by_layers: likewise per loaded layer. exact: whether
    they were replayed, not estimated. They copy nothing. sources: how many drafts were copied and how many an exit made, and
    how many of each were accepted; None where nothing was copied.
    """

    phases: dict[str, float]
    etpl: float | None
    layers_speedup: float | None
    cost_speedup: float | None
    real_speedup: float | None
    full_acceptance_speedup: float | None
    settings: tuple[Setting, ...]
    by_layers: tuple[Setting, ...]
    exact: bool
    coverage: float
    agreement: dict[int, float]
    sources: str | None


def explain(
    result: GenerationResult, num_layers: int, cost: CostModel, plain: GenerationResult | None = None
) -> Explanation:
    """Explain a run that kept its trace; `watching_all_layers` makes the settings exact for a greedy one.

    plain: the same text, decoded by `plain_and_watched`, for a run that copied: rounds that copy are not watched.
    """
    stats = result.stats
    assert result.trace is not None, "generate with trace=True"
    names = ("prefill", "draft", "verify", "accept", "learn", "other")
    phases = {name: getattr(stats, f"{name}_seconds") / stats.seconds for name in names}
    tokens = sum(len(record.tokens) for record in result.trace)
    full = sum(record.num_drafted + 1 for record in result.trace)
    step = cost.autoregressive()
    rounds_cost = sum(cost_of_round(record, cost) for record in result.trace)
    decoding = stats.seconds - stats.time_to_first_token
    trace: AgreementTrace = agreement_trace(result if plain is None else plain, num_layers)
    return Explanation(
        phases=phases,
        etpl=stats.etpl,
        layers_speedup=None if stats.etpl is None else stats.etpl * num_layers,
        cost_speedup=ratio(tokens * step, rounds_cost),
        real_speedup=ratio(tokens * step, decoding) if tokens else None,
        full_acceptance_speedup=ratio(full * step, rounds_cost),
        settings=tuple(fixed_settings(trace, cost)),
        by_layers=tuple(fixed_settings(trace, LayerCost(num_layers))),
        exact=trace.is_complete,
        coverage=trace.coverage,
        agreement={layer: value for layer in trace.agrees if (value := trace.agreement(layer)) is not None},
        sources=sources_text(stats) if stats.num_copied else None,
    )


def explanation_lines(explanation: Explanation, cost: CostModel, shown: int = 5) -> list[str]:
    shares = ", ".join(f"{name} {share:.0%}" for name, share in explanation.phases.items())
    lines = [f"time: {shares}"]
    if explanation.sources is not None:
        lines.append(explanation.sources)
    if (
        explanation.etpl is None
        or explanation.layers_speedup is None
        or explanation.cost_speedup is None
        or explanation.real_speedup is None
        or explanation.full_acceptance_speedup is None
    ):
        return [*lines, "no round was run: nothing to explain"]
    plain_etpl = explanation.etpl / explanation.layers_speedup
    losses = {
        "acceptance": explanation.full_acceptance_speedup / explanation.cost_speedup,
        "the cost of heads and of verifying more rows": explanation.layers_speedup / explanation.cost_speedup,
        "learning and bookkeeping": explanation.cost_speedup / explanation.real_speedup,
    }
    largest = max(losses, key=lambda name: losses[name])
    lines += [
        f"eTPL {explanation.etpl:.4f} tokens per loaded layer (plain decoding: {plain_etpl:.4f})",
        f"speed-up by layers loaded {explanation.layers_speedup:.2f};"
        f" with heads and rows at their measured cost {explanation.cost_speedup:.2f};"
        f" with learning and all else {explanation.real_speedup:.2f}",
        f"had every draft been accepted: {explanation.full_acceptance_speedup:.2f} at measured cost; the largest loss is"
        f" {largest} (a factor of {losses[largest]:.2f})",
    ]
    if not explanation.settings:
        return [*lines, "no layer was watched: no fixed setting can be replayed"]
    how = (
        "replayed from this run" if explanation.exact else f"estimated from {explanation.coverage:.0%} of the positions"
    )
    lines.append(f"fixed settings, {how}; an adaptive policy's other choices cannot be replayed, only run")
    if explanation.sources is not None:
        lines.append("  these settings copy nothing")
    for title, settings, plain in (
        ("tokens/s against plain, at measured cost", explanation.settings, cost.autoregressive()),
        ("tokens per layer against plain", explanation.by_layers, float(cost.num_layers)),
    ):
        best = ", ".join(f"{setting.policy} {setting.tokens_per_cost * plain:.2f}" for setting in settings[:shown])
        lines.append(f"  {title}: {best}")
    return lines
