"""Training data as people have it: texts, conversations, and prompts with or without completions; read, split and mixed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from layerskip_models.text_files import json_lines
from layerskip_models.training.documents import ALL, is_held_out, read_documents
from layerskip_models.training.settings import FrozenModelSettings

_FORMS = '"messages", "prompt" with "completion", "prompt" alone (for --own-answers) or "text"'


@dataclass(frozen=True, slots=True)
class Example:
    """One item of the data as it was read. Either text, or messages, or a prompt, perhaps with its completion."""

    key: str  # what decides whether it is held out
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    completion: str | None = None


def read_examples(path: Path, exclude: Sequence[str]) -> list[Example]:
    """Read the items of a .jsonl[.gz], .txt[.gz] or .py file, or a folder. Raises ValueError for others, and for none."""
    if not path.is_dir() and path.name.endswith((".jsonl", ".jsonl.gz")):
        examples = [_parse(item, place) for place, item in json_lines(path, f"an object with {_FORMS}")]
    else:
        examples = [Example(key=text, text=text) for text in read_documents(path, exclude)]
    if not examples:
        raise ValueError(f"data path holds no text: {str(path)!r} (in folders .txt, .txt.gz and .py files are read)")
    return examples


def _parse(item: dict[str, Any], where: str) -> Example:
    key = json.dumps(item, sort_keys=True)
    prompt, completion, messages = item.get("prompt"), item.get("completion"), item.get("messages")
    if messages is None and _are_messages(prompt):  # a conversation in two parts
        messages = [*prompt, *(completion if _are_messages(completion) else [])]
    if messages is not None:
        if not _are_messages(messages):
            raise ValueError(f'{where}: messages must be a list of {{"role": "user", "content": "..."}}')
        return Example(key=key, messages=messages)
    if isinstance(prompt, str):
        if completion is not None and not isinstance(completion, str):
            raise ValueError(f"{where}: completion must be text, like prompt")
        return Example(key=key, prompt=prompt, completion=completion)
    if isinstance(item.get("text"), str):
        return Example(key=key, text=item["text"])
    raise ValueError(f"{where}: expected {_FORMS}")


def _are_messages(value: object) -> TypeGuard[list[dict[str, Any]]]:
    items = value if isinstance(value, list) else []
    return bool(items) and all(
        isinstance(item, dict) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)
        for item in items
    )


def examples_of(config: FrozenModelSettings, *, held_out: bool) -> tuple[list[float], list[list[Example]]]:
    """Return the shares of a run's sources, and each one's held-out or other examples, shuffled. ValueError for none."""
    sources, fraction = config.sources(), config.holdout_fraction
    if other := config.evaluation_sources():
        sources, fraction = (other, ALL) if held_out else (sources, 0.0)
    found: list[list[Example]] = []
    for number, source in enumerate(sources):
        read = read_examples(source.path, config.exclude)
        chosen = [example for example in read if is_held_out(example.key, fraction) == held_out]
        order = np.random.default_rng([config.seed, held_out, number]).permutation(len(chosen))
        found.append([chosen[index] for index in order])
    if not any(found):
        raise ValueError(
            "no document is held out for the figures: raise holdout_fraction, or give --evaluate-on"
            if held_out
            else "every document is held out for the figures: lower holdout_fraction, or give more data"
        )
    return [source.weight for source in sources], found


def in_shares(streams: Sequence[Iterator[Any]], shares: Sequence[float], size: Callable[[Any], int]) -> Iterator[Any]:
    """Items of several streams, each giving its share of their sizes until it is used up. size: of an item."""
    given = [0.0] * len(streams)
    open_streams = set(range(len(streams)))
    while open_streams:
        index = min(open_streams, key=lambda i: (given[i] / shares[i], i))
        item = next(streams[index], None)
        if item is None:
            open_streams.discard(index)
            continue
        given[index] += size(item)
        yield item
