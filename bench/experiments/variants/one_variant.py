"""What one variant of the kernels does, measured in a process of its own: `python -m bench.experiments.variants.one_variant`.

The variant is that of SELFSPEC_NATIVE. A process that has asked for tiles may clock lower, so variants do not share one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch

from bench.commands.preparation import open_model
from bench.engines.own import GREEDY
from bench.machine.throughput import SelfSpecBatch
from bench.record import Line
from layerskip_models.kernels.library import kernels
from layerskip_models.linear import LAYOUTS, Layout, Linear
from layerskip_models.row_rounding import Arithmetic, with_rounding
from selfspec import SelfSpecGenerator

OUT, IN = 2816, 1024
ROWS = (1, 2, 4, 8, 16, 32, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """How weights are kept and what they meet.

    layout: of single matrices. drawn: what these are made of. dtype, arithmetic: a model is loaded in (`load_model`).
    """

    layout: Layout
    drawn: torch.dtype = torch.float32
    dtype: str
    arithmetic: Arithmetic = "float32"

    def matrix(self, weight: torch.Tensor) -> Linear:
        """One that is kept so. weight: [out, in]."""
        linear = LAYOUTS[self.layout](weight.to(self.drawn), None)
        return with_rounding(linear, "the matrix") if self.arithmetic == "bfloat16" else linear


WEIGHTS = {
    "bfloat16": Weights(layout="native", drawn=torch.bfloat16, dtype="bfloat16"),
    "bfloat16-rows": Weights(layout="native", drawn=torch.bfloat16, dtype="bfloat16", arithmetic="bfloat16"),
    "int8": Weights(layout="int8", dtype="int8"),
    "int4": Weights(layout="int4", dtype="int4"),
}
PROMPTS = (128, 512)
TEXTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to measure.

    model: a checkpoint, perhaps synthetic; None for products alone. seconds: of each measurement. matrices: multiplied in
    turn, so that none is found in a cache.
    """

    model: str | None
    weights: tuple[str, ...]
    rows: tuple[int, ...]
    prompts: tuple[int, ...]
    texts: int
    max_new_tokens: int
    seconds: float
    matrices: int = 40


def timed(call: Callable[[], object], seconds: float) -> float:
    """Median seconds of a call, at least three times."""
    call()
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < seconds:
        start = perf_counter()
        call()
        taken.append(perf_counter() - start)
    return median(taken)


def products(job: Job) -> Iterator[Line]:
    """A product of rows with one matrix: seconds, and the bytes of its weights."""
    for name in job.weights:
        draw = torch.Generator().manual_seed(0)
        matrices = [WEIGHTS[name].matrix(torch.randn(OUT, IN, generator=draw)) for _ in range(job.matrices)]
        for rows in job.rows:
            x = torch.randn(rows, IN, generator=draw)
            seconds = timed(partial(_in_turn, matrices, x), job.seconds) / len(matrices)
            yield {
                "kind": "product", "weights": name, "rows": rows, "seconds": seconds, "bytes": matrices[0].num_bytes,
            }  # fmt: skip


def _in_turn(matrices: Sequence[Linear], x: torch.Tensor) -> None:
    for matrix in matrices:
        matrix(x)


def whole_model(job: Job, checkpoint: str) -> Iterator[Line]:
    """One text, prompts, and several texts at once; tokens per second."""
    for name in job.weights:
        kept = WEIGHTS[name]
        generator = SelfSpecGenerator(open_model(checkpoint, kept.dtype, "cpu", kept.arithmetic), prefix_cache=0)
        draw = torch.Generator().manual_seed(0)
        prompts = [
            torch.randint(5, generator.model.vocab_size, (max(*job.prompts, 170),), generator=draw)
            for _ in range(max(job.texts, 1))
        ]
        line = {"kind": "model", "weights": name}
        for length in job.prompts:
            prompt = prompts[0][:length]
            seconds = timed(partial(_generate, generator, prompt, 1, "ar"), job.seconds)
            yield {**line, "what": f"prompt of {length}", "tokens_per_second": length / seconds}
        for policy in ("ar", "auto"):
            speeds: list[float] = []
            start = perf_counter()
            _generate(generator, prompts[0][:64], job.max_new_tokens, policy)
            while len(speeds) < 3 or perf_counter() - start < 3 * job.seconds:
                speeds.append(_generate(generator, prompts[0][:64], job.max_new_tokens, policy))
            yield {**line, "what": f"one text, {policy}", "tokens_per_second": median(speeds)}
        engine = SelfSpecBatch(generator, "ar", "selfspec, plain")
        run = engine.run([prompt[:170] for prompt in prompts[: job.texts]], job.max_new_tokens)
        whole = sum(map(len, run.tokens)) / run.seconds
        if run.decode_tokens and run.decode_seconds:  # else the first text ended before the last prompt was read
            yield {**line, "what": "texts together", "tokens_per_second": run.decode_tokens / run.decode_seconds}
        yield {**line, "what": "texts together, with their prompts", "tokens_per_second": whole}


def _generate(generator: SelfSpecGenerator, prompt: torch.Tensor, max_new_tokens: int, policy: str) -> float:
    """Tokens per second after the first one."""
    stats = generator.generate(prompt, max_new_tokens=max_new_tokens, policy=policy, **GREEDY).stats
    return (stats.num_new_tokens - 1) / (stats.seconds - stats.time_to_first_token)


def main(arguments: Sequence[str]) -> None:
    """arguments: a Job as JSON. Prints a line for each measurement."""
    found: dict[str, Any] = json.loads(arguments[0])
    lists: dict[str, Any] = {name: tuple(value) for name, value in found.items() if isinstance(value, list)}
    job = Job(**{**found, **lists})
    chosen = kernels()
    assert chosen is not None
    for line in products(job):
        print(json.dumps({"variant": chosen.variant, **line}), flush=True)
    if job.model is not None:
        for line in whole_model(job, job.model):
            print(json.dumps({"variant": chosen.variant, **line}), flush=True)


def as_argument(job: Job) -> str:
    """As `main` reads it."""
    return json.dumps(asdict(job))


if __name__ == "__main__":
    main(sys.argv[1:])
