"""A sampler that takes several calls for what our kernels do in one (tests/kernels/test_native_sampling.py compares both)."""

from __future__ import annotations

from torch import Tensor

from selfspec.engine.sampling import Sampler


class SamplerInParts(Sampler):
    """Distributions, verdicts and draws one by one, so that a test can watch or replace each of them."""

    def sample(self, logits: Tensor, tokens: Tensor, length: int, out: Tensor, where: str) -> int:
        return self.draw(self.probabilities(logits, tokens, length, out)[0], where)

    def accept(self, *arguments: object, **options: object) -> None:
        return None
