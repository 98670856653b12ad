"""Speculation against plain decoding by the same engine: runs that take turns, their middle pair, outputs compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import takewhile
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
    """The measurements of `summarise`.

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


def pairs_of_runs(
    generate: Generate, repeats: int, before_run: Callable[[int], object] = lambda run: None
) -> Iterator[tuple[GenerationResult, GenerationResult]]:
    """Run speculation and plain decoding in turn, and yield each pair's results. before_run: called with the run's number."""
    for repeat in range(repeats):
        before_run(2 * repeat)
        result = generate()
        before_run(2 * repeat + 1)
        yield result, generate(**_PLAIN)


def compare(
    generate: Generate,
    *,
    repeats: int,
    greedy: bool,
    before_run: Callable[[int], object] = lambda run: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> Comparison | None:
    """Summarise `pairs_of_runs` up to the first after which `interrupted` returns True, left out; None without a pair."""
    pairs = [*takewhile(lambda pair: not interrupted(), pairs_of_runs(generate, repeats, before_run))]
    return summarise(pairs, greedy=greedy) if pairs else None


def summarise(pairs: Sequence[tuple[GenerationResult, GenerationResult]], *, greedy: bool) -> Comparison:
    """Compare the two of each pair; at least one pair, and all of one prompt if greedy."""
    runs, baseline_runs = (tuple(result.stats for result in results) for results in zip(*pairs))
    speedups = [r.tokens_per_second / b.tokens_per_second for r, b in zip(runs, baseline_runs)]
    middle = speedups.index(median_low(speedups))
    reference = pairs[0][1].new_tokens
    differences = [first_difference(reference, r.new_tokens) for pair in pairs for r in pair] if greedy else []
    known = [index for index in differences if index is not None]
    return Comparison(
        repeats=len(pairs),
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
