"""Timing engines against each other: warm-up, then engines alternated within every prompt and repeat; outputs compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from bench.datasets import EncodedPrompt
from bench.engines.own import EngineLostError, TimedEngine
from bench.record import Line, Record
from selfspec.analysis.comparison import NEAR_TIE_LOGIT_GAPS, first_difference

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_turn(items: Sequence[Item], turn: int) -> list[Item]:
    """Return all of them, beginning with another one each turn, so that slow drift of the machine meets all alike."""
    first = turn % len(items)
    return [*items[first:], *items[:first]]


def output_digest(output: Sequence[Any]) -> str:
    """Return what tells one output, tokens or texts, from another in a record."""
    return hashlib.sha256(json.dumps(output).encode()).hexdigest()[:12]


class Survivors:
    """Calls engines, and leaves those out that are lost. The first one must stay: the others are compared with it."""

    def __init__(self, first: TimedEngine, record: Record) -> None:
        self._first, self._record = first, record
        self.lost: set[str] = set()

    def call(self, engine: TimedEngine, call: Callable[[], Result]) -> Result | None:
        """Return what a call of an engine gives, None if it is lost, which the record says. Losing the first raises."""
        if engine.name in self.lost:
            return None
        try:
            return call()
        except EngineLostError as error:
            if engine is self._first:
                raise
            self.lost.add(engine.name)
            self._record.write("lost", engine=engine.name, label=engine.label, reason=str(error))
            return None


@dataclass(kw_only=True)
class Measurement:
    """Engines on prompts. What the record holds already is not measured again.

    engines: outputs are compared with those of the first one, or of the first with the same weights. record: its
    first line says how many tokens, repeats and warm-ups there are, and whether runs sample. Then every repeat draws with
    another seed, and outputs are not compared.
    advance: called with an engine's label after each of its runs (`num_runs` of them).
    """

    engines: Sequence[TimedEngine]
    prompts: Sequence[EncodedPrompt]
    record: Record
    advance: Callable[[str], object] = lambda label: None

    def __post_init__(self) -> None:
        asked = self.record.lines[0]["configuration"]
        most, self.repeats, self.warmups = asked["max_new_tokens"], asked["repeats"], asked["warmups"]
        self.sampled = asked.get("do_sample", False)
        self.lengths = {prompt.id: min(prompt.answer_tokens or most, most) for prompt in self.prompts}
        self.num_runs = len(self.engines) * (self.warmups + len(self.prompts) * self.repeats)

    def run(self) -> None:
        """Warm every engine up on the first prompt, then time and compare all on each, without those that are lost."""
        names = [engine.name for engine in self.engines]
        if all(self.record.find("output", engine=name, prompt=one.id) for name in names for one in self.prompts):
            return
        first = self.prompts[0]
        survivors = Survivors(self.engines[0], self.record)
        for engine in self.engines:
            for _ in range(self.warmups):
                survivors.call(engine, partial(engine.generate, first.ids, self.lengths[first.id]))
                self.advance(engine.label)
            if engine.warmed_up:
                survivors.call(engine, engine.forget)
        for number, prompt in enumerate(self.prompts):
            self._measure(prompt, survivors, turn=number * self.repeats)

    def _measure(self, prompt: EncodedPrompt, survivors: Survivors, turn: int) -> None:
        """Time the engines on one prompt and compare their outputs. turn: says with which engine it begins."""
        outputs: dict[str, list[list[int]]] = {engine.name: [] for engine in self.engines}
        for repeat in range(self.repeats):
            for engine in in_turn(self.engines, turn + repeat):
                key = {"engine": engine.name, "prompt": prompt.id, "repeat": repeat}
                if engine.warmed_up and repeat == 0 and self.record.find("sample", **key):
                    survivors.call(
                        engine, partial(engine.generate, prompt.ids, self.lengths[prompt.id])
                    )  # learns again
                sample = partial(self.record.once, "sample", partial(self._sample, engine, prompt, repeat), **key)
                line = survivors.call(engine, sample)
                if line is not None:
                    outputs[engine.name].append(line["token_ids"])
                self.advance(engine.label)
        for engine in self.engines:
            compare = partial(self._compare, engine, prompt, outputs, survivors)
            write = partial(self.record.once, "output", compare, engine=engine.name, prompt=prompt.id)
            survivors.call(engine, write)

    def _sample(self, engine: TimedEngine, prompt: EncodedPrompt, repeat: int) -> Line:
        """Time one run. Raises RuntimeError if it returns another number of tokens than it was asked for."""
        length = self.lengths[prompt.id]
        generation = engine.generate(prompt.ids, length, repeat)
        if len(generation.tokens) != length:
            raise RuntimeError(f"{engine.label} returned {len(generation.tokens)} tokens for {prompt.id}, not {length}")
        return {
            "task": prompt.task,
            "num_prompt_tokens": prompt.ids.numel(),
            "num_new_tokens": length,
            "seconds": generation.seconds,
            "time_to_first_token": generation.time_to_first_token,
            "decode_seconds": generation.decode_seconds,
            "token_ids": list(generation.tokens),
            "stats": None if generation.stats is None else dict(generation.stats),
        }

    def _compare(
        self, engine: TimedEngine, prompt: EncodedPrompt, outputs: Mapping[str, list[list[int]]], survivors: Survivors
    ) -> Line:
        own = outputs[engine.name]
        found: dict[str, Any] = {
            "output": output_digest(own[0]),
            "repeats_that_differ": None if self.sampled else sum(tokens != own[0] for tokens in own),
            "reference": None, "first_difference": None, "reference_logit_gap": None, "near_tie": None,
        }  # fmt: skip
        engines = [one for one in self.engines if outputs[one.name]]
        while not self.sampled:
            reference = reference_of(engine, [one for one in engines if one.name not in survivors.lost])
            dtype = engine.arithmetic or self.engines[0].arithmetic
            dtype = dtype if engine.weights == reference.weights else None
            comparing = partial(compare_outputs, prompt.ids, outputs[reference.name][0], own[0], reference, dtype)
            difference = survivors.call(reference, comparing)
            if difference is not None:
                return {**found, "reference": reference.name, **difference}
        return found


def reference_of(engine: TimedEngine, engines: Sequence[TimedEngine]) -> TimedEngine:
    """Return the engine to compare outputs with: the first with the same weights; for that one, the first of all."""
    first = next((other for other in engines if other.weights == engine.weights), engine)
    return engines[0] if first is engine else first


def compare_outputs(
    prompt: Tensor, reference: Sequence[int], tokens: Sequence[int], engine: TimedEngine, dtype: torch.dtype | None
) -> Line:
    """Find the first difference between two continuations of a prompt, and the gap between the top two logits there.

    engine: made `reference`, and is asked for its logits. What follows a first difference has another prefix, so it is not
    compared. dtype: whose near-ties count as such; None for outputs of other weights, which are not judged.
    """
    position = first_difference(list(reference), list(tokens))
    if position is None:
        return {}
    prefix = torch.cat([prompt, torch.tensor(reference[:position], dtype=torch.long)])
    top = engine.next_logits(prefix).topk(2).values
    gap = float(top[0] - top[1])
    near_tie = None if dtype is None else gap <= NEAR_TIE_LOGIT_GAPS[dtype]
    return {"first_difference": position, "reference_logit_gap": gap, "near_tie": near_tie}
