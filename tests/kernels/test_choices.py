"""The head's choices: the same token and the same logit as the stored logits have, and numbers that describe the row."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from layerskip_models.choices import choices_in_pieces, choices_of
from layerskip_models.kernels.library import kernels
from layerskip_models.kernels.native_linear import NativeLinear
from layerskip_models.norm import RMSNorm

needs_kernels = pytest.mark.skipif(kernels() is None, reason="needs the native library")


def rows(count: int, hidden: int = 40) -> Tensor:
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(count))


@needs_kernels
def test_equal_logits_nan_and_masked_tokens() -> None:
    """The first of equal logits wins, as in PyTorch; a NaN anywhere is reported; -inf is a probability of 0."""
    weight = torch.zeros(600, 40)
    weight[[17, 300, 599], 0] = 1.0
    x = torch.zeros(3, 40)
    x[:, 0] = 1.0
    norm = RMSNorm(torch.ones(40), 1e-6)
    chosen = NativeLinear(weight).choices_of_normalised(norm, x, "all")
    assert chosen.tokens.tolist() == [17] * 3
    assert chosen.numbers[2].tolist() == [0.0] * 3
    for place in (0, 255, 256, 599):
        bias = torch.zeros(600)
        bias[place] = torch.nan
        broken = NativeLinear(weight, bias).choices_of_normalised(norm, x, "all")
        assert broken.logits.isnan().all()
        assert broken.confidences.isnan().all()
    mask = torch.full((600,), -torch.inf)
    mask[[3, 4]] = 0.0
    few = NativeLinear(weight, mask).choices_of_normalised(norm, x, "all")
    assert few.tokens.tolist() == [3] * 3
    assert few.confidences.tolist() == [0.5] * 3
    assert few.entropies.tolist() == pytest.approx([0.6931472] * 3)
    nothing = NativeLinear(weight, torch.full((600,), -torch.inf)).choices_of_normalised(norm, x, "token")
    assert nothing.logits.tolist() == [-torch.inf] * 3


def test_operators_choose_the_same_and_hold_few_logits_at_a_time() -> None:
    """With PyTorch's operators, pieces give what all rows at once do, and no piece has more than its share of logits."""
    weight, x = torch.randn(1 << 18, 8, generator=torch.Generator().manual_seed(0)), rows(37, 8)
    seen: list[int] = []

    def logits(piece: Tensor) -> Tensor:
        seen.append(piece.shape[0])
        return piece @ weight.t()

    whole = choices_of(x @ weight.t(), "all")
    pieces = choices_in_pieces(x, weight.shape[0], logits, "all")
    assert torch.equal(pieces.tokens, whole.tokens)
    assert torch.allclose(pieces.numbers, whole.numbers, rtol=1e-5, atol=1e-5)
    assert sum(seen) == 37
    assert max(seen) == 16
    head = partial(torch.mm, mat2=weight.t())
    assert choices_in_pieces(x, weight.shape[0], head, "token").numbers.shape == (1, 37)
