"""Weights that D-PACE is compared with, against the paper's formulas written out; what foretells accepted tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.experiments.exit_adapters.confidences import rank_correlation
from bench.experiments.exit_adapters.forms import Agreement, accepted_from_all_rows
from bench.experiments.exit_adapters.position_weights import OTHERS, Weighting, other_weights, parse_weighting
from layerskip_models import from_transformers
from layerskip_models.exits.adapter import ExitAdapters
from layerskip_models.exits.folder import config_for
from layerskip_models.training.accepted_length import accepted_length_weights
from selfspec.exits.fitting import ExitFit, Weights
from selfspec.exits.frozen_head import FrozenHead
from selfspec.exits.sequences import UNSCORED, ExitSequence
from selfspec.exits.settings import FitSettings
from tiny_llama import tiny_llama

VOCABULARY = 24
HEAD = FrozenHead(from_transformers(tiny_llama(num_layers=2, vocab_size=VOCABULARY)))


def sequence_of(length: int, gap: int, seed: int) -> ExitSequence:
    """Random states of two depths; the text's stretch ends after `gap` rows."""
    draw = torch.Generator().manual_seed(seed)
    positions = torch.arange(length) + (torch.arange(length) >= gap).long()
    return ExitSequence(
        states=torch.randn(length, 2, HEAD.size, generator=draw) * 3,
        labels=torch.randint(0, VOCABULARY, (length,), generator=draw),
        positions=positions,
        texts=torch.zeros(length, dtype=torch.int64),
        own=torch.rand(length, generator=draw) < 0.5,
    )


def written_out(arm: str, sequence: ExitSequence, gap: int, alpha: float, block: int) -> list[float]:
    """Every draft of the text, row by row, by the formulas of appendix B; drafts end where the stretch does."""
    exits, last = (HEAD.logits(sequence.states[:, depth]) for depth in (0, 1))
    labels = torch.where(sequence.own, sequence.labels, last.argmax(-1)).tolist()
    draft, target = exits.softmax(-1), last.softmax(-1)
    length, sums = len(labels), [0.0] * len(labels)
    for start in range(length):
        end = min(start + block, length, gap if start < gap else length)
        source = target if arm == "target" else draft
        smoothed = [(1 - alpha) * float(source[row, labels[row]]) + alpha for row in range(start, end)]
        for place, row in enumerate(range(start, end)):
            follows = 1 + sum(math.prod(smoothed[place + 1 : m + 1]) for m in range(place + 1, end - start))
            if arm == "top3":
                before = range(start, row)
                sums[row] += all(labels[one] in exits[one].topk(3).indices.tolist() for one in before)
            else:
                sums[row] += follows * (math.prod(smoothed[: place + 1]) if arm == "target" else 1.0)
    return [value * length / sum(sums) for value in sums]


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(OTHERS), st.integers(1, 12), st.integers(0, 12), st.floats(0.1, 1), st.integers(1, 5), st.integers(0, 99)
)  # fmt: skip
def test_weights_are_the_formulas(arm: str, length: int, gap: int, alpha: float, block: int, seed: int) -> None:
    sequence = sequence_of(length, gap, seed)
    weigh = other_weights(Weighting(arm=arm, alpha=alpha, block=block), HEAD, [1, 2])
    assert weigh is not None
    rows = torch.arange(length)
    losses = losses_of(sequence)
    found = weigh(sequence, rows, sequence.states[:, 0], losses)
    torch.testing.assert_close(
        found.double(), torch.tensor(written_out(arm, sequence, gap, alpha, block)).double(), rtol=1e-4, atol=1e-5
    )


def losses_of(sequence: ExitSequence) -> Tensor:
    target = HEAD.target(sequence.states[:, 1])
    labels = torch.where(sequence.own, sequence.labels, target.tokens)
    return HEAD.loss(sequence.states[:, 0], target, labels).ce


def test_a_decay_by_place_is_the_same_for_every_row() -> None:
    """Drafts of 4 that start at every row: a weight of exp(-place / 4) sums to the same, but for the first three rows."""
    decay = [math.exp(-place / 4) for place in range(4)]
    sums = [sum(decay[: row + 1]) for row in range(12)]
    assert sums[3:] == pytest.approx([sum(decay)] * 9) and sums[0] < sums[3]


def test_the_accepted_length_itself_has_the_weights_of_full_without_smoothing() -> None:
    """Its gradient by the loss of each row, from autograd, over drafts from every row."""
    losses = (torch.rand(1, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2).requires_grad_()
    confidences = (-losses).exp()
    total = sum(confidences[0, start : start + m + 1].prod() for start in range(10) for m in range(min(4, 10 - start)))
    (gradient,) = torch.autograd.grad(total, losses)
    full = accepted_length_weights(losses.detach(), torch.ones(1, 10, dtype=torch.bool), arm="full", alpha=0.0, block=4)
    torch.testing.assert_close(-gradient / -gradient.mean(), full)


def test_names() -> None:
    assert [parse_weighting(name).name for name in ("full", "full:0.5", "full:0.30", "full:0.5:16", "top3")] == [
        "full", "full", "full:0.3", "full:0.5:16", "top3",
    ]  # fmt: skip
    assert other_weights(parse_weighting("full:0"), HEAD, [1, 2]) is None
    for name in ("best", "full:2", "full:x", "full:0.5:0", "full:0.5:8:1"):
        with pytest.raises(ValueError, match="a weighting is ARM"):
            parse_weighting(name)


def test_accepted_tokens_from_every_row() -> None:
    hits = torch.tensor([[True, True, False, True, True, True]])
    # Drafts of 3 from rows 0 to 3: 2, 1, 0 and 3 tokens.
    assert accepted_from_all_rows(Agreement(exit_layer=1, hits=(hits,)), 3) == 6 / 4
    assert accepted_from_all_rows(Agreement(exit_layer=1, hits=(hits[:, :2],)), 3) == 0


def test_rank_correlation_shares_ranks() -> None:
    left = torch.tensor([3.0, 1.0, 2.0, 2.0])
    assert rank_correlation(left, left * 10) == pytest.approx(1)
    assert rank_correlation(left, -left) == pytest.approx(-1)
    # Ranks 4, 1, 2.5, 2.5 and 4, 2, 1, 3: the sum of squared deviations is 4.5 and 5, that of products 3.
    assert rank_correlation(left, torch.tensor([9.0, 5.0, 1.0, 7.0])) == pytest.approx(3 / math.sqrt(4.5 * 5))


def test_fit_uses_the_weights_it_is_given() -> None:
    """Of one row alone: the gradient is that row's, as if it were all there is to score, over as many rows."""
    model = from_transformers(tiny_llama(num_layers=2, vocab_size=VOCABULARY))
    sequence = sequence_of(6, 6, seed=2)
    alone = replace(sequence, labels=torch.where(torch.arange(6) == 4, sequence.labels, UNSCORED))

    def gradients(one: ExitSequence, weights: Weights | None) -> list[Tensor]:
        torch.manual_seed(0)
        adapters = ExitAdapters(config_for(model, exit_layers=(1,), rank=2))
        torch.nn.init.normal_(adapters.at(1).down.weight)
        fit = ExitFit(
            adapters, [one], [1, 2], HEAD, FitSettings(steps=1, batch=1), Accelerator(cpu=True), weights=weights
        )
        adapters.at(1).scale.fill_(1.0)
        fit.gradient(0)
        return [parameter.grad for parameter in adapters.parameters() if parameter.grad is not None]

    def fifth(sequence: ExitSequence, rows: Tensor, output: Tensor, losses: Tensor) -> Tensor:
        assert output.shape == (6, HEAD.size) and losses.shape == (6,)
        return (rows == 4).float()

    pairs = list(zip(gradients(sequence, fifth), gradients(alone, None), strict=True))
    assert pairs
    for weighted, only in pairs:
        torch.testing.assert_close(weighted * 6, only, rtol=1e-4, atol=1e-6)
