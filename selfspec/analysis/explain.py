"""Where one run's time went, what limited its speed-up, and what every fixed setting would have given."""

from __future__ import annotations

from dataclasses import dataclass

from policies import CostModel, LayerCost, cost_of_round
from selfspec.analysis.replay import Setting, agreement_trace, fixed_settings
from selfspec.engine.results import sources_text
from selfspec.generator import GenerationResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedups:
    """The gain of a run's rounds over plain decoding of the same tokens.

    layers: what layers loaded allow (eTPL * L). cost: what is left of it with heads and numbers of rows at their measured
    cost. real: with everything, learning and bookkeeping too, against the plain step's measured cost. full_acceptance: `cost`
    if every draft of these rounds had been accepted.
    """

    layers: float
    cost: float
    real: float
    full_acceptance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One run, explained.

    phases: share of the call's time per phase, summing to 1. speedups: None without rounds. settings, by_layers: fixed
    settings, which copy nothing, by measured tokens per second and per loaded layer, best first. exact: they were replayed,
    not estimated. sources: `sources_text`; None where nothing was copied.
    """

    phases: dict[str, float]
    speedups: Speedups | None
    settings: tuple[Setting, ...]
    by_layers: tuple[Setting, ...]
    exact: bool
    coverage: float
    sources: str | None


def explain(
    result: GenerationResult,
    num_layers: int,
    cost: CostModel,
    plain: GenerationResult | None = None,
    timed: GenerationResult | None = None,
) -> Explanation:
    """Explain a run that kept its trace; `watching_all_layers` makes the settings exact for a greedy one.

    timed: the same call without watching, which takes time of its own; by default `result`.
    plain: the same text, decoded plainly and watched, for a run that copied: rounds that copy or wave are not watched.
    """
    stats = result.stats
    assert result.trace is not None, "generate with trace=True"
    times = stats if timed is None else timed.stats
    names = ("prefill", "draft", "verify", "accept", "learn", "other")
    phases = {name: getattr(times, f"{name}_seconds") / times.seconds for name in names}
    tokens = sum(len(record.tokens) for record in result.trace)
    full = sum(record.sweeps or record.num_drafted + 1 for record in result.trace)
    step = cost.autoregressive()
    rounds_cost = sum(cost_of_round(record, cost) for record in result.trace)
    speedups = None
    if tokens and stats.etpl is not None:
        real = (times.num_new_tokens - 1) * step / (times.seconds - times.time_to_first_token)
        layers, here, most = stats.etpl * num_layers, tokens * step / rounds_cost, full * step / rounds_cost
        speedups = Speedups(layers=layers, cost=here, real=real, full_acceptance=most)
    trace = agreement_trace(result if plain is None else plain, num_layers)
    return Explanation(
        phases=phases,
        speedups=speedups,
        settings=tuple(fixed_settings(trace, cost)),
        by_layers=tuple(fixed_settings(trace, LayerCost(num_layers))),
        exact=trace.is_complete,
        coverage=trace.coverage,
        sources=sources_text(stats) if stats.num_copied else None,
    )


def explanation_lines(explanation: Explanation, cost: CostModel, shown: int = 5) -> list[str]:
    shares = ", ".join(f"{name} {share:.0%}" for name, share in explanation.phases.items())
    lines = [f"time: {shares}"]
    if explanation.sources is not None:
        lines.append(explanation.sources)
    found = explanation.speedups
    if found is None:
        return [*lines, "no round was run: nothing to explain"]
    losses = {
        "acceptance": found.full_acceptance / found.cost,
        "the cost of heads and of verifying more rows": found.layers / found.cost,
        "learning and bookkeeping": found.cost / found.real,
    }
    largest = max(losses, key=lambda name: losses[name])
    plain_etpl = 1 / cost.num_layers
    lines += [
        f"eTPL {found.layers * plain_etpl:.4f} tokens per loaded layer (plain decoding: {plain_etpl:.4f})",
        f"speed-up by layers loaded {found.layers:.2f};"
        f" with heads and rows at their measured cost {found.cost:.2f}; with learning and all else {found.real:.2f}",
        f"had every draft been accepted: {found.full_acceptance:.2f} at measured cost; the largest loss is {largest}"
        f" (a factor of {losses[largest]:.2f})",
    ]
    if not explanation.settings:
        return [*lines, "no layer was watched: no fixed setting can be replayed"]
    how = f"estimated from {explanation.coverage:.0%} of the positions"
    how = "replayed from this run" if explanation.exact else how
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
