"""Many texts at once: throughput of engines that continue them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from torch import Tensor

from bench.engines.own import GREEDY, HasLabel
from bench.record import Line
from selfspec import SelfSpecGenerator


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRun:
    """One batch. tokens: the new ones of each text. seconds: from the call to the last of them.

    decode_tokens, decode_seconds: while all texts were past their prompts and none was complete; None where that is not seen.
    prompt_seconds: from the call until every text has its first token; None where that is not seen.
    """

    tokens: list[list[int]]
    seconds: float
    decode_tokens: int | None = None
    decode_seconds: float | None = None
    prompt_seconds: float | None = None


def after_prompts(tokens: list[list[int]], seconds: float, prompt_seconds: float) -> BatchRun:
    """Describe a batch whose texts all have their first token after `prompt_seconds` of `seconds`, and end together."""
    return BatchRun(
        tokens=tokens,
        seconds=seconds,
        decode_tokens=sum(len(text) - 1 for text in tokens),
        decode_seconds=seconds - prompt_seconds,
        prompt_seconds=prompt_seconds,
    )


class BatchEngine(HasLabel, Protocol):
    """Continues texts together, greedily and without EOS. weights: what they are rounded to, which makes another model; else
    None."""

    weights: str | None

    def run(self, prompts: Sequence[Tensor], max_new_tokens: int) -> BatchRun:
        """prompts: int64 [n] each."""
        ...


class SelfSpecBatch:
    """selfspec with one policy, which keeps what it learns. weights: what they are rounded to, if they are."""

    def __init__(self, generator: SelfSpecGenerator, policy: str, label: str, weights: str | None = None) -> None:
        self.name, self.label = f"selfspec{'' if weights is None else f':{weights}'}:{policy}", label
        self.weights = weights
        self._generator, self._policy = generator, policy

    def run(self, prompts: Sequence[Tensor], max_new_tokens: int) -> BatchRun:
        options = {**GREEDY, "max_new_tokens": max_new_tokens, "policy": self._policy}
        start = perf_counter()
        with self._generator.engine() as engine:
            places = {engine.add(prompt, **options): place for place, prompt in enumerate(prompts)}
            tokens: list[list[int]] = [[] for _ in prompts]
            began = ended = None
            counted = 0
            while len(engine):
                for progress in engine.step():
                    if progress.error is not None:
                        raise progress.error
                    tokens[places[progress.ticket]] += progress.tokens
                    counted += len(progress.tokens) if began is not None and ended is None else 0
                if began is None and all(tokens):
                    began = perf_counter()
                if ended is None and len(engine) < len(prompts):
                    ended = perf_counter()
        seconds = perf_counter() - start
        assert began is not None
        assert ended is not None
        return BatchRun(
            tokens=tokens,
            seconds=seconds,
            decode_tokens=counted,
            decode_seconds=ended - began,
            prompt_seconds=began - start,
        )


def measure_batch(engine: BatchEngine, prompts: Sequence[Tensor], max_new_tokens: int) -> tuple[Line, BatchRun]:
    """One batch as a line of the record, and its texts."""
    run = engine.run(prompts, max_new_tokens)
    line = {
        "kind": "batch",
        "engine": engine.name,
        "texts": len(prompts),
        "tokens": sum(map(len, run.tokens)),
        "seconds": run.seconds,
        "decode_tokens": run.decode_tokens,
        "decode_seconds": run.decode_seconds,
    }
    return line, run
