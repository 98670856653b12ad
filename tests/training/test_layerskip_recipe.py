import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from layerskip_models.training.exit_losses import accepted_length_weights, draw_keep_mask, exit_hidden_states
from layerskip_models.training.layerskip import EarlyExitLoss, orthogonalise
from layerskip_models.training.recipe import (
    ARMS,
    dropout_depth_scale,
    dropout_time_scale,
    enabled_exits,
    exit_loss_weights,
    layer_dropout_rates,
    normalised_exit_weights,
)
from layerskip_models.training.training_config import TrainingConfig
from tiny_llama import tiny_llama


def tiny_model():
    return tiny_llama(vocab_size=32, dtype=torch.float64).train()


def test_dropout_rates_by_hand():
    # L = 3: exp(0) - 1 = 0; exp(ln2 / 2) - 1 = sqrt(2) - 1; exp(ln2) - 1 = 1
    assert dropout_depth_scale(3) == pytest.approx([0.0, math.sqrt(2) - 1, 1.0], abs=1e-15)
    with pytest.raises(ValueError, match="at least 2"):
        dropout_depth_scale(1)
    # T = 5: exp(t ln2 / 4) - 1 = 2^(t/4) - 1
    scratch = [dropout_time_scale("scratch", step, 5) for step in range(5)]
    assert scratch == pytest.approx([0, 2**0.25 - 1, 2**0.5 - 1, 2**0.75 - 1, 1])
    with pytest.raises(ValueError, match=r"continual, scratch.*'later'"):
        dropout_time_scale("later", 0, 5)
    # S(2) = sqrt(2) - 1 with T = 5; D(1) = sqrt(2) - 1 with L = 3; (sqrt(2) - 1)^2 = 3 - 2 sqrt(2)
    assert layer_dropout_rates(3, 0.2, "scratch", 2, 5)[1] == pytest.approx(0.2 * (3 - 2 * math.sqrt(2)))
    assert layer_dropout_rates(3, 0.2, "continual", 0, 5) == pytest.approx([0, 0.2 * (math.sqrt(2) - 1), 0.2])


def test_keep_mask_has_the_rates():
    keep = draw_keep_mask([0.0, 0.25, 1.0], 40_000, torch.Generator().manual_seed(1))
    dropped = (~keep).double().mean(1)
    assert dropped[0] == 0
    assert dropped[2] == 1
    # standard deviation sqrt(.25 * .75 / 40000) = .0022
    assert dropped[1] == pytest.approx(0.25, abs=0.01)


def test_weights_of_exits_by_hand():
    # L = 5, e_scale = 0.5: 0.5 * (0, 1, 3, 6) below; last 5 - 1 + 0.5 * (0 + 1 + 2 + 3) = 7
    published = exit_loss_weights(5, "published", e_scale=0.5)
    assert published == [0, 0.5, 1.5, 3.0, 7.0]
    # layers 0, 2, 4 have 0, 1.5, 7: shares 1.5/8.5 and 7/8.5; the first has no loss and is left out
    assert normalised_exit_weights(published, [0, 2, 4]) == pytest.approx({2: 1.5 / 8.5, 4: 7 / 8.5})
    assert exit_loss_weights(3, "uniform", last_exit_weight=3) == [1, 1, 3]
    assert exit_loss_weights(3, [0.5, 0, 2]) == [0.5, 0, 2]
    for wrong, message in [
        ([1, 2], "one number per layer"),
        ([1, -1, 2], "at least 0"),
        ([1, 1, 0], "above 0 for the last"),
        ("even", "published, uniform or 3 numbers, got 'even'"),
    ]:
        with pytest.raises(ValueError, match=message):
            exit_loss_weights(3, wrong)


def test_curricula_by_hand():
    rotational = [enabled_exits("rotational", 6, step, 12, rotation=4) for step in range(5)]
    assert rotational == [[0, 4, 5], [1, 5], [2, 5], [3, 5], [0, 4, 5]]
    # L = 3, T = 12: one more layer every 12 / 6 = 2 steps
    gradual = [enabled_exits("gradual", 3, step, 12) for step in range(6)]
    assert gradual == [[2], [2], [1, 2], [1, 2], [0, 1, 2], [0, 1, 2]]
    assert enabled_exits("all", 3, 7, 12) == [0, 1, 2]
    assert enabled_exits("none", 3, 7, 12) == [2]
    with pytest.raises(ValueError, match="rotational, gradual, all, none"):
        enabled_exits("random", 3, 0, 1)


def test_hidden_states_are_transformers():
    model = tiny_model().eval()
    ids = torch.randint(0, 32, (2, 7))
    expected = model.model(ids, output_hidden_states=True, use_cache=False)
    states = exit_hidden_states(model, ids, range(4))
    for layer in range(3):
        torch.testing.assert_close(states[layer], expected.hidden_states[layer + 1])
    torch.testing.assert_close(model.model.norm(states[3]), expected.last_hidden_state)


def test_dropped_samples_pass_a_layer_unchanged():
    """A layer that all of them drop is not computed."""
    model, calls = tiny_model(), []
    model.model.layers[2].register_forward_hook(lambda *_: calls.append(1))
    ids = torch.randint(0, 32, (3, 5))
    keep = torch.tensor([[True] * 3, [True, False, True], [False] * 3, [True] * 3])
    states = exit_hidden_states(model, ids, range(4), keep)
    assert calls == []
    torch.testing.assert_close(states[1][1], states[0][1], rtol=0, atol=0)
    torch.testing.assert_close(states[2], states[1], rtol=0, atol=0)
    full = exit_hidden_states(model, ids, range(4))
    torch.testing.assert_close(states[1][[0, 2]], full[1][[0, 2]])


@settings(max_examples=20, deadline=None)
@given(
    exits=st.sets(st.integers(0, 2)),
    arm=st.sampled_from(ARMS),
    chunk_rows=st.sampled_from([1, 7, 64]),
    drop=st.booleans(),
    seed=st.integers(0, 99),
)
def test_losses_and_gradients_are_the_sums_written_out(exits, arm, chunk_rows, drop, seed):
    """All logits at once; exits below the last by accepted length, the last one plain, whatever the chunks."""
    model, naive = tiny_model(), tiny_model()
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 32, (3, 6), generator=generator)
    keep = draw_keep_mask([0, 0.3, 0.3, 0.6], 3, generator) if drop else None
    inputs, labels, eos = ids[:, :-1], ids[:, 1:], 5
    shares = normalised_exit_weights([1.0, 2.0, 3.0, 4.0], {*exits, 3})
    config = TrainingConfig(data=(__file__,), output_dir="out", exit_loss=arm, loss_chunk_rows=chunk_rows)
    loss, means = EarlyExitLoss(model, config, eos)(inputs, labels, shares, keep)
    loss.backward()

    total = torch.zeros((), dtype=torch.float64)
    for mean, (layer, state) in zip(means, exit_hidden_states(naive, inputs, shares, keep).items(), strict=True):
        logits = naive.lm_head(naive.model.norm(state)).float()
        rows = F.cross_entropy(logits.mT, labels, reduction="none")
        torch.testing.assert_close(mean, rows.mean(), rtol=1e-5, atol=1e-6)
        drafted = inputs != eos
        found = accepted_length_weights(rows, drafted, arm=arm, alpha=0.5, block=8)
        weights = torch.where(drafted, found, 1.0) if layer < 3 and arm != "uniform" else 1.0
        total = total + shares[layer] * (weights * rows).mean()
    torch.testing.assert_close(loss.double(), total, rtol=1e-5, atol=1e-6)
    total.backward()
    for mine, other in zip(model.parameters(), naive.parameters()):
        if other.grad is None:
            assert mine.grad is None
        else:  # cross-entropy is computed in float32
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_orthogonalise_evens_the_singular_values():
    matrix = torch.randn(12, 20, generator=torch.Generator().manual_seed(0))
    for shape in (matrix, matrix.mT):
        values = torch.linalg.svdvals(orthogonalise(shape))
        assert values.min() > 0.5
        assert values.max() < 1.3
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    assert (orthogonalise(matrix) * (left @ right)).sum() > 0.9 * 12 * 0.8


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
    weights = accepted_length_weights(losses.requires_grad_(), valid, arm=arm, alpha=alpha, block=block)
    assert not weights.requires_grad
    expected = [
        written_out(loss, flags, arm, alpha, block) for loss, flags in zip(losses.tolist(), valid.tolist(), strict=True)
    ]
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)


def test_vanishing_products_leave_equal_weights():
    losses = torch.full((1, 4), 2000.0)  # exp(-2000) is 0 in float64, too
    valid = torch.tensor([[True, True, False, True]])
    weights = accepted_length_weights(losses, valid, arm="full", alpha=0.0, block=4)
    assert weights.tolist() == [[1.0, 1.0, 0.0, 1.0]]
