"""Acceptance keeps the target's distribution exactly: by algebra, with numbers small enough to check by hand."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import product
from operator import mul

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessorList

from exact_laws import Oracle, next_script
from selfspec.engine import accept
from selfspec.engine.accept import accept_greedy, accept_sampled, acceptance_probabilities, reach


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


Prefix = tuple[int, ...]
Node = tuple[Tensor, Tensor | None]  # p, and q unless the draft ends there; a p of NaN is a text that fails
FAILED = -1


@st.composite
def drafting(draw: st.DrawFn) -> dict[Prefix, Node]:
    """What target and drafter say after every text of up to three tokens.

    The draft ends after three at the latest, and anywhere before: a policy stops by what has been drafted. Copied tokens have
    a one-hot q.
    """
    size = draw(st.integers(2, 3))
    nodes: dict[Prefix, Node] = {}
    for length in range(4):
        for prefix in product(range(size), repeat=length):
            p = torch.full((size,), math.nan) if draw(st.integers(0, 9)) == 0 else draw(distributions(size))
            ends = length == 3 or draw(st.integers(0, 5)) == 0
            alike = not p.isnan().any() and draw(st.integers(0, 5)) == 0
            q = None if ends else p.clone() if alike else draw(distributions(size))
            nodes[prefix] = p.double(), q
    return nodes


def drafts_of(nodes: dict[Prefix, Node], prefix: Prefix = (), share: float = 1.0) -> Iterator[tuple[float, Prefix]]:
    """Every draft with its probability."""
    q = nodes[prefix][1]
    if q is None:
        yield share, prefix
    for token, chance in enumerate([] if q is None else q.tolist()):
        if chance:
            yield from drafts_of(nodes, (*prefix, token), share * chance)


def verdicts(p: Tensor, q: Tensor, drafts: Tensor) -> Iterator[tuple[float, int, Tensor]]:
    """Every number of accepted drafts with its probability, and the weights of the next token."""
    oracle = Oracle(LogitsProcessorList(), None)
    script: list[int] | None = []
    while script is not None:
        oracle.start(script)
        uniforms = oracle.uniforms(len(drafts), drafts.device)
        if (q == 1).any(-1).all():
            accepted, weights = accept.accept_copied(p, drafts, uniforms)
        else:
            accepted, weights = accept.accept_sampled(p, q, accept.reach(p, q, drafts), uniforms)
        yield oracle.probability, accepted, weights
        script = next_script(oracle.chosen, oracle.options)


def output_law(nodes: dict[Prefix, Node]) -> tuple[Counter[Prefix], float, float]:
    """P(text) of four tokens: a round's, and the target's own after it. Expected drafts accepted, and token by token."""
    law: Counter[Prefix] = Counter()
    accepted_drafts = token_by_token = 0.0
    for share, drafts in drafts_of(nodes):
        rows = [nodes[drafts[:length]] for length in range(len(drafts) + 1)]
        p, q = torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows[:-1]] or [rows[0][0][:0]])
        index = torch.tensor(drafts, dtype=torch.long)
        ratios = [min(float(p[i, d].nan_to_num() / q[i, d]), 1.0) for i, d in enumerate(drafts)]
        token_by_token += share * sum(itertools.accumulate(ratios, mul))
        for chance, accepted, weights in verdicts(p, q, index):
            accepted_drafts += share * chance * accepted
            for token, weight in outcomes(weights):
                law[(*drafts[:accepted], token)] += share * chance * weight
    return completed(nodes, law), accepted_drafts, token_by_token


def outcomes(weights: Tensor) -> Iterable[tuple[int, float]]:
    """Tokens and their chances."""
    return [(FAILED, 1.0)] if weights.isnan().any() else enumerate((weights / weights.sum()).tolist())


def completed(nodes: dict[Prefix, Node], law: Counter[Prefix]) -> Counter[Prefix]:
    """Go on with the target alone, to four tokens or to where it fails."""
    for length in range(4):
        for text in [text for text in law if len(text) == length and FAILED not in text]:
            share = law.pop(text)
            for token, chance in outcomes(nodes[text][0]):
                law[(*text, token)] += share * chance
    return law


def difference(law: Counter[Prefix], nodes: dict[Prefix, Node]) -> float:
    exact = completed(nodes, Counter({(): 1.0}))
    return max(abs(law[text] - exact[text]) for text in {*law, *exact})


@given(nodes=drafting())
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_output_law_is_p(nodes: dict[Prefix, Node]) -> None:
    """And no fewer drafts are accepted than one by one."""
    law, accepted, token_by_token = output_law(nodes)
    assert difference(law, nodes) <= 1e-12
    assert accepted >= token_by_token - 1e-12


# The example of Sun et al.: p = (1/3, 2/3) and q = (2/3, 1/3) in every row. Expected: r_1 = 2/3 * 1/2 + 1/3 * 1 = 2/3, and
# r_2 = 4/9 * 1/4 + 2/9 * 1 + 2/9 * 1/2 + 1/9 * 1 = 5/9, in all 11/9. Token by token 2/3 + 4/9 = 10/9.
THIRDS = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)


EXAMPLE: dict[Prefix, Node] = {
    prefix: (THIRDS, None if length >= 2 else THIRDS.flip(0))
    for length in range(4)
    for prefix in product((0, 1), repeat=length)
}


def test_that_property_sees_an_epsilon_in_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest habit in published code, max(p - q, 0) + 1e-9, moves the law by more than the property allows."""
    original = accept.residual
    monkeypatch.setattr(accept, "residual", lambda p, q, reached: original(p, q, reached) + 1e-9)
    assert difference(output_law(EXAMPLE)[0], EXAMPLE) > 1e-12


def test_golden() -> None:
    _, accepted, token_by_token = output_law(EXAMPLE)
    assert (accepted, token_by_token) == (pytest.approx(11 / 9), pytest.approx(10 / 9))
    # after the first draft, token 0, r = 1/2: min((1/3, 2/3), (4/3, 2/3)) = (1/3, 2/3), so that the second is sure to hold
    chances = acceptance_probabilities(THIRDS.expand(2, -1), THIRDS.flip(0).expand(2, -1), [1.0, 0.5])
    assert chances.tolist() == pytest.approx([2 / 3, 1.0])


@pytest.mark.parametrize(
    ("drafts", "uniforms", "accepted"),
    [
        ((0, 0), (0.0, 0.2), 2),  # r = 1/2, 1/4
        ((0, 0), (0.0, 0.3), 0),  # max(0, r p - q) is 0 after the first: nothing is left for that row
        ((0, 1), (0.9, 0.9), 2),  # r = 1/2, 1: the second makes up for the first
        ((1, 0), (0.9, 0.4), 2),  # r = 1, 1/2
        ((1, 0), (0.9, 0.6), 1),  # R = 1/3, of 1/3 + 1 - 1
    ],
)
def test_a_block_by_hand(drafts: Prefix, uniforms: tuple[float, ...], accepted: int) -> None:
    p, q = THIRDS.expand(3, -1), THIRDS.flip(0).expand(2, -1)
    found, weights = accept_sampled(p, q, reach(p, q, torch.tensor(drafts)), uniforms)
    assert found == accepted
    torch.testing.assert_close(weights, p[2] if accepted == 2 else torch.tensor([0, 1 / 3], dtype=torch.float64))


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_row_without_a_distribution_ends_the_draft(first: int) -> None:
    """As if nothing had been drafted there: it counts with the chance that all before it has, r."""
    p, q, drafts = THIRDS.repeat(3, 1), THIRDS.flip(0).expand(2, -1), torch.tensor([0, 0])
    p[first] = math.nan
    reached = reach(p, q, drafts)
    assert reached == pytest.approx([1.0, 1 / 2, 1 / 4][: first + 1])
    for u in (reached[-1] - 1e-9, reached[-1]):
        accepted, weights = accept_sampled(p, q, reached, [0.0] * (first - 1) + [u] + [0.0] * (2 - first))
        assert (accepted == first) == bool(weights.isnan().all()) == (first == 0 or u < reached[-1])


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), min_size=7, max_size=7))
def test_greedy_accepts_the_longest_common_prefix(drafts: list[int], target: list[int]) -> None:
    accepted = accept_greedy(drafts, target)
    assert drafts[:accepted] == target[:accepted]
    assert accepted == len(drafts) or drafts[accepted] != target[accepted]
