"""Training data -> token ids, and which of them exits learn to predict.

All of a plain text counts. Of conversations and of prompts with completions, only the answers count, and so it is with
answers that the model writes itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from layerskip_models.text_files import cut_last_line, read_lines
from layerskip_models.training.examples import Example, examples_of, in_shares
from layerskip_models.training.settings import FrozenModelSettings
from selfspec import GenerationResult, SelfSpecGenerator
from selfspec.messages import ChatTemplate, Messages, encode_messages

_AT_ONCE = 32  # answers between two writes to the file, the most that an interruption loses


@dataclass(frozen=True, slots=True)
class TrainingText:
    """Token ids of one text. scored: spans [first, end) of tokens that count. own: the model wrote those itself."""

    tokens: list[int]
    scored: list[tuple[int, int]]
    own: bool = False

    @property
    def num_scored(self) -> int:
        """Tokens that count. Nothing predicts the first token of a text."""
        return sum(end - max(first, 1) for first, end in self.scored)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextReader:
    """Makes training texts, or prompts, from examples. length: maximum tokens of a text; longer ones are cut."""

    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate
    length: int

    def texts(self, example: Example) -> list[TrainingText]:
        """Make the texts of one example, perhaps none. ValueError for a prompt without a completion."""
        if example.text is not None:
            return self._pieces(example.text)
        if example.messages is not None:
            return [self._fitting(text) for text in self._conversation(example.messages)]
        assert example.prompt is not None
        if example.completion is None:
            raise ValueError("a prompt without a completion: use --own-answers, or give each prompt a completion")
        asked = self._ids(example.prompt)
        tokens = self._ids(example.prompt + example.completion) + self._end
        first = min(_common(asked, tokens), len(tokens) - 1)
        return [self._fitting(TrainingText(tokens, [(first, len(tokens))]))]

    def prompts(self, example: Example, most: int, draw: np.random.Generator) -> list[list[int]]:
        """List what the model is to answer: each question of a conversation, a prompt, or pieces of a text that it continues.

        most: maximum tokens of a prompt. Longer prompts keep their last ones; pieces of text have at least an eighth of it.
        """
        if example.messages is not None:
            turns = [i for i, message in enumerate(example.messages) if message["role"] == "assistant"]
            if example.messages[-1]["role"] != "assistant":
                turns.append(len(example.messages))
            asked = [self._chat_ids(example.messages[:turn], ask=True) for turn in turns if turn > 0]
            return [tokens[-most:] for tokens in asked]
        start = self._start
        if example.prompt is not None:
            tokens = self._ids(example.prompt)
            return [tokens if len(tokens) <= most else (start + tokens[-max(most - len(start), 1) :])[:most]]
        assert example.text is not None
        tokens, pieces, first = self._ids(example.text)[len(start) :], [], 0
        while first < len(tokens):
            number = int(draw.integers(max(most // 8, 1), most + 1))
            pieces.append((start + tokens[first : first + number])[:most])
            first += number
        return pieces

    @property
    def _end(self) -> list[int]:
        return [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]

    @property
    def _start(self) -> list[int]:
        """The tokens that the tokenizer puts before a text."""
        ids: list[int] = []
        for token in self.tokenizer("")["input_ids"]:
            if token == self.tokenizer.eos_token_id and token != self.tokenizer.bos_token_id:
                break
            ids.append(token)
        return ids

    def _ids(self, text: str) -> list[int]:
        return self._start + self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _chat_ids(self, messages: Messages, *, ask: bool) -> list[int]:
        return encode_messages(messages, self.tokenizer, self.template, ask=ask)

    def _pieces(self, text: str) -> list[TrainingText]:
        start = self._start
        tokens = self._ids(text)[len(start) :] + self._end
        step = max(self.length - len(start), 1)
        pieces = [start + tokens[first : first + step] for first in range(0, len(tokens), step)]
        return [TrainingText(piece, [(max(len(start), 1), len(piece))]) for piece in pieces if len(piece) > 1]

    def _conversation(self, messages: Messages) -> list[TrainingText]:
        """One text with all answers, or one for each answer if the template writes earlier turns differently."""
        separate: list[TrainingText] = []
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                asked = self._chat_ids(messages[:turn], ask=True) if turn else []
                tokens = self._chat_ids(messages[: turn + 1], ask=False)
                first = _common(asked, tokens)
                end = len(tokens)
                for place in range(end - 1, first, -1):  # without what the template adds after the answer, such as "\n"
                    if tokens[place] == self.tokenizer.eos_token_id:
                        end = place + 1
                        break
                separate.append(TrainingText(tokens, [(first, end)]))
        if not separate:
            return []
        whole = separate[-1].tokens
        if all(whole[: text.scored[0][1]] == text.tokens[: text.scored[0][1]] for text in separate):
            return [TrainingText(whole, [text.scored[0] for text in separate])]
        return separate

    def _fitting(self, text: TrainingText) -> TrainingText:
        """Cut a text to at most `length` tokens: without its end, and without its beginning if no answer is near."""
        if len(text.tokens) <= self.length:
            return text
        first = text.scored[0][0]
        start = 0 if first <= self.length // 2 else first - self.length // 2
        end = start + self.length
        spans = [(max(a, start) - start, min(b, end) - start) for a, b in text.scored if a < end]
        return TrainingText(text.tokens[start:end], spans, text.own)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common beginning."""
    return next((index for index, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def texts_of(config: FrozenModelSettings, reader: TextReader, *, held_out: bool) -> Iterator[TrainingText]:
    """Read the texts of a run's data, each source giving its share of the tokens."""
    shares, examples = examples_of(config, held_out=held_out)
    texts = [(text for example in found for text in reader.texts(example)) for found in examples]
    return in_shares(texts, shares, lambda text: text.num_scored)


def prompts_of(config: FrozenModelSettings, reader: TextReader, most: int, *, held_out: bool) -> Iterator[list[int]]:
    """Read the prompts of a run's data, of at most `most` tokens, each source giving its share."""
    draw = np.random.default_rng([config.seed, held_out])
    shares, examples = examples_of(config, held_out=held_out)
    prompts = [(prompt for example in found for prompt in reader.prompts(example, most, draw)) for found in examples]
    return in_shares(prompts, shares, lambda prompt: 1)


def digest(tokens: Sequence[object]) -> str:
    """Make what tells a prompt, or a list of prompts, from any other."""
    return sha256(json.dumps(tokens).encode()).hexdigest()[:12]


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

    path: a JSON-lines file, which grows, so an interrupted run writes no answer twice. temperature: 0 is greedy; else answers
    are samples of the model's unfiltered distribution, prompt i's with seed `seed` + i. advance: called with the tokens
    written so far. Raises ValueError if the file holds answers to other prompts.
    """
    recorded, number, written = recorded_answers(path), 0, 0
    options: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        # A policy that learns would draw differently when the run is resumed.
        options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0, "policy": "ar"}

    def count(index: int, result: GenerationResult) -> None:
        nonlocal written
        written += len(result.new_tokens)
        advance(written)

    while group := list(islice(prompts, _AT_ONCE)):
        known = recorded[number : number + len(group)]
        if any(line["prompt"] != digest(prompt) for prompt, line in zip(group, known)):
            raise ValueError(f"{path} holds answers to other prompts: choose another output_dir")
        answers = [line["answer"] for line in known]
        if asked := group[len(known) :]:
            if temperature > 0:
                options["seed"] = [seed + number + place for place in range(len(known), len(group))]
            results = generator.generate_batch(
                asked,
                batch_size=batch_size,
                max_new_tokens=[min(max_tokens, generator.model.max_positions - len(prompt)) for prompt in asked],
                repetition_penalty=1.0,
                on_result=count,
                **options,
            )
            answers += [result.new_tokens for result in results]
            with path.open("a", encoding="utf-8") as stream:
                for prompt, result in zip(asked, results):
                    stream.write(json.dumps({"prompt": digest(prompt), "answer": result.new_tokens}) + "\n")
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
