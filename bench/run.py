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
from bench.engines.own import Engine, Sampling, SelfSpecEngine
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How to measure. grid: replay fixed settings, and run the best one of each task. memory: measure it, once per engine.
    sampling: None for greedy decoding; the repeats of a sampled run differ in their seeds, and it has no grid."""

    max_new_tokens: int
    repeats: int
    warmups: int
    grid: bool
    memory: bool
    sampling: Sampling | None = None


class Run:
    """A measurement in progress.

    engines: the outputs of all are compared with the first one's. advance: called after each step. score: of outputs, for
    prompts with a reference.
    """

    def __init__(
        self,
        generator: SelfSpecGenerator,
        engines: Sequence[Engine],
        prompts: Sequence[EncodedPrompt],
        settings: RunSettings,
        record: RecordWriter,
        workers: Workers,
        score: Scorer | None = None,
    ) -> None:
        self._score = score
        self._generator = generator
        self._engines = list(engines)
        self._prompts = prompts
        self._settings = settings
        self._record = record
        self._workers = workers
        self.advance: Callable[[str], None] = lambda label: None
        self._previous = workers.from_main(record.lines)
        self._mine = workers.share(prompts)
        self._fixed: dict[str, str] = {}  # task -> its best fixed setting, from `replay`

    @staticmethod
    def num_steps(num_prompts: int, num_engines: int, settings: RunSettings) -> int:
        """How many times `advance` is called at most; without memory, which only the first process measures."""
        runs = num_engines + settings.grid
        return settings.grid * num_prompts + runs * (settings.warmups + num_prompts * settings.repeats)

    def costs(self) -> MeasuredCost:
        """The first process's calibration, or the resumed run's; every process uses it from now on."""
        known = self._of_kind("costs")
        mine = None
        if known:
            mine = {name: value for name, value in known[0].items() if name != "kind"}
        elif self._workers.is_main:
            mine = measured_cost(self._generator.model, self._generator.runner).as_dict()
            self._record.write({"kind": "costs", **mine})
        cost = MeasuredCost.from_dict(self._workers.from_main(mine))
        use_cost(self._generator.model, cost, self._generator.runner)
        return cost

    def limits(self) -> None:
        """Write the device's bandwidth and the bytes of the weights; only the first process does."""
        if self._workers.is_main and not self._of_kind("limits"):
            model = self._generator.model
            weights = WeightBytes.of(model)
            self._record.write(
                {
                    "kind": "limits",
                    "bytes_per_second": measure_bandwidth(model.device),
                    **weights.as_line(),
                }
            )

    def replay(self, cost: CostModel) -> None:
        """Trace this process's prompts and replay the grid on them; then add the best fixed setting of each task."""
        if not self._settings.grid:
            return
        known = {line["prompt"] for line in self._of_kind("grid")}
        for prompt in self._mine:
            if prompt.id not in known:
                trace = trace_agreement(self._generator, prompt.ids, self._settings.max_new_tokens)
                self._record.write(grid_line(prompt, trace, GRID_LENGTHS, cost))
            self.advance("tracing every layer")
        grid = {line["prompt"]: line for line in [*self._of_kind("grid"), *self._everyones("grid")]}
        self._fixed = fixed_in_hindsight([grid[prompt.id] for prompt in self._prompts], SECONDS)
        if self._workers.is_main and not self._of_kind("fixed"):
            self._record.write({"kind": "fixed", "by_task": self._fixed})

    def measure(self) -> None:
        settings = self._settings
        done = {line["prompt"] for line in self._of_kind("done")}
        numbered = self._workers.share([*enumerate(self._prompts)])
        left = [(number, prompt) for number, prompt in numbered if prompt.id not in done]
        if left:
            first = left[0][1]
            longest = max(prompt.ids.numel() for _, prompt in left) + settings.max_new_tokens
            for engine in self._engines:
                if isinstance(engine, SelfSpecEngine):
                    engine.capture_ahead(longest)
            warm_up(
                self._engines_for(first),
                first,
                max_new_tokens=settings.max_new_tokens,
                warmups=settings.warmups,
                advance=self.advance,
            )
            for engine in self._engines:
                if isinstance(engine, SelfSpecEngine):
                    engine.forget()
        for number, prompt in left:
            measure_prompt(
                self._engines_for(prompt),
                prompt,
                max_new_tokens=settings.max_new_tokens,
                repeats=settings.repeats,
                dtype=self._generator.model.weights_dtype,
                write=self._record.write,
                advance=self.advance,
                turn=number * settings.repeats,
                sampled=settings.sampling is not None,
                score=self._score,
            )
            self._record.write({"kind": "done", "prompt": prompt.id})

    def memory(self) -> None:
        """Each engine's peak memory on the longest prompt; only the first process measures it."""
        known = {line["engine"] for line in self._of_kind("memory")}
        if not self._settings.memory or not self._workers.is_main:
            return
        longest = max(self._prompts, key=lambda prompt: prompt.ids.numel())
        for engine in self._engines:
            if engine.name not in known:
                again = partial(engine.generate_afresh, longest.ids, self._settings.max_new_tokens)
                peak = peak_bytes(self._generator.model.device, again)
                self._record.write({"kind": "memory", "engine": engine.name, "prompt": longest.id, "peak_bytes": peak})

    def finish(self) -> list[Line]:
        """All processes' lines, in one order whatever the number of processes; in the first one's record."""
        lines = merged(self._everyones(), [prompt.id for prompt in self._prompts])
        if self._workers.is_main:
            self._record.complete(lines)
        return lines

    def _engines_for(self, prompt: EncodedPrompt) -> list[Engine]:
        if not self._settings.grid:
            return self._engines
        policy = self._fixed[prompt.task]
        return [*self._engines, SelfSpecEngine(self._generator, policy, name=BEST_FIXED, label=BEST_FIXED_LABEL)]

    def _of_kind(self, kind: str) -> list[Line]:
        return [line for line in self._previous if line["kind"] == kind]

    def _everyones(self, kind: str | None = None) -> list[Line]:
        return self._workers.gather([line for line in self._record.lines if kind in (None, line["kind"])])


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
