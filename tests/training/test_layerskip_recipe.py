import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from layerskip_models.training.accepted_length import ARMS, accepted_length_weights
from layerskip_models.training.muon import Muon, orthogonalise
from layerskip_models.training.recipe import (
    IGNORED,
    draw_keep_mask,
    dropout_depth_scale,
    dropout_time_scale,
    early_exit_backward,
    enabled_exits,
    exit_hidden_states,
    exit_loss_weights,
    layer_dropout_rates,
    normalised_exit_weights,
)


def tiny_model(num_layers=4, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.3,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).to(dtype).train()


def test_depth_scale_by_hand():
    # L = 3: exp(0) - 1 = 0; exp(ln2 / 2) - 1 = sqrt(2) - 1; exp(ln2) - 1 = 1
    assert dropout_depth_scale(3) == pytest.approx([0.0, math.sqrt(2) - 1, 1.0], abs=1e-15)
    with pytest.raises(ValueError, match="at least 2"):
        dropout_depth_scale(1)


def test_time_scale_by_hand():
    # T = 5: exp(t ln2 / 4) - 1 = 2^(t/4) - 1
    scratch = [dropout_time_scale("scratch", step, 5) for step in range(5)]
    assert scratch == pytest.approx([0, 2**0.25 - 1, 2**0.5 - 1, 2**0.75 - 1, 1])
    assert [dropout_time_scale("continual", step, 5) for step in (0, 4)] == [1, 1]
    with pytest.raises(ValueError, match=r"continual, scratch.*'later'"):
        dropout_time_scale("later", 0, 5)


def test_rates_are_the_product():
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


def test_published_weights_by_hand():
    # L = 5, e_scale = 0.5: 0.5 * (0, 1, 3, 6) below; last 5 - 1 + 0.5 * (0 + 1 + 2 + 3) = 7
    assert exit_loss_weights(5, "published", e_scale=0.5) == [0, 0.5, 1.5, 3.0, 7.0]


def test_uniform_and_custom_weights():
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


def test_normalised_over_the_enabled_exits():
    weights = exit_loss_weights(5, "published", e_scale=0.5)
    # layers 0, 2, 4 have 0, 1.5, 7: shares 1.5/8.5 and 7/8.5; the first has no loss and is left out
    assert normalised_exit_weights(weights, [0, 2, 4]) == pytest.approx({2: 1.5 / 8.5, 4: 7 / 8.5})


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
    model = tiny_model()
    ids = torch.randint(0, 32, (3, 5))
    keep = torch.tensor([[True] * 3, [True, False, True], [False] * 3, [True] * 3])
    states = exit_hidden_states(model, ids, range(4), keep)
    torch.testing.assert_close(states[1][1], states[0][1], rtol=0, atol=0)
    torch.testing.assert_close(states[2], states[1], rtol=0, atol=0)
    full = exit_hidden_states(model, ids, range(4))
    torch.testing.assert_close(states[1][[0, 2]], full[1][[0, 2]])


def test_a_layer_that_all_samples_drop_is_not_computed():
    model = tiny_model()
    calls = []
    model.model.layers[2].register_forward_hook(lambda *_: calls.append(1))
    keep = torch.ones(4, 2, dtype=torch.bool)
    keep[2] = False
    exit_hidden_states(model, torch.randint(0, 32, (2, 5)), [3], keep)
    assert calls == []


@settings(max_examples=20, deadline=None)
@given(
    exits=st.sets(st.integers(0, 2)),
    chunk_rows=st.sampled_from([1, 3, 10, 64]),
    scale=st.sampled_from([1.0, 0.25]),
    drop=st.booleans(),
    seed=st.integers(0, 99),
)
def test_loss_and_gradients_equal_all_logits_at_once(exits, chunk_rows, scale, drop, seed):
    model, naive = tiny_model(), tiny_model()
    ids = torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(seed))
    keep = draw_keep_mask([0, 0.3, 0.3, 0.6], 2, torch.Generator().manual_seed(seed)) if drop else None
    shares = normalised_exit_weights([1.0, 2.0, 3.0, 4.0], {*exits, 3})
    inputs, labels = ids[:, :-1], ids[:, 1:]

    states = exit_hidden_states(model, inputs, shares, keep)
    losses = early_exit_backward(model, states, labels, shares, scale=scale, chunk_rows=chunk_rows)

    total = torch.zeros((), dtype=torch.float64)
    for layer, state in exit_hidden_states(naive, inputs, shares, keep).items():
        logits = naive.lm_head(naive.model.norm(state)).float()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        torch.testing.assert_close(losses[layer].double(), loss.double(), rtol=1e-5, atol=1e-6)
        total = total + scale * shares[layer] * loss
    total.backward()
    for mine, other in zip(model.parameters(), naive.parameters()):
        if other.grad is None:
            assert mine.grad is None
        else:
            # cross-entropy is computed in float32
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6)


@settings(max_examples=15, deadline=None)
@given(
    arm=st.sampled_from(ARMS),
    chunk_rows=st.sampled_from([1, 7, 10, 64]),
    own_text=st.booleans(),
    seed=st.integers(0, 99),
)
def test_weighted_rows_equal_the_sum_written_out(arm, chunk_rows, own_text, seed):
    """Exits below the last by accepted length, the last one plain, whatever the chunks."""
    model, naive = tiny_model(), tiny_model()
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 32, (3, 6), generator=generator)
    inputs, labels = ids[:, :-1], ids[:, 1:].clone()
    drafted = inputs != 5
    unwanted = torch.zeros_like(labels, dtype=torch.bool)
    if own_text:
        labels[:, :2] = IGNORED
        unwanted[:, 3] = torch.rand(3, generator=generator) < 0.5
    shares = {0: 0.25, 2: 0.25, 3: 0.5}
    weigh = partial(accepted_length_weights, arm=arm, alpha=0.3, block=3)

    losses = early_exit_backward(
        model,
        exit_hidden_states(model, inputs, shares),
        labels,
        shares,
        chunk_rows=chunk_rows,
        unwanted=unwanted if own_text else None,
        row_weights=weigh,
        drafted=drafted,
    )

    total = torch.zeros((), dtype=torch.float64)
    for layer, state in exit_hidden_states(naive, inputs, shares).items():
        logits = naive.lm_head(naive.model.norm(state)).float()
        rows = F.cross_entropy(logits.mT, labels, reduction="none", ignore_index=IGNORED)
        rows = torch.where(unwanted, -torch.log1p(1e-6 - torch.exp(-rows)), rows)
        in_drafts = drafted & ~unwanted & (labels != IGNORED)
        weights = torch.where(in_drafts, weigh(rows, in_drafts), 1.0) if layer < 3 else 1.0
        count = (labels != IGNORED).sum()
        torch.testing.assert_close(losses[layer], rows.sum() / count, rtol=1e-5, atol=1e-6)
        total = total + shares[layer] * (weights * rows).sum() / count
    total.backward()
    for mine, other in zip(model.parameters(), naive.parameters()):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_equal_row_weights_change_no_bit():
    plain, weighted = tiny_model(), tiny_model()
    ids = torch.randint(0, 32, (4, 6))
    shares = {1: 0.5, 3: 0.5}
    for model, row_weights in ((plain, None), (weighted, lambda losses, valid: torch.ones_like(losses))):
        states = exit_hidden_states(model, ids[:, :-1], shares)
        early_exit_backward(model, states, ids[:, 1:], shares, chunk_rows=10, row_weights=row_weights)
    for mine, other in zip(plain.parameters(), weighted.parameters()):
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=0)


def test_logits_exist_for_one_exit_and_chunk_at_a_time():
    model = tiny_model()
    rows = []
    model.lm_head.register_forward_hook(lambda _module, inputs, _output: rows.append(len(inputs[0])))
    ids = torch.randint(0, 32, (4, 6))
    shares = {1: 0.5, 3: 0.5}
    early_exit_backward(model, exit_hidden_states(model, ids[:, :-1], shares), ids[:, 1:], shares, chunk_rows=8)
    assert rows == [8, 8, 4, 8, 8, 4]


def test_a_chunk_of_weighted_rows_holds_whole_sequences():
    model = tiny_model()
    rows = []
    model.lm_head.register_forward_hook(lambda _module, inputs, _output: rows.append(len(inputs[0])))
    ids = torch.randint(0, 32, (4, 6))
    shares = {1: 0.5, 3: 0.5}
    weigh = partial(accepted_length_weights, arm="full", alpha=0.5, block=3)
    for chunk_rows, expected in ((12, [10, 10, 12, 8]), (3, [5, 5, 5, 5, 3, 3, 3, 3, 3, 3, 2])):
        states = exit_hidden_states(model, ids[:, :-1], shares)
        early_exit_backward(model, states, ids[:, 1:], shares, chunk_rows=chunk_rows, row_weights=weigh)
        assert rows == expected
        rows.clear()


def test_orthogonalise_evens_the_singular_values():
    matrix = torch.randn(12, 20, generator=torch.Generator().manual_seed(0))
    for shape in (matrix, matrix.mT):
        values = torch.linalg.svdvals(orthogonalise(shape))
        assert values.min() > 0.5
        assert values.max() < 1.3
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    assert (orthogonalise(matrix) * (left @ right)).sum() > 0.9 * 12 * 0.8


def test_muon_learns_and_takes_matrices_only():
    with pytest.raises(ValueError, match="matrices only"):
        Muon([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(6, 6, generator=generator)
    weight = torch.nn.Parameter(torch.zeros(6, 6))
    optimizer = Muon([weight], lr=0.05)
    before = (weight - target).square().mean().item()
    for _ in range(200):
        optimizer.zero_grad()
        (weight - target).square().mean().backward()
        optimizer.step()
    assert (weight - target).square().mean().item() < 0.2 * before
