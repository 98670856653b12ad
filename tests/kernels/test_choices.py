"""The head's choices: the same token and the same logit as the stored logits have, and numbers that describe the row."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from layerskip_models.choices import choices_in_pieces, choices_of
from layerskip_models.kernels.library import kernels
from layerskip_models.kernels.native_linear import NativeInt8Linear, NativeLinear
from layerskip_models.norm import RMSNorm

needs_kernels = pytest.mark.skipif(kernels() is None, reason="needs the native library")
VOCABULARIES = (1, 5, 37, 256, 300, 1031)


def made(vocab: int, hidden: int = 40, dtype: torch.dtype = torch.float32) -> tuple[NativeLinear, RMSNorm]:
    generator = torch.Generator().manual_seed(vocab)
    weight = torch.randn(vocab, hidden, generator=generator).to(dtype)
    bias = torch.randn(vocab, generator=generator) if vocab % 2 else None
    return NativeLinear(weight, bias), RMSNorm(1 + torch.rand(hidden, generator=generator), 1e-6)


def rows(count: int, hidden: int = 40) -> Tensor:
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(count))


@needs_kernels
@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_choices_are_those_of_the_stored_logits(vocab: int, dtype: torch.dtype) -> None:
    """Token and logit bit for bit, the other numbers to rounding; more rows than the kernels take at once, too."""
    head, norm = made(vocab, dtype=dtype)
    x = rows(131)
    logits = head.of_normalised(norm, x)
    choices = head.choices_of_normalised(norm, x, "all")
    assert torch.equal(choices.tokens, logits.argmax(dim=-1))
    assert torch.equal(choices.logits, logits.amax(dim=-1))
    p = logits.double().softmax(dim=-1)
    assert torch.allclose(choices.confidences.double(), p.amax(dim=-1), rtol=1e-5, atol=0)
    assert torch.allclose(choices.entropies.double(), torch.special.entr(p).sum(dim=-1), rtol=1e-5, atol=2e-6)
    if vocab > 1:
        top = logits.topk(2, dim=-1).values
        assert torch.equal(choices.margins, top[:, 0] - top[:, 1])


@needs_kernels
def test_choices_of_a_row_depend_on_the_row_alone() -> None:
    """Bit for bit, in any company, with any number of threads, in 8 bits, too."""
    for head in (made(1031)[0], NativeInt8Linear(rows(1031))):
        norm, x = made(1031)[1], rows(7)
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            alone = [head.choices_of_normalised(norm, row, "all") for row in x.split(1)]
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                together = head.choices_of_normalised(norm, x, "all")
                for index, one in enumerate(alone):
                    assert torch.equal(together.tokens[index : index + 1], one.tokens)
                    assert torch.equal(together.numbers[:, index : index + 1], one.numbers)
        finally:
            torch.set_num_threads(before)


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
    assert chosen.margins.tolist() == [0.0] * 3
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
