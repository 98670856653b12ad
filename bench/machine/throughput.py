"""Many texts at once: throughput of selfspec and of transformers' batched `generate`, and what a joining prompt delays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from bench.engines.own import GREEDY, HasLabel
from bench.engines.peers import transformers_sequences
from bench.record import Line
from selfspec import SelfSpecGenerator
from selfspec.engine.calibrate import synchronize


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
    """A batch whose texts all have their first token after `prompt_seconds` of `seconds`, and end together."""
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


class TransformersBatch:
    """transformers' own greedy `generate`, the shorter prompts padded on the left."""

    name, label = "transformers:generate", "transformers generate"
    weights: str | None = None

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def run(self, prompts: Sequence[Tensor], max_new_tokens: int) -> BatchRun:
        device = self._model.device
        start = perf_counter()
        ids = pad_sequence([*prompts], batch_first=True, padding_side="left").to(device)
        mask = pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True, padding_side="left")
        sequences = transformers_sequences(
            self._model, ids, max_new_tokens, {"pad_token_id": 0}, attention_mask=mask.to(device)
        )
        synchronize(device)
        return BatchRun(tokens=sequences[:, ids.shape[1] :].tolist(), seconds=perf_counter() - start)


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


def measure_joining(
    generator: SelfSpecGenerator, prompts: Sequence[Tensor], long_prompt: Tensor, policy: str, max_new_tokens: int
) -> Line:
    """How long the tokens of decoding texts wait while a long prompt joins.

    Seconds between two steps that bring tokens: the median and the longest before the prompt joins, and while it is read.
    """
    options = {**GREEDY, "max_new_tokens": max_new_tokens, "policy": policy}
    gaps: dict[str, list[float]] = {"before": [], "reading": []}
    with generator.engine() as engine:
        decoding = {engine.add(prompt, **options) for prompt in prompts}
        started: set[int] = set()
        while started != decoding:
            started |= {progress.ticket for progress in engine.step()}
        joined = None
        last = perf_counter()
        while joined is None or joined not in started:
            brought = {progress.ticket for progress in engine.step()}
            now = perf_counter()
            if not decoding <= brought:
                raise RuntimeError("a text got no token in a step: give more new tokens")
            gaps["before" if joined is None else "reading"].append(now - last)
            last, started = now, started | brought
            if joined is None and len(gaps["before"]) == 8:
                joined = engine.add(long_prompt, **{**options, "max_new_tokens": 2})
                last = perf_counter()
    return {
        "kind": "joining",
        "engine": f"selfspec:{policy}",
        "texts": len(prompts),
        "prompt_tokens": long_prompt.numel(),
        "steps": len(gaps["reading"]),
        **{f"{when}_median": median(values) for when, values in gaps.items()},
        **{f"{when}_longest": max(values) for when, values in gaps.items()},
    }
