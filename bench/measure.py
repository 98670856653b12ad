"""Timing engines against each other: warm-up, then engines alternated within every prompt and repeat; outputs compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from bench.datasets import EncodedPrompt
from bench.engines.own import EngineLostError, HasLabel, TimedEngine
from bench.record import Line, RecordWriter
from selfspec.analysis.comparison import NEAR_TIE_LOGIT_GAPS, first_difference

Item = TypeVar("Item")
Result = TypeVar("Result")
Score = Callable[[EncodedPrompt, Sequence[int]], Mapping[str, float] | None]
"""What tokens that continue a prompt score, by metric; None where they cannot be scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where an engine's tokens first leave the reference's. gap: between the reference's top two logits there.

    near_tie: whether that gap excuses it; None where the two have other weights.
    """

    position: int
    gap: float
    near_tie: bool | None


def measure(
    engines: Sequence[TimedEngine],
    prompts: Sequence[EncodedPrompt],
    *,
    max_new_tokens: int,
    repeats: int,
    warmups: int,
    dtype: torch.dtype,
    record: RecordWriter,
    advance: Callable[[str], None] = lambda label: None,
) -> dict[str, str]:
    """Warm every engine up on the first prompt, then `measure_prompt` each.

    advance: called with the engine's label after each run (`num_runs` of them).
    Returns the engines that were lost on the way, by name, with the reason. The others were measured to the end. Raises
    EngineLostError if the first one is lost, with which all are compared.
    """
    lost: dict[str, str] = {}
    warm_up(engines, prompts[0], max_new_tokens=max_new_tokens, warmups=warmups, advance=advance, lost=lost)
    for number, prompt in enumerate(prompts):
        measure_prompt(
            engines,
            prompt,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            dtype=dtype,
            record=record,
            advance=advance,
            turn=number * repeats,
            lost=lost,
        )
    return lost


def in_turn(items: Sequence[Item], turn: int) -> list[Item]:
    """All of them, beginning with another one each turn, so that slow drift of the machine meets all alike."""
    first = turn % len(items)
    return [*items[first:], *items[:first]]


def tried(
    engine: HasLabel, engines: Sequence[HasLabel], lost: dict[str, str], call: Callable[[], Result]
) -> Result | None:
    """Return what a call of an engine gives; None if the engine was lost before or is lost now, which `lost` then says.

    Raises EngineLostError for the first engine.
    """
    if engine.name in lost:
        return None
    try:
        return call()
    except EngineLostError as error:
        if engine is engines[0]:
            raise
        lost[engine.name] = str(error)
        return None


def until_end(prompt: EncodedPrompt, engine: TimedEngine, max_new_tokens: int, ends: Collection[int]) -> EncodedPrompt:
    """Give the prompt the length of an engine's answer, which one of `ends` ends; at least 2: decoding takes time."""
    tokens = engine.generate(prompt.ids, max_new_tokens).tokens
    size = next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))
    return replace(prompt, answer_tokens=max(size, 2))


def warm_up(
    engines: Sequence[TimedEngine],
    prompt: EncodedPrompt,
    *,
    max_new_tokens: int,
    warmups: int,
    advance: Callable[[str], None],
    lost: dict[str, str],
) -> None:
    """Run every engine at full length, the path that is timed. lost: as in `measure_prompt`."""
    for engine in engines:
        for _ in range(warmups):
            tried(engine, engines, lost, partial(engine.generate, prompt.ids, prompt.new_tokens(max_new_tokens)))
            advance(engine.label)


def measure_prompt(
    engines: Sequence[TimedEngine],
    prompt: EncodedPrompt,
    *,
    max_new_tokens: int,
    repeats: int,
    dtype: torch.dtype,
    record: RecordWriter,
    advance: Callable[[str], None],
    turn: int,
    lost: dict[str, str],
    sampled: bool = False,
    score: Score | None = None,
) -> None:
    """Time every engine on one prompt, `repeats` times, and compare their outputs (`reference_of` says with which).

    sampled: every repeat draws with another seed, and outputs are not compared. score: of a run's tokens, for its sample.
    lost: engines to leave out, with the reason; those that are lost here are added. turn: number of the first repeat, which
    says with which engine it begins.

    record: gets a "sample" for each timed run and an "output" for each engine. What it began with is not measured again.
    Raises RuntimeError if an engine does not return exactly as many tokens as it was asked for: `max_new_tokens`, or fewer
    where the prompt's answer is shorter.
    """
    max_new_tokens = prompt.new_tokens(max_new_tokens)
    outputs: dict[str, list[int]] = {}
    changed: dict[str, int] = {engine.name: 0 for engine in engines}
    for repeat in range(repeats):
        for engine in in_turn(engines, turn + repeat):
            line = record.earlier("sample", engine=engine.name, prompt=prompt.id, repeat=repeat)
            if line is None:
                line = tried(engine, engines, lost, partial(_sample, engine, prompt, repeat, max_new_tokens, score))
                if line is not None:
                    record.write(line)
            if line is not None:
                changed[engine.name] += line["token_ids"] != outputs.setdefault(engine.name, line["token_ids"])
            advance(engine.label)
    for engine in engines:
        if record.earlier("output", engine=engine.name, prompt=prompt.id) is not None:
            continue
        counted = tried(engine, engines, lost, partial(engine.count, prompt.ids, max_new_tokens))
        if engine.name in lost:
            continue
        reference, difference = None, None
        while not sampled and reference is None:
            reference = reference_of(engine, [other for other in engines if other.name not in lost])
            judged = (engine.arithmetic or dtype) if engine.weights == reference.weights else None
            texts = outputs[reference.name], outputs[engine.name]
            comparing = partial(compare_outputs, prompt.ids, *texts, reference, judged)
            difference = tried(reference, engines, lost, comparing)
            if reference.name in lost:  # just now: another one is asked
                reference = None
        record.write(
            {
                "kind": "output",
                "engine": engine.name,
                "prompt": prompt.id,
                "output": _digest(outputs[engine.name]),
                "repeats_that_differ": None if sampled else changed[engine.name],
                "reference": None if reference is None else reference.name,
                "first_difference": None if difference is None else difference.position,
                "reference_logit_gap": None if difference is None else difference.gap,
                "near_tie": None if difference is None else difference.near_tie,
                "counted": counted,
            }
        )


def num_runs(num_engines: int, num_prompts: int, *, repeats: int, warmups: int) -> int:
    """How many times `measure` calls `advance`."""
    return num_engines * (warmups + num_prompts * repeats)


def reference_of(engine: TimedEngine, engines: Sequence[TimedEngine]) -> TimedEngine:
    """Return the engine to compare outputs with: the first with the same weights; for that one, the first of all."""
    first = next(other for other in engines if other.weights == engine.weights)
    return engines[0] if first is engine else first


def compare_outputs(
    prompt: Tensor, reference: Sequence[int], tokens: Sequence[int], engine: TimedEngine, dtype: torch.dtype | None
) -> Difference | None:
    """Find the first difference between two continuations of a prompt, or None.

    engine: made `reference`, and is asked for its logits there. What follows a first difference has another prefix, so
    it is not compared. dtype: whose near-ties count as such; None for outputs of other weights, which are not judged.
    """
    position = first_difference(list(reference), list(tokens))
    if position is None:
        return None
    prefix = torch.cat([prompt, torch.tensor(reference[:position], dtype=torch.long)])
    top = engine.next_logits(prefix).topk(2).values
    gap = float(top[0] - top[1])
    return Difference(position=position, gap=gap, near_tie=None if dtype is None else gap <= NEAR_TIE_LOGIT_GAPS[dtype])


def _sample(engine: TimedEngine, prompt: EncodedPrompt, repeat: int, max_new_tokens: int, score: Score | None) -> Line:
    """Time one run. Returns its line."""
    generation = engine.generate(prompt.ids, max_new_tokens, repeat)
    tokens = list(generation.tokens)
    if len(tokens) != max_new_tokens:
        raise RuntimeError(f"{engine.label} returned {len(tokens)} tokens for {prompt.id}, not {max_new_tokens}")
    scores = None if score is None else score(prompt, tokens)
    return {
        "kind": "sample",
        "engine": engine.name,
        "prompt": prompt.id,
        "task": prompt.task,
        "repeat": repeat,
        "num_prompt_tokens": prompt.ids.numel(),
        "num_new_tokens": len(tokens),
        "seconds": generation.seconds,
        "time_to_first_token": generation.time_to_first_token,
        "decode_seconds": generation.decode_seconds,
        "scores": None if scores is None else dict(scores),
        "token_ids": tokens,
        "stats": None if generation.stats is None else dict(generation.stats),
    }


def _digest(tokens: Sequence[int]) -> str:
    """Return what tells one output from another in a record."""
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:12]
