"""Answers that the model writes itself. A file keeps them as they come, so an interrupted run writes none twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

from layerskip_models.text_files import cut_last_line, read_lines
from selfspec import GenerationResult, SelfSpecGenerator
from selfspec.exits.training_texts import TrainingText

_AT_ONCE = 32  # answers between two writes to the file, the most that an interruption loses


class OwnAnswers:
    """The model's answers to prompts, in their order.

    path: a JSON-lines file, which grows. temperature: 0 is greedy; else answers are samples of the model's unfiltered
    distribution, prompt i's with seed `seed` + i.
    """

    def __init__(
        self,
        generator: SelfSpecGenerator,
        path: Path,
        *,
        most_tokens: int,
        temperature: float = 0.0,
        batch_size: int = 8,
        seed: int = 0,
    ) -> None:
        self._generator, self._path = generator, path
        self._most, self._temperature = most_tokens, temperature
        self._batch_size, self._seed = batch_size, seed
        self._written = 0

    def texts(
        self, prompts: Iterator[list[int]], advance: Callable[[int], None] = lambda tokens: None
    ) -> Iterator[TrainingText]:
        """Prompts with their answers, which alone are scored. advance: called with the tokens written so far.

        Raises ValueError if the file holds answers to other prompts.
        """
        recorded = self._read()
        number = 0
        while group := tuple(islice(prompts, _AT_ONCE)):
            answers: list[list[int]] = []
            for prompt in group:
                if number + len(answers) < len(recorded):
                    line = recorded[number + len(answers)]
                    if line["prompt"] != _digest(prompt):
                        raise ValueError(f"{self._path} holds answers to other prompts: choose another output_dir")
                    answers.append(line["answer"])
            answers += self._answer(group[len(answers) :], number + len(answers), advance)
            number += len(group)
            for prompt, answer in zip(group, answers):
                if answer:
                    yield TrainingText([*prompt, *answer], [(len(prompt), len(prompt) + len(answer))], own=True)

    def _answer(self, prompts: tuple[list[int], ...], first: int, advance: Callable[[int], None]) -> list[list[int]]:
        if not prompts:
            return []
        model = self._generator.model
        options: dict[str, Any] = {"do_sample": False}
        if self._temperature > 0:
            seeds = [self._seed + first + index for index in range(len(prompts))]
            # A policy that learns would draw differently when the run is resumed.
            options = {"do_sample": True, "temperature": self._temperature, "top_k": 0, "top_p": 1.0, "seed": seeds}
            options["policy"] = "ar"

        def count(index: int, result: GenerationResult) -> None:
            self._written += len(result.new_tokens)
            advance(self._written)

        results = self._generator.generate_batch(
            list(prompts),
            batch_size=self._batch_size,
            max_new_tokens=[min(self._most, model.max_positions - len(prompt)) for prompt in prompts],
            repetition_penalty=1.0,
            on_result=count,
            **options,
        )
        answers = [result.new_tokens for result in results]
        with self._path.open("a", encoding="utf-8") as stream:
            for prompt, answer in zip(prompts, answers):
                stream.write(json.dumps({"prompt": _digest(prompt), "answer": answer}) + "\n")
        return answers

    def _read(self) -> list[dict[str, Any]]:
        """The answers written before. A line that a kill cut short is removed from the file."""
        if not self._path.exists():
            return []
        cut_last_line(self._path)
        return [json.loads(line) for line in read_lines(self._path)]


def _digest(prompt: list[int]) -> str:
    return sha256(json.dumps(prompt).encode()).hexdigest()[:12]
