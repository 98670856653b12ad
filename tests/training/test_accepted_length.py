"""Loss weights by accepted length, against the paper's sums written out."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from layerskip_models.training.accepted_length import ARMS, accepted_length_weights

WEIGHTED = ("cumulative", "full")


@st.composite
def rows(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Losses of two sequences, float64 [2, length], and which rows are valid."""
    length = draw(st.integers(1, 9))
    numbers = st.lists(st.floats(0, 8), min_size=2 * length, max_size=2 * length)
    flags = st.lists(st.sampled_from((True, True, True, False)), min_size=2 * length, max_size=2 * length)
    losses = torch.tensor(draw(numbers), dtype=torch.float64).view(2, length)
    return losses, torch.tensor(draw(flags)).view(2, length)


def written_out(losses: list[float], valid: list[bool], arm: str, alpha: float, block: int) -> list[float]:
    """One sequence's weights: every start, every m, every product as a loop of its own."""
    smoothed = [(1 - alpha) * math.exp(-loss) + alpha for loss in losses]
    sums = [0.0] * len(losses)
    for start in range(len(losses)):
        end = start
        while end < min(start + block, len(losses)) and valid[end]:
            end += 1
        for row in range(start, end):
            last = end if arm == "full" else row + 1
            sums[row] += sum(math.prod(smoothed[start : m + 1]) for m in range(row, last))
    count = sum(valid)
    return [count * value / sum(sums) for value in sums] if count else sums


@settings(max_examples=25)
@given(rows(), st.sampled_from(WEIGHTED), st.floats(0, 1), st.integers(1, 6))
def test_weights_are_the_sums_of_the_equations(data, arm, alpha, block):
    losses, valid = data
    weights = accepted_length_weights(losses, valid, arm=arm, alpha=alpha, block=block)
    expected = [
        written_out(loss, flags, arm, alpha, block) for loss, flags in zip(losses.tolist(), valid.tolist(), strict=True)
    ]
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)


def test_three_rows_by_hand():
    # q = 1/2, alpha = 0, drafts of two. Start 0: P = 1/2, 1/4. Start 1: the same. Start 2: 1/2 (the text ends).
    # cumulative: rows 1/2, 1/4 + 1/2, 1/4 + 1/2 = 2/4, 3/4, 3/4, of mean 2/3.
    # full: start 0 gives 3/4, 1/4; start 1 3/4, 1/4; start 2 1/2. Rows: 3/4, 1, 3/4, of mean 5/6.
    losses = torch.full((1, 3), math.log(2), dtype=torch.float64)
    valid = torch.ones(1, 3, dtype=torch.bool)
    cumulative = accepted_length_weights(losses, valid, arm="cumulative", alpha=0.0, block=2)
    full = accepted_length_weights(losses, valid, arm="full", alpha=0.0, block=2)
    torch.testing.assert_close(cumulative, torch.tensor([[3 / 4, 9 / 8, 9 / 8]], dtype=torch.float64))
    torch.testing.assert_close(full, torch.tensor([[9 / 10, 6 / 5, 9 / 10]], dtype=torch.float64))


@settings(max_examples=25)
@given(rows(), st.floats(0, 1), st.integers(1, 6))
def test_full_weights_are_the_gradient_of_the_expected_accepted_length(data, alpha, block):
    """Equation 6: by log q~, of the sum over all starts of equation 4."""
    losses, valid = data
    logs = torch.log((1 - alpha) * torch.exp(-losses) + alpha).requires_grad_()
    smoothed = torch.where(valid, logs.exp(), 0.0)
    length = losses.shape[1]
    expected_length = torch.stack(
        [
            smoothed[:, start : start + 1 + more].prod(1).sum()
            for start in range(length)
            for more in range(min(block, length - start))
        ]
    ).sum()
    (gradient,) = torch.autograd.grad(expected_length, logs)
    scale = valid.sum(1, keepdim=True) / gradient.sum(1, keepdim=True).clamp(min=1e-300)
    weights = accepted_length_weights(losses, valid, arm="full", alpha=alpha, block=block)
    torch.testing.assert_close(weights, gradient * scale, rtol=1e-9, atol=1e-12)


@settings(max_examples=25)
@given(rows(), st.sampled_from(ARMS), st.floats(0, 1), st.integers(1, 6))
def test_weights_are_detached_have_mean_one_and_are_zero_on_invalid_rows(data, arm, alpha, block):
    losses, valid = data
    losses.requires_grad_()
    weights = accepted_length_weights(losses, valid, arm=arm, alpha=alpha, block=block)
    assert not weights.requires_grad and weights.dtype == losses.dtype
    assert (weights[~valid] == 0).all() and (weights >= 0).all()
    torch.testing.assert_close(weights.sum(1), valid.sum(1).double())


@settings(max_examples=25)
@given(st.integers(1, 12), st.sampled_from(WEIGHTED), st.integers(1, 6), st.booleans())
def test_certain_tokens_and_alpha_of_one_leave_only_the_number_of_drafts(length, arm, block, certain):
    """With q~ = 1 a row's cumulative weight counts the drafts that contain it; far from the ends all weights are equal."""
    losses = torch.zeros(1, length) if certain else torch.rand(1, length, dtype=torch.float64)
    weights = accepted_length_weights(
        losses, torch.ones(1, length, dtype=torch.bool), arm=arm, alpha=0.2 if certain else 1.0, block=block
    )[0]
    if arm == "cumulative":
        containing = torch.tensor([min(row + 1, block) for row in range(length)], dtype=weights.dtype)
        torch.testing.assert_close(weights, containing / containing.mean())
    inner = weights[block - 1 : length - block + 1]
    torch.testing.assert_close(inner, inner[:1].expand_as(inner))


@settings(max_examples=25)
@given(rows(), st.sampled_from(ARMS), st.floats(0, 1), st.integers(1, 6), st.integers(0, 3), st.integers(0, 3))
def test_padding_and_neighbours_change_nothing(data, arm, alpha, block, before, behind):
    losses, valid = data
    alone = accepted_length_weights(losses[:1], valid[:1], arm=arm, alpha=alpha, block=block)
    padded = torch.nn.functional.pad(losses, (before, behind), value=float("nan"))
    flags = torch.nn.functional.pad(valid, (before, behind))
    weights = accepted_length_weights(padded, flags, arm=arm, alpha=alpha, block=block)
    torch.testing.assert_close(weights[:1, before : before + losses.shape[1]], alone, rtol=1e-12, atol=0)


def test_an_invalid_row_splits_a_text_into_two():
    losses = torch.rand(1, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    valid = torch.tensor([[True, True, True, False, True, True, True]])
    whole = accepted_length_weights(losses, valid, arm="full", alpha=0.3, block=5)
    half = accepted_length_weights(losses[:, :3], valid[:, :3], arm="full", alpha=0.3, block=5)
    ratio = whole[0, :3] / half[0]
    torch.testing.assert_close(ratio, ratio[:1].expand(3))


def test_vanishing_products_leave_equal_weights():
    losses = torch.full((1, 4), 2000.0)  # exp(-2000) is 0 in float64, too
    valid = torch.tensor([[True, True, False, True]])
    weights = accepted_length_weights(losses, valid, arm="full", alpha=0.0, block=4)
    assert weights.tolist() == [[1.0, 1.0, 0.0, 1.0]]
