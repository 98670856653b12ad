"""Acceptance keeps the target's distribution exactly: by algebra, with numbers small enough to check by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from selfspec.engine import accept
from selfspec.engine.accept import accept_greedy, accept_sampled, acceptance_probabilities, residual

ALMOST_ONE = 1 - 2**-24  # the largest float32 below 1: the most a uniform number can be


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def distributions(draw: st.DrawFn, size: int) -> Tensor:
    """Float64 [size], sums to 1: with zeros and ties often, one-hot sometimes, and any spread of magnitudes."""
    kind = draw(st.sampled_from(["weights", "small integers", "one-hot"]))
    if kind == "one-hot":
        return torch.nn.functional.one_hot(torch.tensor(draw(st.integers(0, size - 1))), size).double()
    if kind == "small integers":
        weights = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size).filter(any))
        return _normalised([float(w) for w in weights])
    exponents = draw(st.lists(st.floats(-30, 0), min_size=size, max_size=size))
    return _normalised([10.0**exponent for exponent in exponents])


def _normalised(weights: list[float]) -> Tensor:
    values = torch.tensor(weights, dtype=torch.float64)
    return values / values.sum()


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """(p, q) over the same vocabulary of 2 to 8 tokens; equal in one case of four."""
    size = draw(st.integers(2, 8))
    p = draw(distributions(size))
    return p, p.clone() if draw(st.integers(0, 3)) == 0 else draw(distributions(size))


def output_law(p: Tensor, q: Tensor) -> Tensor:
    """P(token) of one draft from q, accepted or replaced: q a + P(reject) residual, all in float64."""
    a = torch.zeros_like(p)
    drawn = (q > 0).nonzero()[:, 0]
    a[drawn] = acceptance_probabilities(p.expand(len(drawn), -1), q.expand(len(drawn), -1), drawn)
    rejected = (q * (1 - a)).sum()
    weights = accept.residual(p, q)
    return q * a + rejected * weights / weights.sum()


@given(pair=pairs())
@settings(max_examples=500)
@example(pair=(double(0.5, 0.3, 0.2), double(0.2, 0.5, 0.3)))
@example(pair=(double(0.6, 0.4), double(0.6, 0.4)))
@example(pair=(double(0.6, 0.4, 0.0), double(0.0, 0.0, 1.0)))
def test_output_law_is_p(pair: tuple[Tensor, Tensor]) -> None:
    p, q = pair
    assert (output_law(p, q) - p).abs().max() <= 1e-12


def test_that_property_sees_an_epsilon_in_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest habit in published code, max(p - q, 0) + 1e-9, moves the law by more than the property allows."""
    monkeypatch.setattr(accept, "residual", lambda p, q: (p - q).clamp(min=0.0) + 1e-9)
    with pytest.raises(AssertionError):
        test_output_law_is_p()


@given(pair=pairs(), data=st.data())
@settings(max_examples=200)
def test_a_uniform_number_accepts_with_that_probability(pair: tuple[Tensor, Tensor], data: st.DataObject) -> None:
    """`accept_sampled` accepts exactly when u < min(1, p/q), whatever the side of the ratio u is taken on."""
    p, q = pair
    draft = data.draw(st.sampled_from((q > 0).nonzero()[:, 0].tolist()))
    drafts = torch.tensor([draft])
    ratio = float(acceptance_probabilities(p[None], q[None], drafts)[0])
    assert ratio == min(1.0, float(p[draft] / q[draft]))
    for u in (0.0, ratio * (1 - 1e-9), ratio * (1 + 1e-9), ALMOST_ONE):
        if u < 1:
            accepted, weights = accept_sampled(torch.stack([p, p]), q[None], drafts, double(u))
            assert accepted == int(u < ratio)
            assert torch.equal(weights, p if accepted else residual(p, q))


def test_golden() -> None:
    # sum of min(p, q) = .2 + .3 + .2 = .7; max(0, p - q) = (.3, 0, 0), so a rejection always gives token 0
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    drafts = torch.arange(3)
    rates = acceptance_probabilities(p.expand(3, -1), q.expand(3, -1), drafts)
    assert rates.tolist() == pytest.approx([1.0, 0.6, 2 / 3])
    assert float((q * rates).sum()) == pytest.approx(0.7)
    weights = residual(p, q)
    assert (weights / weights.sum()).tolist() == pytest.approx([1.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("uniforms", "accepted"),
    [([0.9, 0.9, 0.9], 0), ([0.4, 0.9, 0.0], 1), ([0.4, 0.4, 0.9], 2), ([0.4, 0.4, 0.4], 3), ([0.9, 0.0, 0.0], 0)],
)
def test_the_first_rejection_ends_the_round(uniforms: list[float], accepted: int) -> None:
    """Drafts with p/q = 1/2 each: nothing behind a rejection counts, whatever its uniform number."""
    p = torch.tensor([[0.25, 0.75, 0.0], [0.25, 0.0, 0.75], [0.25, 0.5, 0.25], [0.0, 0.0, 1.0]])
    q = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.5, 0.25, 0.25]])
    number, weights = accept_sampled(p, q, torch.zeros(3, dtype=torch.long), torch.tensor(uniforms))
    assert number == accepted
    expected = p[3] if accepted == 3 else residual(p[accepted], q[accepted])
    assert torch.equal(weights, expected)


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), min_size=7, max_size=7))
def test_greedy_accepts_the_longest_common_prefix(drafts: list[int], target: list[int]) -> None:
    accepted = accept_greedy(drafts, target)
    assert drafts[:accepted] == target[:accepted]
    assert accepted == len(drafts) or drafts[accepted] != target[accepted]
