"""Logits processors see exactly the text before the token they judge, and draws come from the generator alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    SuppressTokensLogitsProcessor,
    TypicalLogitsWarper,
)

from callbacks import InDtype, Spy
from layerskip_models import from_transformers
from layerskip_models.kernels.check import native_works
from policies import ObservationSpec, Policy
from scripted_policies import ScriptedExit
from selfspec import NonFiniteLogitsError, SelfSpecGenerator
from selfspec.engine.sampling import Sampler, prefix_free
from tiny_llama import tiny_llama

WARPERS: dict[type[LogitsProcessor], Callable[[], LogitsProcessor]] = {
    EpsilonLogitsWarper: lambda: EpsilonLogitsWarper(0.05),
    EtaLogitsWarper: lambda: EtaLogitsWarper(0.05),
    InfNanRemoveLogitsProcessor: InfNanRemoveLogitsProcessor,
    LogitNormalization: LogitNormalization,
    MinPLogitsWarper: lambda: MinPLogitsWarper(0.2),
    SuppressTokensLogitsProcessor: lambda: SuppressTokensLogitsProcessor([1, 4]),
    TemperatureLogitsWarper: lambda: TemperatureLogitsWarper(0.7),
    TopKLogitsWarper: lambda: TopKLogitsWarper(3),
    TopPLogitsWarper: lambda: TopPLogitsWarper(0.8),
    TypicalLogitsWarper: lambda: TypicalLogitsWarper(0.8),
}


@pytest.mark.parametrize("do_sample", [False, True])
def test_processors_see_every_prefix_of_the_text_and_its_drafts(do_sample: bool) -> None:
    """Draft row j and verified row j see x_0..x_{n-1}, d_1..d_j: no token more, none less. Greedily, rows behind the first
    rejected draft are not processed again."""
    engine = SelfSpecGenerator(from_transformers(tiny_llama(seed=3, late_scale=0.6), layout="plain"))
    spy = Spy()
    policy = Policy(ScriptedExit([(1, 3), (None, 0), (2, 2)]))
    options = {"do_sample": do_sample, "top_k": 0, "seed": 4, "eos_token_id": [], "trace": True}
    processors = LogitsProcessorList([spy])
    result = engine.generate([3, 9, 1], max_new_tokens=24, policy=policy, logits_processor=processors, **options)
    text = result.sequences[0].tolist()
    expected = [tuple(text[:3])]
    assert result.trace is not None
    for record in result.trace:
        before = tuple(text[: record.num_committed_before])
        prefixes = [before + record.draft_tokens[:j] for j in range(record.num_drafted + 1)]
        judged = prefixes if do_sample else prefixes[: record.num_accepted + 1]
        expected += prefixes[:-1] + judged if record.exit_layer is not None else [before]
    assert spy.seen == expected
    assert 0 < result.stats.num_accepted < result.stats.num_drafted


@given(
    kinds=st.lists(st.sampled_from(sorted(WARPERS, key=lambda kind: kind.__name__)), max_size=4, unique=True),
    rows=st.integers(1, 5),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=150)
def test_all_rows_at_once_equal_row_by_row(kinds: list[type[LogitsProcessor]], rows: int, seed: int) -> None:
    """Processors that ignore the text take the short way; the result is what the long way gives."""
    assert set(WARPERS) == prefix_free()
    logits = torch.randn(rows, 9, generator=torch.Generator().manual_seed(seed))
    tokens = torch.arange(12)[None] % 9
    processors = LogitsProcessorList([WARPERS[kind]() for kind in kinds])
    at_once = Sampler(processors, None).process(logits.clone(), tokens, 4)
    one_by_one = torch.cat([processors(tokens[:, : 4 + i], logits[i : i + 1].clone()) for i in range(rows)])
    torch.testing.assert_close(at_once, one_by_one, rtol=1e-6, atol=1e-6)


def test_processing_leaves_the_logits_alone_when_it_looks_at_the_text() -> None:
    """Repetition penalty writes into what it is given; a verified row's logits are needed again for learning."""
    logits = torch.ones(3, 9)
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    processed = Sampler(LogitsProcessorList([RepetitionPenaltyLogitsProcessor(2.0)]), None).process(logits, tokens, 2)
    assert torch.equal(logits, torch.ones(3, 9))
    # row i has seen tokens 1 .. 2 + i
    assert [row.nonzero()[:, 0].tolist() for row in processed == 0.5] == [[1, 2], [1, 2, 3], [1, 2, 3, 4]]


NATIVE = [False, *([True] if native_works(torch.device("cpu"), torch.float32) else [])]


@pytest.mark.parametrize("native", NATIVE)
def test_draws_follow_the_weights_and_never_take_a_zero(native: bool) -> None:
    sampler = Sampler(LogitsProcessorList(), torch.Generator().manual_seed(0), native=native)
    weights = torch.tensor([0.0, 3.0, 0.0, 1.0])  # unnormalised: 3/4 and 1/4
    drawn = [sampler.draw(weights, "here") for _ in range(2000)]
    assert set(drawn) == {1, 3}
    assert abs(drawn.count(1) - 1500) < 90  # 4.6 standard deviations of binomial(2000, 3/4)
    for wrong in ([0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]):
        with pytest.raises(NonFiniteLogitsError, match="at position 7"):
            sampler.draw(torch.tensor(wrong), "position 7")
    numbers = sampler.uniforms(10_000, torch.device("cpu"))
    assert 0 <= min(numbers) < 0.01 < 0.99 < max(numbers) < 1
    assert sampler.uniforms(3, torch.device("cpu")) != sampler.uniforms(3, torch.device("cpu"))


def test_nothing_is_expected_of_rows_that_a_processor_refuses() -> None:
    """Shadow tokens show it scores that plain decoding does not, and break no call: a draft would have ended there."""

    class Refuses(TopKLogitsWarper):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            raise ValueError("these scores")

    p, tokens = torch.full((2, 4), 0.25), torch.zeros(1, 5, dtype=torch.long)
    for kept, expected in (([TopKLogitsWarper(2)], [0.5, 0.0]), ([Refuses(2)], [0.0, 0.0])):
        sampler = Sampler(LogitsProcessorList(kept), torch.Generator())
        logits = torch.tensor([[1.0, 1.0, 0.0, 0.0], [float("nan")] * 4])
        assert sampler.overlap(logits, tokens, 3, p).tolist() == expected
    assert not sampler.without_text().processors


def test_confidence_ignores_the_processors() -> None:
    """A threshold means the same at any temperature: what a policy sees is unfiltered."""
    engine = SelfSpecGenerator(from_transformers(tiny_llama(seed=3), layout="plain"))
    seen = []
    for temperature in (0.5, 1.0):
        exit_policy = ScriptedExit([(2, 1)], ObservationSpec(confidence=True))
        options = {"max_new_tokens": 3, "do_sample": True, "temperature": temperature, "top_k": 1, "seed": 0}
        engine.generate([5, 6], policy=Policy(exit_policy), **options)
        seen.append(exit_policy.records[0].confidences)
    assert seen[0] == seen[1] is not None
    assert seen[0][0] < 1.0  # of the filtered distribution, top_k = 1, it would be 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_processors_may_return_any_floating_type(dtype: torch.dtype) -> None:
    """With and without drafts, greedy and sampled; scores that float64 keeps as they are give the same text."""
    generator = SelfSpecGenerator(from_transformers(tiny_llama(late_scale=0.9)))
    processor, same = (LogitsProcessorList([InDtype(one)]) for one in (dtype, torch.float32))
    for policy in ("ar", "ls:2-4"):
        for options in ({}, {"do_sample": True, "seed": 3}):
            common = {"max_new_tokens": 10, "policy": policy, **options}
            found = generator.generate([5, 1, 7], logits_processor=processor, **common).new_tokens
            assert len(found) == 10
            if dtype is torch.float64:
                assert found == generator.generate([5, 1, 7], logits_processor=same, **common).new_tokens
