"""From raw samples to the numbers that people read; every table goes through here.

tokens/s of an engine: per prompt, new tokens over the *median* time of its repeats; then the mean over prompts (macro).
A speed-up is the ratio of two such means from one run. Spread: the same figure from each repeat alone, lowest to highest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median

from bench.record import Line, by_value, engine_labels, matching
from bench.report.table import Spread
from selfspec.engine.results import mean

ALL = "all"
"""The column for the prompts of all tasks."""
Figure = Callable[[Line], float | None]
"""A number of one sample, None where it is not known."""


def answer_speed(line: Line) -> float:
    """Return the new tokens per second of the whole call."""
    return float(line["num_new_tokens"] / line["seconds"])


def decode_speed(line: Line) -> float | None:
    """Return the tokens after the first per second; None for an engine that does not tell them apart."""
    return float((line["num_new_tokens"] - 1) / line["decode_seconds"]) if line["decode_seconds"] else None


def fastest_memory(lines: Sequence[Line]) -> float:
    """Return the bytes per second that the device read at best, before the runs and after them."""
    return max(line["bytes_per_second"] for line in matching(lines, "limits"))


class Samples:
    """The samples and outputs of one record, by engine. Engines that were lost before their last run are left out."""

    def __init__(self, lines: Sequence[Line]) -> None:
        samples = by_value(matching(lines, "sample"), "engine")
        complete = max(map(len, samples.values()), default=0)
        self._by_engine = {name: own for name, own in samples.items() if len(own) == complete}
        self.engines = {name: label for name, label in engine_labels(lines).items() if name in self._by_engine}
        self.samples = [line for line in matching(lines, "sample") if line["engine"] in self.engines]
        self.outputs = [line for line in matching(lines, "output") if line["engine"] in self.engines]
        self.prompts = list(dict.fromkeys(line["prompt"] for line in self.samples))
        self.tasks = list(dict.fromkeys(line["task"] for line in self.samples))

    def of_engine(self, engine: str, task: str = ALL) -> list[Line]:
        """Return an engine's samples."""
        return [line for line in self._by_engine.get(engine, []) if task in (ALL, line["task"])]

    def per_prompt(self, engine: str, figure: Figure, task: str = ALL) -> list[float]:
        """Return the median over repeats of a figure, for each prompt where it is known."""
        found: dict[str, list[float]] = {}
        for line in self.of_engine(engine, task):
            if (value := figure(line)) is not None:
                found.setdefault(line["prompt"], []).append(value)
        return [median(values) for values in found.values()]

    def speed(self, engine: str, task: str = ALL) -> Spread:
        """Return the macro tokens/s with prefill."""
        alone = self._per_repeat(engine, task)
        return Spread(value=fmean(self.per_prompt(engine, answer_speed, task)), low=min(alone), high=max(alone))

    def speedup(self, engine: str, baseline: str, task: str = ALL) -> Spread:
        """Return the ratio of the two engines' macro tokens/s; the spread is that of the ratio within each repeat."""
        ratios = [a / b for a, b in zip(self._per_repeat(engine, task), self._per_repeat(baseline, task))]
        value = self.speed(engine, task).value / self.speed(baseline, task).value
        return Spread(value=value, low=min(ratios), high=max(ratios))

    def _per_repeat(self, engine: str, task: str) -> list[float]:
        """Return the mean over prompts in each repeat alone."""
        repeats = by_value(self.of_engine(engine, task), "repeat")
        return [fmean(map(answer_speed, repeats[repeat])) for repeat in sorted(repeats)]

    def count(self, engine: str, name: str) -> float | None:
        """Return the mean over prompts of one of an engine's counts, None for what it does not count."""
        by_prompt = by_value(self.of_engine(engine), "prompt")
        return mean(mean((line["stats"] or {}).get(name) for line in own) for own in by_prompt.values())
