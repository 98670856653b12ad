"""Answers with the rows that verification left of them, kept in files: an interrupted study writes no answer twice."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from layerskip_models.exits.lean import LeanAdapter
from layerskip_models.training.saving import write_tensors
from selfspec import SelfSpecGenerator
from selfspec.engine.online_exits import OnlineExits, RowRing, TextRows

_FEW_BYTES = 1 << 20  # for the rings, which stay empty


@dataclass(frozen=True, slots=True, eq=False)
class AnswerRows:
    """One answer. prompt: int64 [n]. states: [depths, rows, hidden], float16, after the exits and the last layer. labels:
    int64 [rows], the token after each row: all tokens of the answer but its first."""

    prompt: Tensor
    states: Tensor
    labels: Tensor


class _AllRows(TextRows):
    """Keeps every row of a text, in order."""

    __slots__ = ("parts", "tokens")

    def __init__(self, ring: RowRing, layers: tuple[int, ...]) -> None:
        super().__init__(ring, layers, 1 << 30)
        self.parts: list[Tensor] = []
        self.tokens: list[int] = []

    def add_states(self, states: Sequence[Tensor], tokens: Sequence[int]) -> None:
        self.parts.append(torch.stack([rows[: len(tokens)] for rows in states]).half())
        self.tokens += tokens


class _Recorder(OnlineExits):
    """Keeps the rows of all texts. texts: in the order in which they began."""

    texts: list[_AllRows]

    def begin_text(self, prompt: Tensor) -> TextRows:
        rows = _AllRows(self.learned, self.layers)
        self.texts.append(rows)
        return rows


class AnswerFiles:
    """The greedy answers of a model to prompts, in a folder, `block` to a file.

    generator: of a model with adapters at the exits whose states are wanted. Raises ValueError if the folder holds answers
    to other prompts, or of other exits.
    """

    def __init__(
        self,
        generator: SelfSpecGenerator,
        prompts: Sequence[list[int]],
        folder: Path,
        *,
        block: int,
        max_new_tokens: int,
    ) -> None:
        model = generator.model
        self._generator, self._folder, self._max_new_tokens = generator, folder, max_new_tokens
        self._blocks = [prompts[first : first + block] for first in range(0, len(prompts), block)]
        adapters = {layer: one for layer, one in model.adapters.items() if isinstance(one, LeanAdapter)}
        self._recorder = _Recorder(model, adapters, num_bytes=_FEW_BYTES, rows_per_text=1)
        asked = [[*sorted(adapters)], max_new_tokens, block]
        self._digest = sha256(json.dumps(asked).encode()).hexdigest()[:12]
        generator._models.learn_exits(model, self._recorder)

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[list[AnswerRows]]:
        for number, prompts in enumerate(self._blocks):
            path = self._folder / f"answers-{number:05d}.safetensors"
            key = sha256(json.dumps([self._digest, prompts]).encode()).digest()[:8]
            held = torch.frombuffer(bytearray(key), dtype=torch.int64)
            if not path.exists():
                write_tensors(path, {"key": held, **self._written(prompts)})
            found = load_file(path)
            if not torch.equal(found["key"], held):
                raise ValueError(f"{path} holds answers to other prompts: choose another folder for --work")
            counts = found["rows"].tolist()
            parts = zip(found["states"].split(counts, dim=1), found["labels"].split(counts))
            yield [
                AnswerRows(torch.tensor(prompt), states, labels)
                for prompt, (states, labels) in zip(prompts, parts)
                if len(labels)
            ]

    def _written(self, prompts: Sequence[list[int]]) -> dict[str, Tensor]:
        self._recorder.texts = []
        self._generator.generate_batch(
            [*prompts], max_new_tokens=self._max_new_tokens, policy="ar", do_sample=False, repetition_penalty=1.0
        )
        texts = self._recorder.texts
        empty = torch.empty(len(self._recorder.layers), 0, self._generator.model.hidden_size, dtype=torch.float16)
        return {
            "states": torch.cat([empty, *(part for text in texts for part in text.parts)], dim=1),
            "labels": torch.tensor([token for text in texts for token in text.tokens], dtype=torch.int64),
            "rows": torch.tensor([len(text.tokens) for text in texts]),
        }
