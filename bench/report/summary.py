"""From raw samples to the numbers that people read; every table goes through here.

tokens/s of an engine: per prompt, new tokens over the *median* time of its repeats; then the mean over prompts (macro).
A speed-up is the ratio of two such means from one run. Spread: the same figure from each repeat alone, lowest to highest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from bench.record import Line, by_value, matching
from selfspec.engine.results import mean, ratio

PHASES = ("prefill", "draft", "preverify", "verify", "accept", "learn", "other")
"""The phases that selfspec times, `*_seconds` of its statistics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A figure, and the lowest and highest that a single repeat gave for it."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSummary:
    """One engine's row of the table; times in seconds, None for what is not known.

    tokens_per_second: with prefill, macro. total_tokens_per_second: all tokens over the sum of the median times.
    decode_tokens_per_second: tokens after the first over the time after the first.
    The others are means over prompts of the engine's counts (rounds do not include the prefill of selfspec); draft and verify
    passes per prompt (what is copied takes no draft pass); eTPL is charged with a pre-verifier's passes, where there is one.
    num_mismatches: outputs that differ from the reference's; faults, unless they are near-ties or of other weights.
    equal_share: of the new tokens, those before an output's first difference; None without outputs.
    """

    tokens_per_second: Spread
    total_tokens_per_second: float
    decode_tokens_per_second: float | None
    time_to_first_token: float | None
    acceptance_rate: float | None
    accepted_per_round: float | None
    tokens_per_round: float | None
    etpl: float | None
    draft_passes: float | None
    verify_passes: float | None
    num_mismatches: int
    num_near_ties: int
    num_faults: int
    equal_share: float | None


class Samples:
    """The samples and outputs of one record, by engine. labels: of all engines; engines: of those that have samples."""

    def __init__(self, lines: Sequence[Line]) -> None:
        run = lines[0]
        self.labels: dict[str, str] = dict(run.get("engines", {}))  # none where models are compared
        self.samples, self.outputs = matching(lines, "sample"), matching(lines, "output")
        self._by_engine = by_value(self.samples, "engine")
        self.engines = {name: label for name, label in self.labels.items() if name in self._by_engine}
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

    def summary(self, engine: str) -> EngineSummary:
        """Make the engine's row."""
        lines = self.of_engine(engine)
        outputs = matching(self.outputs, "output", engine=engine)
        of_prompt = by_value(lines, "prompt")
        by_prompt = [of_prompt[prompt] for prompt in self.prompts]
        seconds = sum(median(line["seconds"] for line in group) for group in by_prompt)
        tokens = sum(group[0]["num_new_tokens"] for group in by_prompt)

        def over_prompts(value: Callable[[Line], float | None]) -> float | None:
            medians = []
            for group in by_prompt:
                known = [v for v in map(value, group) if v is not None]
                medians.append(median(known) if known else None)
            return mean(medians)

        def count(name: str) -> float | None:
            counted = [line["counted"] or {} for line in outputs]
            stats = [mean((line["stats"] or {}).get(name) for line in group) for group in by_prompt]
            return mean([*(source.get(name) for source in counted), *stats])

        def equal_share(output: Line) -> float:
            position = output["first_difference"]
            return 1.0 if position is None else position / of_prompt[output["prompt"]][0]["num_new_tokens"]

        def decode_speed(line: Line) -> float | None:
            return ratio(line["num_new_tokens"] - 1, line["decode_seconds"]) if line["decode_seconds"] else None

        drafts = count("num_drafted")
        differences = [line for line in outputs if line["first_difference"] is not None]
        return EngineSummary(
            tokens_per_second=self.speed(engine),
            total_tokens_per_second=tokens / seconds,
            decode_tokens_per_second=over_prompts(decode_speed),
            time_to_first_token=over_prompts(lambda line: line["time_to_first_token"]),
            acceptance_rate=count("acceptance_rate"),
            accepted_per_round=count("accepted_per_round") if drafts else None,
            tokens_per_round=count("tokens_per_round"),
            etpl=count("etpl_charged"),
            draft_passes=None if drafts is None else drafts - (count("num_copied") or 0),
            verify_passes=count("rounds"),
            num_mismatches=len(differences),
            num_near_ties=sum(line["near_tie"] is True for line in differences),
            num_faults=sum(line["near_tie"] is False for line in differences),
            equal_share=mean(map(equal_share, outputs)),
        )

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
