"""One measurement over tasks and policies: replayed grid, timed runs in turn; resumable.

A run that was killed goes on with the first (engine, prompt, repeat) that is not in its record. What does not depend on the
clock (rounds, drafts, layers, outputs) is the same either way: policies forget before every prompt, and costs are measured
only once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.datasets import EncodedPrompt
from bench.engines.own import SelfSpecEngine, TimedEngine
from bench.grid import SECONDS, fixed_in_hindsight, grid_line
from bench.machine.bandwidth import WeightBytes, measure_bandwidth
from bench.measure import measure_prompt, num_runs, warm_up
from bench.record import BEST_FIXED, BEST_FIXED_LABEL, Line, RecordWriter, matching
from bench.scoring import Scorer
from policies import CostModel, MeasuredCost
from selfspec import SelfSpecGenerator
from selfspec.analysis.replay import GRID_LENGTHS, trace_agreement
from selfspec.engine.calibrate import measured_cost, use_cost


@dataclass(kw_only=True)
class Run:
    """A measurement in progress.

    engines: the outputs of all are compared with the first one's. grid: replay fixed settings, and run the best one of each
    task; not of a run that samples. sampled: the repeats of a prompt differ in their seeds. score: of outputs, for prompts
    with a reference. advance: called after each step.
    """

    generator: SelfSpecGenerator
    engines: Sequence[TimedEngine]
    prompts: Sequence[EncodedPrompt]
    record: RecordWriter
    max_new_tokens: int
    repeats: int
    warmups: int
    grid: bool
    sampled: bool
    score: Scorer | None = None
    advance: Callable[[str], None] = lambda label: None
    _fixed: dict[str, str] = field(default_factory=dict, init=False)
    """Task -> its best fixed setting, from `replay`."""

    @property
    def num_steps(self) -> int:
        """How many times `advance` is called at most."""
        engines, prompts = len(self.engines) + self.grid, len(self.prompts)
        return self.grid * prompts + num_runs(engines, prompts, repeats=self.repeats, warmups=self.warmups)

    def costs(self) -> MeasuredCost:
        """Return this machine's calibration, or the resumed run's."""
        known = self.record.earlier("costs")
        if known is None:
            known = {"kind": "costs", **measured_cost(self.generator.model).as_dict()}
            self.record.write(known)
        cost = MeasuredCost.from_dict({name: value for name, value in known.items() if name != "kind"})
        use_cost(self.generator.model, cost)
        return cost

    def limits(self) -> None:
        """Write the device's bandwidth and the bytes of the weights."""
        if self.record.earlier("limits") is None:
            model = self.generator.model
            bandwidth = measure_bandwidth(model.device)
            self.record.write({"kind": "limits", "bytes_per_second": bandwidth, **WeightBytes.of(model).as_line()})

    def replay(self, cost: CostModel) -> None:
        """Trace the prompts and replay the grid on them; then add the best fixed setting of each task."""
        if not self.grid:
            return
        for prompt in self.prompts:
            if self.record.earlier("grid", prompt=prompt.id) is None:
                trace = trace_agreement(self.generator, prompt.ids, self.max_new_tokens)
                self.record.write(grid_line(prompt, trace, GRID_LENGTHS, cost))
            self.advance("tracing every layer")
        self._fixed = fixed_in_hindsight(matching(self.record.lines, "grid"), SECONDS)
        if self.record.earlier("fixed") is None:
            self.record.write({"kind": "fixed", "by_task": self._fixed})

    def measure(self) -> None:
        """Time the engines on every prompt that is not done, after a warm-up on the first of these."""
        left = [(number, prompt) for number, prompt in enumerate(self.prompts) if not self._done(prompt)]
        if left:
            first = left[0][1]
            warm_up(
                self._engines_for(first),
                first,
                max_new_tokens=self.max_new_tokens,
                warmups=self.warmups,
                advance=self.advance,
                lost={},  # nothing here is in a process of its own
            )
            for engine in self.engines:
                if isinstance(engine, SelfSpecEngine):
                    engine.forget()
        for number, prompt in left:
            measure_prompt(
                self._engines_for(prompt),
                prompt,
                max_new_tokens=self.max_new_tokens,
                repeats=self.repeats,
                dtype=self.generator.model.weights_dtype,
                record=self.record,
                advance=self.advance,
                turn=number * self.repeats,
                lost={},
                sampled=self.sampled,
                score=self.score,
            )

    def _engines_for(self, prompt: EncodedPrompt) -> Sequence[TimedEngine]:
        if not self.grid:
            return self.engines
        policy = self._fixed[prompt.task]
        return [*self.engines, SelfSpecEngine(self.generator, policy, name=BEST_FIXED, label=BEST_FIXED_LABEL)]

    def _done(self, prompt: EncodedPrompt) -> bool:
        """Whether the run that is resumed had compared all outputs for this prompt, which it did last."""
        last = self._engines_for(prompt)[-1]
        return self.record.earlier("output", engine=last.name, prompt=prompt.id) is not None


def resumable(previous: Sequence[Line], run: Mapping[str, Any]) -> Sequence[Line]:
    """Return the lines that a broken-off run left, if it measured what `run` describes; else `run` alone.

    Raises ValueError when it was a run of something else.
    """
    if not previous or previous[0]["kind"] != "run":
        return [dict(run)]
    before = previous[0]
    for name in ("configuration", "engines"):
        if before[name] != run[name]:
            theirs, ours = before[name], run[name]
            changed = sorted(key for key in {*theirs, *ours} if theirs.get(key) != ours.get(key))
            raise ValueError(
                f"cannot resume: the run that broke off had another {', '.join(changed)}; give the same options, or start"
                " anew without --resume"
            )
    return previous
