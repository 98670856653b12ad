"""Prompts to measure with: the ones that ship with the package, or a file; in a fixed order, with a digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerskip_models.text_files import json_lines
from selfspec.messages import encode_messages

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

SHIPPED_PROMPTS = Path(__file__).parent / "prompts"
"""Prompts written for this project: code, maths word problems, English prose and summaries, German to English, `BY_NAME`."""
COPYING = "copying"
BY_NAME = ("chat", COPYING)
"""Shipped prompts that are used only where they are named: messages to a chat model, and prompts whose answers copy, which
say nothing of other text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A text that the model goes on with."""

    id: str
    task: str
    prompt: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedPrompt:
    """A prompt as token ids, int64 [n] on the CPU. answer_tokens: of its answer, None for as many as a run asks for."""

    id: str
    task: str
    ids: Tensor
    answer_tokens: int | None = None


def shipped_names() -> list[str]:
    """List the files of prompts that ship with the package, without their ending."""
    return sorted(file.stem for file in SHIPPED_PROMPTS.glob("*.jsonl"))


def load_prompts(path: Path | None = None) -> list[Prompt]:
    """Return the prompts of a .jsonl or .jsonl.gz file in its order; None takes the shipped ones, all but `BY_NAME`.

    A path that is no file may be the name of a shipped file without its ending, such as "copying". A line is an object with
    "id" (of its own), "task" and "prompt" (text that ends where the model goes on). Other fields are ignored.
    Raises ValueError that names file and line for anything else; OSError if the file cannot be read.
    """
    if path is None:
        return [prompt for name in shipped_names() if name not in BY_NAME for prompt in load_prompts(Path(name))]
    if str(path) in shipped_names() and not path.is_file():
        path = SHIPPED_PROMPTS / f"{path}.jsonl"
    prompts = [_prompt_of(fields, place) for place, fields in json_lines(path)]
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    if len({prompt.id for prompt in prompts}) < len(prompts):
        raise ValueError(f"{path}: ids must differ from line to line")
    return prompts


def _prompt_of(fields: dict[str, Any], place: str) -> Prompt:
    for name in ("id", "task", "prompt"):
        if not isinstance(fields.get(name), str) or not fields[name]:
            raise ValueError(f'{place}: "{name}" must be a string that is not empty, got {fields.get(name)!r}')
    return Prompt(id=fields["id"], task=fields["task"], prompt=fields["prompt"])


def select_prompts(prompts: Sequence[Prompt], num_samples: int) -> list[Prompt]:
    """Select at most `num_samples` prompts, taking one of each task in turn, so that a few cover all tasks."""
    turns = zip_longest(*group_by_task(prompts).values())
    return [prompt for turn in turns for prompt in turn if prompt is not None][:num_samples]


def group_by_task(prompts: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    """Each task's prompts, tasks and prompts in the order in which they come."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.task, []).append(prompt)
    return groups


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> list[EncodedPrompt]:
    """Return the token ids of each prompt, with the tokenizer's special tokens; of a longer prompt its last `max_tokens`."""
    import torch

    encoded = []
    for prompt in prompts:
        ids = torch.tensor(tokenizer(prompt.prompt, verbose=False)["input_ids"], dtype=torch.long)
        encoded.append(EncodedPrompt(id=prompt.id, task=prompt.task, ids=ids[-max_tokens:]))
    return encoded


def chat_prompts(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, max_tokens: int, num_samples: int
) -> list[EncodedPrompt]:
    """Encode users' messages by the chat template, tasks in turn, none too long. Raises ValueError if there is none."""
    import torch

    found = {prompt: encode_messages([{"role": "user", "content": prompt.prompt}], tokenizer) for prompt in prompts}
    fitting = [prompt for prompt, ids in found.items() if len(ids) <= max_tokens]
    if not fitting:
        raise ValueError(f"no prompt has at most {max_tokens} tokens with the chat template")
    chosen = select_prompts(fitting, num_samples)
    return [EncodedPrompt(id=one.id, task=one.task, ids=torch.tensor(found[one], dtype=torch.long)) for one in chosen]


def digest(prompts: Sequence[EncodedPrompt]) -> str:
    """12 hexadecimal digits that tell one set of encoded prompts (and their order) from another."""
    summary = hashlib.sha256()
    for prompt in prompts:
        summary.update(json.dumps([prompt.id, prompt.ids.tolist()]).encode())
    return summary.hexdigest()[:12]
