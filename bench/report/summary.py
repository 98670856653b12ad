"""From raw samples to the numbers that people read; every table goes through here.

tokens/s of an engine: per prompt, new tokens over the *median* time of its repeats; then the mean over prompts (macro).
A speed-up is the ratio of two such means from one run. Spread: the same figure from each repeat alone, lowest to highest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from bench.record import Line, by_value, engine_labels, matching
from bench.report.table import Spread, mean, number

ALL = "all"
"""The column for the prompts of all tasks."""
PHASES = ("prefill", "draft", "preverify", "verify", "accept", "learn", "other")
"""The phases that selfspec times, `*_seconds` of its statistics."""


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
        self.tasks = {line["prompt"]: line["task"] for line in self.samples}

    def of_engine(self, engine: str) -> Sequence[Line]:
        """Its samples."""
        return self._by_engine.get(engine, [])

    def speed(self, engine: str, tasks: Sequence[str] | None = None) -> Spread:
        """Macro tokens/s with prefill, over the prompts of some tasks or of all."""
        speeds = self._speeds(engine, tasks)
        alone = _per_repeat(speeds)
        return Spread(value=_macro(speeds), low=min(alone), high=max(alone))

    def speedup(self, engine: str, baseline: str, tasks: Sequence[str] | None = None) -> Spread:
        """Ratio of the two engines' macro tokens/s; the spread is that of the ratio within each repeat."""
        ours, theirs = self._speeds(engine, tasks), self._speeds(baseline, tasks)
        ratios = [a / b for a, b in zip(_per_repeat(ours), _per_repeat(theirs))]
        return Spread(value=_macro(ours) / _macro(theirs), low=min(ratios), high=max(ratios))

    def count(self, engine: str, name: str) -> float | None:
        """Return the mean over prompts of one of an engine's counts, None for what it does not count."""
        return mean(mean((line["stats"] or {}).get(name) for line in own) for own in self._by_prompt(engine))

    def over_prompts(self, engine: str, value: Callable[[Line], float | None]) -> float | None:
        """Return the mean over prompts of the median over repeats of a figure; what is not known does not count."""
        medians: list[float | None] = []
        for own in self._by_prompt(engine):
            known = [found for found in map(value, own) if found is not None]
            medians.append(median(known) if known else None)
        return mean(medians)

    def outputs_text(self, engine: str) -> str:
        """Say how an engine's outputs compare with the reference's, and how much comes before a first difference."""
        own = matching(self.outputs, "output", engine=engine)
        differing = [line for line in own if line["first_difference"] is not None]
        if not differing:
            return "equal"
        near, faults = (sum(line["near_tie"] is tie for line in differing) for tie in (True, False))
        found = [f"near-ties: {near}"] if near else []
        found += [f"DIFFERENT: {faults}"] if faults else []
        tokens = {line["prompt"]: line["num_new_tokens"] for line in self.of_engine(engine)}
        places = [(line["first_difference"], tokens[line["prompt"]]) for line in own]
        share = mean(1.0 if place is None else place / size for place, size in places)
        return f"{', '.join(found) or 'other weights'} ({number(share, '{:.0f} % equal', 100)})"

    def phase_shares(self, engine: str) -> dict[str, float] | None:
        """Share of each phase in the time of all runs, None if the engine does not tell its phases."""
        stats = [line["stats"] for line in self.of_engine(engine)]
        if not all(stats):
            return None
        total = sum(each["seconds"] for each in stats)
        return {phase: sum(each[f"{phase}_seconds"] for each in stats) / total for phase in PHASES}

    def phases(self) -> tuple[str, ...]:
        """PHASES, without pre-verification where no engine does it."""
        used = [shares["preverify"] for shares in map(self.phase_shares, self.engines) if shares is not None]
        return PHASES if any(used) else tuple(phase for phase in PHASES if phase != "preverify")

    def _by_prompt(self, engine: str) -> list[list[Line]]:
        by_prompt = by_value(self.of_engine(engine), "prompt")
        return [by_prompt[prompt] for prompt in self.prompts]

    def _speeds(self, engine: str, tasks: Sequence[str] | None) -> list[list[float]]:
        """Tokens per second of every sample, [prompts][repeats]."""
        found: dict[str, list[tuple[int, float]]] = {}
        for line in self.of_engine(engine):
            if tasks is None or line["task"] in tasks:
                found.setdefault(line["prompt"], []).append((line["repeat"], line["num_new_tokens"] / line["seconds"]))
        return [[speed for _, speed in sorted(repeats)] for repeats in found.values()]


def _macro(values: Sequence[Sequence[float]]) -> float:
    """Mean over prompts of the median over repeats. The median of speeds is the speed of the median time."""
    return sum(median(repeats) for repeats in values) / len(values)


def _per_repeat(values: Sequence[Sequence[float]]) -> list[float]:
    """Mean over prompts in each repeat alone."""
    return [sum(repeats) / len(repeats) for repeats in zip(*values)]
