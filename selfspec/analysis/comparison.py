"""Speculation against plain decoding by the same engine: runs that take turns, their middle pair, outputs compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from statistics import median_low

import torch

from selfspec.engine.results import GenerationStats
from selfspec.generator import GenerationResult

NEAR_TIE_LOGIT_GAPS = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.0625, torch.bfloat16: 0.5}
"""Two correct engines may pick different tokens where the top two logits are closer than this: their sums are rounded in
different orders, which moves a logit by up to 1e-4 in float32. In half precision: a few units in the last place at 16."""

_BUSY = 1.25  # of the cores, which a measurement keeps busy itself
_PLAIN: Mapping[str, int | None] = {"exit_layer": None, "num_speculations": 0, "copy_from": None}
"""Options that make a call decode without speculation, whatever its others."""


Generate = Callable[..., GenerationResult]
"""`SelfSpecGenerator.generate` with the prompt and the options bound; it is called with options in place of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The measurements of `compare`.

    speedup: tokens per second with speculation over those of plain decoding, prefill included: the median over the pairs (the
    lower one of two). speedup_min, speedup_max: the smallest and the largest. middle: index of the pair with the median. Its
    times are what is shown, so that the numbers belong together. runs, baseline_runs: each run's statistics, in order.
    outputs_equal: all runs wrote the same tokens; None when sampling, where only their distribution is the same.
    first_difference: index of the first new token that differs.
    """

    repeats: int
    speedup: float
    speedup_min: float
    speedup_max: float
    middle: int
    outputs_equal: bool | None
    first_difference: int | None
    runs: tuple[GenerationStats, ...]
    baseline_runs: tuple[GenerationStats, ...]

    def as_dict(self) -> dict[str, object]:
        """Return the numbers and every run's statistics, for JSON."""
        return {
            "baseline": "ar",
            **{item.name: getattr(self, item.name) for item in fields(self)},
            "tokens_per_second": self.runs[self.middle].tokens_per_second,
            "baseline_tokens_per_second": self.baseline_runs[self.middle].tokens_per_second,
            "runs": [run.as_dict() for run in self.runs],
            "baseline_runs": [run.as_dict() for run in self.baseline_runs],
        }


def load_warning(*loads: float, cores: int) -> str | None:
    """Say that the machine is busy, if one of these load averages says that more wants to run than there are cores."""
    if max(loads) <= _BUSY * cores:
        return None
    seen = " and ".join(f"{load:.1f}" for load in loads)
    return f"Busy machine (load average {seen} on {cores} cores): times and ratios may be far off."


def warm_up(generate: Generate, max_new_tokens: int) -> None:
    """Run both modes for a few tokens, so that neither pays for what happens once."""
    generate(max_new_tokens=max_new_tokens)
    generate(max_new_tokens=max_new_tokens, **_PLAIN)


def compare(
    generate: Generate,
    *,
    repeats: int,
    greedy: bool,
    before_run: Callable[[int], object] = lambda run: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> Comparison | None:
    """Alternate `repeats` runs of each mode and compare them; warm up first (`warm_up`).

    A generator with `prefix_cache=0` reads the prompt in every run; others may not.
    before_run: called with the number of the run, 0 to 2 * repeats - 1. interrupted: called after every run; a pair in which
    it returns True does not count. Returns None without a complete pair.
    """
    results: list[GenerationResult] = []
    baselines: list[GenerationResult] = []
    for repeat in range(repeats):
        before_run(2 * repeat)
        result = generate()
        before_run(2 * repeat + 1)
        baseline = generate(**_PLAIN)
        if interrupted():
            break
        results.append(result)
        baselines.append(baseline)
    if not results:
        return None
    return summarise(results, baselines, greedy=greedy)


def summarise(results: list[GenerationResult], baselines: list[GenerationResult], *, greedy: bool) -> Comparison:
    """Compare the pairs results[i], baselines[i]; at least one."""
    runs, baseline_runs = tuple(r.stats for r in results), tuple(b.stats for b in baselines)
    speedups = [r.tokens_per_second / b.tokens_per_second for r, b in zip(runs, baseline_runs)]
    middle = speedups.index(median_low(speedups))
    reference = baselines[0].new_tokens
    differences = [first_difference(reference, r.new_tokens) for r in results + baselines] if greedy else []
    known = [index for index in differences if index is not None]
    return Comparison(
        repeats=len(results),
        speedup=speedups[middle],
        speedup_min=min(speedups),
        speedup_max=max(speedups),
        middle=middle,
        runs=runs,
        baseline_runs=baseline_runs,
        outputs_equal=not known if greedy else None,
        first_difference=min(known, default=None),
    )


def first_difference(left: list[int], right: list[int]) -> int | None:
    """Return the index of the first token that differs; the shorter text's length if it is the other's beginning."""
    shorter = None if len(left) == len(right) else min(len(left), len(right))
    return next((index for index, (a, b) in enumerate(zip(left, right)) if a != b), shorter)
