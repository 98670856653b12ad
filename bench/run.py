"""One measurement over tasks and policies: replayed grid, timed runs in turn, memory; resumable, shared by processes.

The lines of a prompt are complete once its "done" line is written. A run that was killed goes on with the first prompt that
is not done, and several processes can share the prompts. What does not depend on the clock (rounds, drafts,
layers, outputs) is the same either way: policies forget before every prompt, and costs are measured once and then kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench.datasets import EncodedPrompt
from bench.engines.own import LocalEngine, SelfSpecEngine
from bench.grid import SECONDS, fixed_in_hindsight, grid_line
from bench.machine.bandwidth import WeightBytes, measure_bandwidth
from bench.machine.memory import peak_bytes
from bench.measure import measure_prompt, warm_up
from bench.record import BEST_FIXED, BEST_FIXED_LABEL, Line, RecordWriter
from bench.scoring import Scorer
from bench.workers import Workers
from policies import CostModel, MeasuredCost
from selfspec import SelfSpecGenerator
from selfspec.analysis.replay import GRID_LENGTHS, trace_agreement
from selfspec.engine.calibrate import measured_cost, use_cost

_ORDER = ("run", "costs", "limits", "grid", "fixed", "memory", "sample", "output")


@dataclass(kw_only=True)
class Run:
    """A measurement in progress.

    engines: the outputs of all are compared with the first one's. grid: replay fixed settings, and run the best one of each
    task; not of a run that samples. memory: measure it, once per engine. sampled: the repeats of a prompt differ in their
    seeds. score: of outputs, for prompts with a reference. advance: called after each step.
    """

    generator: SelfSpecGenerator
    engines: Sequence[LocalEngine]
    prompts: Sequence[EncodedPrompt]
    record: RecordWriter
    workers: Workers
    max_new_tokens: int
    repeats: int
    warmups: int
    grid: bool
    memory: bool
    sampled: bool
    score: Scorer | None = None
    advance: Callable[[str], None] = lambda label: None

    def __post_init__(self) -> None:
        self._previous = self.workers.from_main(self.record.lines)
        self._mine = self.workers.share(self.prompts)
        self._fixed: dict[str, str] = {}  # task -> its best fixed setting, from `replay`

    @property
    def num_steps(self) -> int:
        """How many times `advance` is called at most; without memory, which only the first process measures."""
        runs = len(self.engines) + self.grid
        return self.grid * len(self._mine) + runs * (self.warmups + len(self._mine) * self.repeats)

    def costs(self) -> MeasuredCost:
        """The first process's calibration, or the resumed run's; every process uses it from now on."""
        known = self._of_kind("costs")
        mine = None
        if known:
            mine = {name: value for name, value in known[0].items() if name != "kind"}
        elif self.workers.is_main:
            mine = measured_cost(self.generator.model, self.generator.runner).as_dict()
            self.record.write({"kind": "costs", **mine})
        cost = MeasuredCost.from_dict(self.workers.from_main(mine))
        use_cost(self.generator.model, cost, self.generator.runner)
        return cost

    def limits(self) -> None:
        """Write the device's bandwidth and the bytes of the weights; only the first process does."""
        if self.workers.is_main and not self._of_kind("limits"):
            model = self.generator.model
            weights = WeightBytes.of(model)
            self.record.write(
                {
                    "kind": "limits",
                    "bytes_per_second": measure_bandwidth(model.device),
                    **weights.as_line(),
                }
            )

    def replay(self, cost: CostModel) -> None:
        """Trace this process's prompts and replay the grid on them; then add the best fixed setting of each task."""
        if not self.grid:
            return
        known = {line["prompt"] for line in self._of_kind("grid")}
        for prompt in self._mine:
            if prompt.id not in known:
                trace = trace_agreement(self.generator, prompt.ids, self.max_new_tokens)
                self.record.write(grid_line(prompt, trace, GRID_LENGTHS, cost))
            self.advance("tracing every layer")
        grid = {line["prompt"]: line for line in [*self._of_kind("grid"), *self._everyones("grid")]}
        self._fixed = fixed_in_hindsight([grid[prompt.id] for prompt in self.prompts], SECONDS)
        if self.workers.is_main and not self._of_kind("fixed"):
            self.record.write({"kind": "fixed", "by_task": self._fixed})

    def measure(self) -> None:
        done = {line["prompt"] for line in self._of_kind("done")}
        numbered = self.workers.share([*enumerate(self.prompts)])
        left = [(number, prompt) for number, prompt in numbered if prompt.id not in done]
        if left:
            first = left[0][1]
            longest = max(prompt.ids.numel() for _, prompt in left) + self.max_new_tokens
            for engine in self.engines:
                if isinstance(engine, SelfSpecEngine):
                    engine.capture_ahead(longest)
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
                write=self.record.write,
                advance=self.advance,
                turn=number * self.repeats,
                lost={},
                sampled=self.sampled,
                score=self.score,
            )
            self.record.write({"kind": "done", "prompt": prompt.id})

    def measure_memory(self) -> None:
        """Each engine's peak memory on the longest prompt; only the first process measures it."""
        known = {line["engine"] for line in self._of_kind("memory")}
        if not self.memory or not self.workers.is_main:
            return
        longest = max(self.prompts, key=lambda prompt: prompt.ids.numel())
        for engine in self.engines:
            if engine.name not in known:
                again = partial(engine.generate_afresh, longest.ids, self.max_new_tokens)
                peak = peak_bytes(self.generator.model.device, again)
                self.record.write({"kind": "memory", "engine": engine.name, "prompt": longest.id, "peak_bytes": peak})

    def finish(self) -> list[Line]:
        """All processes' lines, in one order whatever the number of processes; in the first one's record."""
        lines = merged(self._everyones(), [prompt.id for prompt in self.prompts])
        if self.workers.is_main:
            self.record.complete(lines)
        return lines

    def _engines_for(self, prompt: EncodedPrompt) -> Sequence[LocalEngine]:
        if not self.grid:
            return self.engines
        policy = self._fixed[prompt.task]
        return [*self.engines, SelfSpecEngine(self.generator, policy, name=BEST_FIXED, label=BEST_FIXED_LABEL)]

    def _of_kind(self, kind: str) -> list[Line]:
        return [line for line in self._previous if line["kind"] == kind]

    def _everyones(self, kind: str | None = None) -> list[Line]:
        return self.workers.gather([line for line in self.record.lines if kind in (None, line["kind"])])


def resumable(previous: Sequence[Line], run: Mapping[str, Any]) -> list[Line]:
    """What of a run that broke off can be kept: all but what belongs to prompts that are not done.

    Raises ValueError when it was a run of something else.
    """
    if not previous:
        return []
    before = next((line for line in previous if line["kind"] == "run"), None)
    if before is None:
        return []
    for name in ("configuration", "engines"):
        if before[name] != run[name]:
            theirs, ours = before[name], run[name]
            changed = sorted(key for key in {*theirs, *ours} if theirs.get(key) != ours.get(key))
            raise ValueError(
                f"cannot resume: the run that broke off had another {', '.join(changed)}; give the same options, or start"
                " anew without --resume"
            )
    done = {line["prompt"] for line in previous if line["kind"] == "done"}
    return [line for line in previous if line["kind"] not in ("sample", "output") or line["prompt"] in done]


def merged(lines: Sequence[Line], prompts: Sequence[str]) -> list[Line]:
    """Lines by kind, samples and outputs by prompt, each prompt's in the order in which they were written."""
    order = {prompt: number for number, prompt in enumerate(prompts)}

    def place(line: Line) -> tuple[int, int]:
        by_prompt = line["kind"] in ("grid", "sample", "output")
        return _ORDER.index(line["kind"]), order[line["prompt"]] if by_prompt else 0

    return sorted((line for line in lines if line["kind"] != "done"), key=place)
