"""Answers that the model writes itself. A file keeps them as they come, so an interrupted run writes no answer twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from layerskip_models.text_files import cut_last_line, read_lines
from selfspec import GenerationResult, SelfSpecGenerator
from selfspec.exits.training_texts import TrainingText, digest

_AT_ONCE = 32  # answers between two writes to the file, the most that an interruption loses


def own_answers(
    generator: SelfSpecGenerator,
    prompts: Iterator[list[int]],
    path: Path,
    *,
    max_tokens: int,
    temperature: float = 0.0,
    batch_size: int = 8,
    seed: int = 0,
    advance: Callable[[int], None] = lambda tokens: None,
) -> Iterator[TrainingText]:
    """Prompts with the model's answers, in their order. The answers alone are scored.

    path: a JSON-lines file, which grows. temperature: 0 is greedy; else answers are samples of the model's unfiltered
    distribution, prompt i's with seed `seed` + i. advance: called with the tokens written so far.
    Raises ValueError if the file holds answers to other prompts.
    """
    recorded = recorded_answers(path)
    written = 0

    def count(index: int, result: GenerationResult) -> None:
        nonlocal written
        written += len(result.new_tokens)
        advance(written)

    def answers_to(asked: tuple[list[int], ...], first: int) -> list[list[int]]:
        """first: the number of the first of these prompts."""
        options: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            # A policy that learns would draw differently when the run is resumed.
            options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0, "policy": "ar"}
            options["seed"] = [seed + first + index for index in range(len(asked))]
        results = generator.generate_batch(
            list(asked),
            batch_size=batch_size,
            max_new_tokens=[min(max_tokens, generator.model.max_positions - len(prompt)) for prompt in asked],
            repetition_penalty=1.0,
            on_result=count,
            **options,
        )
        with path.open("a", encoding="utf-8") as stream:
            for prompt, result in zip(asked, results):
                stream.write(json.dumps({"prompt": digest(prompt), "answer": result.new_tokens}) + "\n")
        return [result.new_tokens for result in results]

    number = 0
    while group := tuple(islice(prompts, _AT_ONCE)):
        known = recorded[number : number + len(group)]
        if any(line["prompt"] != digest(prompt) for prompt, line in zip(group, known)):
            raise ValueError(f"{path} holds answers to other prompts: choose another output_dir")
        answers = [line["answer"] for line in known]
        if missing := group[len(known) :]:
            answers += answers_to(missing, number + len(known))
        number += len(group)
        for prompt, answer in zip(group, answers):
            if answer:
                yield TrainingText([*prompt, *answer], [(len(prompt), len(prompt) + len(answer))], own=True)


def recorded_answers(path: Path) -> list[dict[str, Any]]:
    """Read the answers written before. A line that a kill cut short is removed from the file."""
    if not path.exists():
        return []
    cut_last_line(path)
    return [json.loads(line) for line in read_lines(path)]
