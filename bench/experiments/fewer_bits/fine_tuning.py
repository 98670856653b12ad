"""How many drafts in fewer bits are accepted before and after a fine-tune, by copies of the new weights and of the old."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from layerskip_models.draft_weights import drafter_of
from selfspec import SelfSpecGenerator

DRAFTS = {8: 4, 4: 3}
"""Drafts a round by bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuning:
    """A transformers model, what it is trained on, and questions whose answers are drafted.

    generator: of the model. rows: int64 [n, length], a step each, in this order. questions: each as its tokens.
    """

    network: PreTrainedModel
    generator: SelfSpecGenerator
    rows: Tensor
    questions: Sequence[list[int]]
    max_new_tokens: int
    learning_rate: float

    def lines(self, advance: Callable[[str], None]) -> Iterator[dict[str, Any]]:
        """Lines of a record: acceptance and losses, before and after the steps. advance: called `num_steps` times."""
        yield from self._accepted("before", "the same weights", advance)
        copies = {bits: drafter_of(self.generator.model, bits) for bits in DRAFTS}
        for step, loss in enumerate(self._train(), 1):
            yield {"kind": "step", "step": step, "loss": loss}
            advance("training")
        yield from self._accepted("after", "the same weights", advance)
        self.generator.model.drafters.update(copies)
        yield from self._accepted("after", "the weights before", advance)

    @property
    def num_steps(self) -> int:
        """How many times `lines` calls `advance`."""
        return len(self.rows) + 3 * len(DRAFTS) * len(self.questions)

    def _accepted(self, weights: str, copy: str, advance: Callable[[str], None]) -> Iterator[dict[str, Any]]:
        for bits, number in DRAFTS.items():
            drafted = accepted = 0
            for question in self.questions:
                stats = self.generator.generate(
                    question, max_new_tokens=self.max_new_tokens, policy=f"bits:{bits}-{number}"
                ).stats
                drafted, accepted = drafted + stats.num_drafted, accepted + stats.num_accepted
                advance("answers")
            yield {
                "kind": "acceptance",
                "weights": weights,
                "copy": copy,
                "bits": bits,
                "drafted": drafted,
                "accepted": accepted,
            }

    def _train(self) -> Iterator[float]:
        """One step of AdamW per row; the loss of each, in nats a token, before its step."""
        optimizer = torch.optim.AdamW(self.network.parameters(), lr=self.learning_rate, weight_decay=0.0)
        self.network.train()
        for row in self.rows:
            loss = self.network(input_ids=row[None], labels=row[None], use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield float(loss.detach())
        self.network.eval()
