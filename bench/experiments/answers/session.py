"""A session of edits of one file, replayed: the same requests with and without earlier answers to copy from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from time import perf_counter

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase

from bench.record import Line
from selfspec import SelfSpecGenerator
from selfspec.cache.answer_store import AnswerStores
from selfspec.messages import encode_messages, has_template

PROMPTS = {
    "request": "the request alone",
    "file": "the file as it is, and the request",
}
"""What a prompt holds: nothing to copy from, or all of it."""
STORE_BYTES = 64 << 20
_WORD = re.compile(r"[a-z_]{4,}|\d+")
_WORDS = ("total", "window", "offset", "current", "layers", "budget", "limit", "cursor", "margin", "weight")


@dataclass(frozen=True, slots=True)
class Edit:
    """request: what is asked for. text: the whole file afterwards."""

    request: str
    text: str


def make_edits(text: str, count: int, seed: int = 0) -> list[Edit]:
    """So many changes of a file, one after another: a word replaced in a line, a line added, a line left out."""
    random, lines = Random(seed), text.rstrip("\n").split("\n")
    edits: list[Edit] = []
    while len(edits) < count:
        place = random.choice([index for index, line in enumerate(lines) if _WORD.search(line)])
        kind = random.choice(["replace", "replace", "add", "remove"])
        if kind == "add":
            comment = f"# {random.choice(_WORDS)} and {random.choice(_WORDS)}"
            indent = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
            lines.insert(place, indent + comment)
            request = f"Add the comment '{comment}' above line {place + 1}."
        elif kind == "remove" and lines[place].lstrip().startswith("# "):
            request = f"Remove line {place + 1}, '{lines.pop(place).strip()}'."
        else:
            old, new = random.choice(_WORD.findall(lines[place])), random.choice(_WORDS)
            if old == new:
                continue
            lines[place] = re.sub(rf"\b{old}\b", new, lines[place])
            request = f"In line {place + 1}, replace '{old}' by '{new}'."
        edits.append(Edit(request, "\n".join(lines) + "\n"))
    return edits


def prompt_text(kind: str, text: str, edits: Sequence[Edit], number: int) -> str:
    """The request for edit `number`, with what this kind of prompt holds. text: the file before all edits."""
    asked = f"{edits[number].request} Answer with the whole file."
    return asked if kind == "request" else f"{edits[number - 1].text if number else text}\n{asked}"


def prompt_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """By the model's chat template, if it has one."""
    if has_template(tokenizer):
        return encode_messages([{"role": "user", "content": text}], tokenizer)
    return [*tokenizer(f"{text}\n")["input_ids"]]


class Says(LogitsProcessor):
    """Makes the model say a given text, at the cost of its own passes. A function of the text's length alone."""

    def __init__(self, prompt_length: int, answer: Sequence[int]) -> None:
        self._prompt_length, self._answer = prompt_length, [*answer]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        place = min(input_ids.shape[1] - self._prompt_length, len(self._answer) - 1)
        return scores.index_fill(-1, torch.tensor([self._answer[place]]), float(scores.max()) + 1)


def replay(
    generator: SelfSpecGenerator,
    policy: str,
    kind: str,
    text: str,
    edits: Sequence[Edit],
    max_new_tokens: int | None,
) -> Iterator[Line]:
    """A session, each request without the store and with it, in turn; which comes first changes with every request.

    max_new_tokens: of the model's own answers. None: the answers are the edited files, which the model is made to say.
    """
    tokenizer = generator.tokenizer
    assert tokenizer is not None
    stores = AnswerStores(STORE_BYTES, generator.model.vocab_size)
    store = stores.of("session")
    for number, edit in enumerate(edits):
        prompt = prompt_ids(prompt_text(kind, text, edits, number), tokenizer)
        answer = [*tokenizer(edit.text, add_special_tokens=False)["input_ids"]]
        said: dict[bool, list[int]] = {}
        lines = []
        for with_store in (False, True) if number % 2 else (True, False):
            forced = LogitsProcessorList([Says(len(prompt), answer)]) if max_new_tokens is None else None
            start = perf_counter()
            result = generator.generate(
                prompt,
                max_new_tokens=len(answer) if max_new_tokens is None else max_new_tokens,
                do_sample=False,
                eos_token_id=[] if max_new_tokens is None else None,
                logits_processor=forced,
                policy=policy,
                copy_from=store if with_store else None,
            )
            seconds = perf_counter() - start
            said[with_store], stats = result.new_tokens, result.stats
            lines.append(
                {
                    "kind": "answer",
                    "prompt": kind,
                    "forced": max_new_tokens is None,
                    "policy": policy,
                    "edit": number,
                    "store": with_store,
                    "seconds": seconds,
                    "prefill_seconds": stats.prefill_seconds,
                    "prompt_tokens": stats.num_prompt_tokens,
                    "tokens": stats.num_new_tokens,
                    "rounds": stats.rounds,
                    "copied": stats.num_copied,
                    "copied_accepted": stats.num_copied_accepted,
                    "store_bytes": stores.num_bytes,
                }
            )
        stores.add(store, prompt, said[True])
        for line in lines:
            yield {**line, "same_text": said[True] == said[False]}
