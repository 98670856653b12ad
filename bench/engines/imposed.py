"""Policies whose drafts are right as often as one wants: what they would gain on a model that agrees so often."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any
from unittest.mock import patch

from torch import Tensor

from bench.engines.own import GREEDY, Generation, SelfSpecEngine
from layerskip_models.choices import HeadOutput
from selfspec import SelfSpecGenerator
from selfspec.engine import wave
from selfspec.engine.draft import Draft


class ImposedEngine(SelfSpecEngine):
    """One policy; each draft is the model's own token with the chance `right`, else another: at the same places for all.

    Rows that would choose drafts, verification and rejection run as ever, so the text stays the model's own.
    plain: by prompt, what plain decoding gave; engines that share it decode each prompt once, untimed.
    """

    def __init__(self, generator: SelfSpecGenerator, policy: str, right: float, plain: dict[bytes, list[int]]) -> None:
        super().__init__(generator, policy)
        self.name, self.label = f"{self.name}@{right:g}", f"{policy}, {right:g} right"
        self._right, self._plain = right, plain

    def generate(self, prompt: Tensor, max_new_tokens: int, repeat: int = 0) -> Generation:
        key, random, vocab_size = prompt.numpy().tobytes(), Random(1), self._generator.model.vocab_size
        if key not in self._plain:
            own = self._generator.generate(prompt, max_new_tokens=max_new_tokens, policy="ar", **GREEDY)
            self._plain[key] = own.new_tokens
        drafts = [(token + (random.random() >= self._right)) % vocab_size for token in self._plain[key]]
        with imposed([0] * prompt.numel() + drafts):
            return super().generate(prompt, max_new_tokens, repeat)


@contextmanager
def imposed(drafts: Sequence[int]) -> Iterator[None]:
    """Within it, the token that is drafted for position p is drafts[p], also where a later loop of a wave is asked again."""
    hear = wave._hear

    def pick(self: Draft, *_: Any, **__: Any) -> int:
        return drafts[self.sequence.length + self.first]

    def hear_one(draft: Draft, row: wave.Row, said: HeadOutput, position: int, lands: bool) -> bool:
        return hear(draft, row, said if lands else said._replace(token=drafts[position]), position, lands)

    with patch.object(Draft, "_pick", pick), patch.object(wave, "_hear", hear_one):
        yield
