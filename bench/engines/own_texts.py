"""selfspec as an engine that takes one text or many."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bench.engines.own import SelfSpecEngine
from bench.machine.throughput import BatchRun, SelfSpecBatch, after_prompts
from selfspec import SelfSpecGenerator


class SelfSpecTexts:
    """One text by `generate`, several by the engine that decodes them together. The policy keeps what it learns, in use."""

    def __init__(self, generator: SelfSpecGenerator, policy: str, name: str, label: str) -> None:
        self.name, self.label = name, label
        self.weights: str | None = label
        self._alone = SelfSpecEngine(generator, policy, kept=True)
        self._together = SelfSpecBatch(generator, policy, label)

    def run(self, prompts: Sequence[Tensor], max_new_tokens: int) -> BatchRun:
        """See `BatchEngine`."""
        if len(prompts) > 1:
            return self._together.run(prompts, max_new_tokens)
        generation = self._alone.generate(prompts[0], max_new_tokens)
        assert generation.time_to_first_token is not None
        return after_prompts([[*generation.tokens]], generation.seconds, generation.time_to_first_token)
