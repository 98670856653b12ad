"""A row's distribution and draws from it by the kernels: what transformers' warpers leave, each token with its share."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from layerskip_models import from_transformers
from layerskip_models.choices import Detail, choices_of
from layerskip_models.kernels.check import native_works
from layerskip_models.kernels.native_sampling import (
    Warp,
    accept_drafts,
    distribute,
    draw,
    look,
    sample,
    takes,
)
from sampling_in_parts import SamplerInParts
from selfspec.engine.sampling import Sampler, warp_of
from selfspec.engine.verification import accept
from tiny_llama import tiny_llama

pytestmark = pytest.mark.skipif(not native_works(torch.device("cpu"), torch.float32), reason="no native kernels here")
ALMOST_ONE = 1 - 2**-53  # the largest float64 below 1
SIZES = st.sampled_from([1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 100, 255, 256, 257, 700])


def warpers(warp: Warp) -> LogitsProcessorList:
    """transformers' own."""
    found = LogitsProcessorList()
    if warp.temperature != 1:
        found.append(TemperatureLogitsWarper(warp.temperature))
    if warp.top_k:
        found.append(TopKLogitsWarper(warp.top_k))
    if warp.top_p < 1:
        found.append(TopPLogitsWarper(warp.top_p))
    return found


def distributed(logits: Tensor, warp: Warp) -> Tensor:
    out = torch.full_like(logits, math.nan)
    distribute(logits, warp, out)
    return out


def rows_of(size: int, seed: int, scale: float, kinds: int, masked: float) -> Tensor:
    """Three rows of logits. kinds: how many different ones; 0 for no limit. masked: the share that is -inf."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, size, generator=generator)
    if kinds:
        logits = (logits * kinds).round() / kinds
    logits *= scale
    mask = torch.rand(3, size, generator=generator) < masked
    mask[:, seed % size] = False
    return logits.masked_fill(mask, -math.inf)


WARPS = st.builds(
    Warp,
    temperature=st.sampled_from([1.0, 0.6, 1.7, 0.05]),
    top_k=st.sampled_from([0, 1, 2, 5, 50, 10_000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
)


@given(
    size=SIZES,
    seed=st.integers(0, 1 << 30),
    scale=st.sampled_from([0.0, 0.1, 3.0, 40.0]),
    kinds=st.sampled_from([0, 0, 1, 2]),
    masked=st.sampled_from([0.0, 0.5, 0.99]),
    warp=WARPS,
)
@settings(max_examples=400)
@example(size=1, seed=0, scale=1.0, kinds=0, masked=0.0, warp=Warp(top_k=1, top_p=0.01))
@example(size=257, seed=1, scale=0.0, kinds=0, masked=0.0, warp=Warp(top_k=5))  # all are as likely as the fifth
@example(size=49_152, seed=3, scale=4.0, kinds=0, masked=0.0, warp=Warp(0.6, 50))
def test_it_is_what_transformers_warpers_leave(
    size: int, seed: int, scale: float, kinds: int, masked: float, warp: Warp
) -> None:
    logits = rows_of(size, seed, scale, kinds, masked)
    found = distributed(logits, warp)
    exact = warpers(warp)(torch.zeros(3, 1, dtype=torch.long), logits.double()).softmax(-1)
    assert (found.double().sum(-1) - 1).abs().max() < 1e-6
    # transformers adds up its nucleus in its own order: where tokens are equally likely, or where the bound lies between two
    # sums by rounding, it may keep another one. Then as much of the whole stays, up to one token.
    if kinds or warp.top_p < 1:
        nucleus = distributed(logits, Warp(warp.temperature, warp.top_k))
        kept = torch.where(found > 0, nucleus, 0).double().sum(-1)
        least = torch.where(found > 0, nucleus, math.inf).amin(-1).double()
        assert (kept > warp.top_p - 1e-6).all()
        assert ((found > 0).sum(-1) == 1).logical_or(kept - least < warp.top_p + 1e-6).all()
        assert (nucleus[found == 0].numel() == 0) or all(
            one[own == 0].max(initial=0) <= one[own > 0].min() for one, own in zip(nucleus.numpy(), found.numpy())
        )
        agree = (found > 0) == (exact > 1e-38)
        torch.testing.assert_close(found[agree.all(-1)].double(), exact[agree.all(-1)], rtol=1e-5, atol=1e-7)
        return
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-30)


@given(size=SIZES, seed=st.integers(0, 1000), warp=WARPS)
def test_a_row_depends_on_nothing_but_itself(size: int, seed: int, warp: Warp) -> None:
    logits = rows_of(size, seed, 3.0, 0, 0.2)
    wide = torch.full((3, size + 5), 99.0)
    wide[:, 2:-3] = logits  # rows that are not beside each other in memory
    together = distributed(wide[:, 2:-3], warp)
    assert all(torch.equal(distributed(logits[i : i + 1], warp)[0], together[i]) for i in range(3))


@given(size=SIZES | st.sampled_from([4096, 70_000]), seed=st.integers(0, 1000), kinds=st.sampled_from([0, 1]))
@settings(max_examples=40)
def test_a_look_is_what_operators_say(size: int, seed: int, kinds: int) -> None:
    """Of equal logits the first, masked ones included."""
    logits = rows_of(size, seed, 3.0, kinds, 0.3)
    details: tuple[Detail, ...] = ("token", "confidence", "all")
    for detail in details if size > 1 else details[:2]:
        found, exact = look(logits, detail), choices_of(logits.double(), detail)
        assert torch.equal(found.tokens, exact.tokens)
        assert torch.equal(found.logits.double(), exact.logits)
        if detail == "all":
            torch.testing.assert_close(found.confidences.double(), exact.confidences, rtol=1e-5, atol=0)
            torch.testing.assert_close(found.numbers[2].double(), exact.numbers[2], rtol=1e-5, atol=0)
            torch.testing.assert_close(found.entropies.double(), exact.entropies, rtol=1e-4, atol=1e-5)


def test_a_look_has_the_bits_of_a_pass_without_logits() -> None:
    model = from_transformers(tiny_llama(vocab_size=700))
    hidden = torch.randn(3, model.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        found, expected = look(model.draft_logits(hidden), "all"), model.draft_choices(hidden, "all")
    assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.numbers, expected.numbers)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("warp", [Warp(), Warp(0.7, 3, 0.9)])
@pytest.mark.parametrize("size", [5, 300])
def test_nothing_is_drawn_from_a_row_without_a_distribution(bad: float, warp: Warp, size: int) -> None:
    logits = torch.zeros(2, size)
    logits[0, size - 1 if bad != -math.inf else slice(None)] = bad
    found = distributed(logits, warp)
    assert found[0].isnan().all() and not found[1].isnan().any()
    p = found[1].clone()
    p[-1] = math.nan
    weights = found[0], torch.zeros(size), torch.full((size,), math.inf), p
    assert [draw(one, 0.5) for one in weights] == [None] * 4


@given(size=SIZES, seed=st.integers(0, 1000), zeros=st.sampled_from([0.0, 0.5, 0.99]), u=st.floats(0, ALMOST_ONE))
@example(size=700, seed=0, zeros=0.0, u=0.0)
@example(size=700, seed=0, zeros=0.99, u=ALMOST_ONE)
def test_a_draw_is_where_the_sum_passes_the_uniform_number(size: int, seed: int, zeros: float, u: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(size, generator=generator) * 10.0 ** float(torch.randint(-20, 20, (1,), generator=generator))
    weights[torch.rand(size, generator=generator) < zeros] = 0
    weights[seed % size] = max(weights.max(), 1e-30)
    token = draw(weights, u)
    assert token is not None
    assert weights[token] > 0
    sums = weights.double().cumsum(0)
    whole = float(sums[-1])
    before, after = float(sums[token] - weights[token].double()), float(sums[token])
    assert before - 1e-13 * whole <= u * whole <= after + 1e-13 * whole


def test_other_tensors_are_refused() -> None:
    row = torch.rand(1, 8)
    assert takes(row)
    assert not any(map(takes, (row.double(), row.half(), row.expand(2, 8).T, row[:, ::2], row[:, :0])))
    for message, call, others in (
        ("cannot write the distributions", lambda out: distribute(row, Warp(), out),
         (torch.empty(2, 8), torch.empty(1, 8, dtype=torch.float64), torch.empty(1, 16)[:, ::2])),
        ("cannot draw from", lambda weights: draw(weights, 0.5), (row, row[0].double(), row[0, ::2])),
        ("cannot look at", lambda logits: look(logits, "all"),
         (row[0], row.double(), row[:, ::2], torch.rand(3, 8)[:, :4])),
        ("cannot draw", lambda out: sample(torch.zeros(2, 5), Warp(), 0.5, out), (torch.empty(2, 5),)),
    ):  # fmt: skip
        for other in others:
            with pytest.raises(ValueError, match=message):
                call(other)


def test_the_last_processors_that_the_kernels_know() -> None:
    """In transformers' order, with its usual settings; what comes before them is left to it."""

    class Other(TopKLogitsWarper):
        pass

    temperature, top_k, top_p, other = (
        TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(3),
        TopPLogitsWarper(0.8),
        Other(3),
    )
    for processors, left, warp in (
        ([temperature, top_k, top_p], 0, Warp(0.7, 3, 0.8)),
        ([], 0, Warp()),
        ([top_k], 0, Warp(top_k=3)),
        ([top_p, temperature], 1, Warp(0.7)),
        ([top_k, top_p, temperature], 2, Warp(0.7)),
        ([temperature, TopPLogitsWarper(0.8, min_tokens_to_keep=2)], 2, Warp()),
        ([temperature, TopKLogitsWarper(3, filter_value=-9.0)], 2, Warp()),
        ([temperature, other, top_p], 2, Warp(top_p=0.8)),
    ):
        assert warp_of(processors) == (processors[:left], warp)


def sampler_of(kind: type[Sampler], warp: Warp, seed: int) -> Sampler:
    return kind(warpers(warp), torch.Generator().manual_seed(seed), native=True)


@given(
    size=SIZES,
    seed=st.integers(0, 1 << 30),
    count=st.integers(0, 4),
    copied=st.booleans(),
    near=st.booleans(),
    spoilt=st.sampled_from([None, None, None, math.nan, -math.inf, math.inf]),
    warp=WARPS,
)
@settings(max_examples=300)
def test_judging_drafts_in_one_call_is_judging_them_in_parts(
    size: int, seed: int, count: int, copied: bool, near: bool, spoilt: float | None, warp: Warp
) -> None:
    """Also where a row has no distribution, where a token was copied, and where drafter and model nearly agree."""
    generator = torch.Generator().manual_seed(seed)
    target = 3 * torch.randn(count + 1, size, generator=generator)
    draft = target[:count] + (0.01 if near else 2) * torch.randn(count, size, generator=generator)
    if spoilt is not None:
        target[seed % (count + 1)] = spoilt
    q = distributed(draft, warp) if count else draft
    drafts = [int(torch.multinomial(row, 1, generator=generator)) for row in q]
    text = torch.tensor([[0, 0, 0, *drafts]])
    found = []
    for kind in (Sampler, SamplerInParts):
        sequence = SimpleNamespace(
            sampler=sampler_of(kind, warp, seed), samples=True, tokens=text, length=3, q=q.clone(),
            observes=SimpleNamespace(rejected_rows=False),
        )  # fmt: skip
        judged: Any = SimpleNamespace(
            sequence=sequence, tokens=drafts, rows=[0, *drafts], num_copied=count * copied, logits=target,
            stop_cause="cap", error=None, failure=None, num_q=count, confidences=None if copied else (), rates=None,
        )  # fmt: skip
        accept(None, judged)  # type: ignore[arg-type]
        assert judged.error is None
        found.append(judged)
    whole, parts = found
    assert (whole.num_accepted, whole.block, whole.rates) == (parts.num_accepted, parts.block, parts.rates)
    assert str(whole.failure) == str(parts.failure)
    assert whole.p.shape[0] == whole.num_accepted + 1
    torch.testing.assert_close(whole.p, parts.p[: whole.num_accepted + 1], rtol=0, atol=0, equal_nan=True)


@given(size=SIZES, seed=st.integers(0, 1 << 30), warp=WARPS)
def test_drawing_from_logits_in_one_call_is_drawing_in_parts(size: int, seed: int, warp: Warp) -> None:
    logits, text = rows_of(size, seed, 3.0, 0, 0.3)[:1], torch.zeros(1, 3, dtype=torch.long)
    outs = torch.full((2, 1, size), math.nan)
    kinds = zip((Sampler, SamplerInParts), outs)
    drawn = [sampler_of(kind, warp, seed).sample(logits, text, 3, out, "a row") for kind, out in kinds]
    assert drawn[0] == drawn[1] and torch.equal(outs[0], outs[1])


def test_what_does_not_fit_is_not_judged() -> None:
    logits, q = torch.zeros(2, 5), torch.ones(1, 5)
    judged = accept_drafts(logits, Warp(), [3], q, [0.5], 0.5)
    assert (judged.num_accepted, judged.token, judged.reached) == (0, 2, [1.0])
    for changed in (
        {"drafts": [5]},
        {"drafts": [-1]},
        {"drafts": [1, 2]},
        {"q": torch.ones(2, 5)},
        {"q": torch.ones(5, 1).t().double()},
        {"q": torch.ones(1, 10)[:, ::2]},
        {"uniforms": []},
        {"logits": torch.zeros(1, 5)},
        {"logits": torch.zeros(5, 2).t()},
    ):
        given = {"logits": logits, "warp": Warp(), "drafts": [3], "q": q, "uniforms": [0.5], "uniform": 0.5} | changed
        with pytest.raises(ValueError, match="cannot judge"):
            accept_drafts(**given)
