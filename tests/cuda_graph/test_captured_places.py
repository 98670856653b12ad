"""Which texts get captures, when they run from them, and what is in order before they begin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

import selfspec.cache.pool
from layerskip_models import LayerSkipModel, from_transformers
from layerskip_models.kv_cache import KVCache
from selfspec import SelfSpecGenerator
from selfspec.engine.runners.cuda_graph.runner import CudaGraphRunner
from test_captured import PROMPT
from tiny_llama import reference_greedy, tiny_llama

pytestmark = pytest.mark.usefixtures("small_captures")
Patch = pytest.MonkeyPatch


def captured(llama: LlamaForCausalLM, **options: Any) -> SelfSpecGenerator:
    return SelfSpecGenerator(from_transformers(llama, layout="plain"), runner="captured", **options)


@pytest.fixture
def made(monkeypatch: Patch) -> list[int]:
    """Positions of the cache of each runner that was made."""
    lengths: list[int] = []
    init = CudaGraphRunner.__init__

    def counted(self: CudaGraphRunner, model: Any, cache: KVCache, **options: Any) -> None:
        lengths.append(cache.max_length)
        init(self, model, cache, **options)

    monkeypatch.setattr(CudaGraphRunner, "__init__", counted)
    return lengths


def test_texts_in_a_batch_get_caches_of_their_own_length(llama64: LlamaForCausalLM, made: list[int]) -> None:
    engine = captured(llama64)
    prompts = [PROMPT, [9, 2], [4], [7, 7]]
    results = engine.generate_batch(prompts, max_new_tokens=8, policy="ls:2-3")
    assert made == []
    for prompt, result in zip(prompts, results):
        assert result.new_tokens == reference_greedy(llama64, prompt, max_new_tokens=8)
    with engine.engine() as texts:
        texts.add(PROMPT, max_new_tokens=8, policy="ls:2-3")
        alone = texts.cache_bytes
        texts.add([9, 2], max_new_tokens=8, policy="ls:2-3")
        assert texts.cache_bytes - alone < alone / 5
        while len(texts):
            texts.step()
    assert made == [64]


@pytest.mark.parametrize("prefix_cache", [0, 1, "1MB"])
def test_captures_outlast_texts_in_a_batch(prefix_cache: int | str, llama64: LlamaForCausalLM, made: list[int]) -> None:
    engine = captured(llama64, prefix_cache=prefix_cache)
    for _ in range(2):
        assert engine.generate(PROMPT, max_new_tokens=8, policy="ls:2-3").stats.runner == "captured"
        prompts = [[token, token + 1, 3] for token in range(20)]
        assert len(engine.generate_batch(prompts, max_new_tokens=4, policy="ls:2-3")) == 20
    assert len(made) == 1
    assert engine.generate(PROMPT, max_new_tokens=8, policy="ls:2-3").stats.num_captures == 0


@pytest.mark.parametrize(("policy", "spoilt"), [("ls:2-3", False), ("ls:2-3", True), ("ar", True)])
def test_a_text_that_is_alone_again_runs_from_captures_again(
    policy: str, spoilt: bool, llama64: LlamaForCausalLM, monkeypatch: Patch
) -> None:
    """spoilt: what eager rounds left behind the text is NaN."""
    replayed: list[int] = []
    run = CudaGraphRunner.run
    monkeypatch.setattr(CudaGraphRunner, "run", lambda self, *rest: (replayed.append(1), run(self, *rest))[1])
    engine, found = captured(llama64), []
    with engine.engine() as texts:
        first = texts.add(PROMPT, max_new_tokens=30, policy=policy)
        rounds = []
        for step in range(40):
            if step == 3:
                other = texts.add([9, 2], max_new_tokens=5, policy="ls:1-2")
            if spoilt and len(rounds) > 4 and rounds[-1] == rounds[-2]:
                slot = texts._slots[first]
                for memory in (slot.sequence.cache.values, slot.sequence.cache.keys.mT):
                    memory[:, :, slot.sequence.cache.length :] = torch.nan
                spoilt = False
            for progress in texts.step():
                found += progress.tokens if progress.ticket == first else []
                if progress.result is not None and progress.ticket == first:
                    assert progress.result.stats.runner == "eager"  # not all of it was captured
                assert progress.error is None
            rounds.append(len(replayed))
            if not len(texts):
                break
    assert other != first
    assert found == reference_greedy(llama64, PROMPT, max_new_tokens=30)
    assert 0 < rounds[2] == rounds[4] < rounds[-1]


def test_a_cache_that_does_not_fit_costs_a_warning(llama64: LlamaForCausalLM, monkeypatch: Patch) -> None:
    """The one that captures need is longer than the text."""
    engine = captured(llama64)

    def cache(model: LayerSkipModel, length: int) -> KVCache:
        if length > 20:
            raise torch.OutOfMemoryError("no memory")
        return KVCache(model, length)

    monkeypatch.setattr(selfspec.cache.pool, "KVCache", cache)
    with pytest.warns(RuntimeWarning, match="CUDA graphs are not used"):
        result = engine.generate(PROMPT, max_new_tokens=8, policy="ls:2-3")
    assert result.new_tokens == reference_greedy(llama64, PROMPT, max_new_tokens=8)
    assert engine.runner == "eager"


def test_rows_are_copied_behind_what_the_last_text_still_writes(monkeypatch: Patch) -> None:
    """A runner that comes back may have a pass under way on another stream than the next text's: `begin` waits for it."""
    seen: list[str] = []
    take, begin = KVCache.take, CudaGraphRunner.begin

    def taking(self: KVCache, source: KVCache, rows: int) -> None:
        seen.append("take")
        take(self, source, rows)

    def beginning(self: CudaGraphRunner) -> None:
        seen.append("begin")
        begin(self)

    monkeypatch.setattr(KVCache, "take", taking)
    monkeypatch.setattr(CudaGraphRunner, "begin", beginning)
    llama = tiny_llama(dtype=torch.float64, seed=3, max_position_embeddings=256)
    engine = captured(llama, prefix_cache="1MB")
    long = [3, 1] * 40
    engine.generate(long, max_new_tokens=4, policy="ar")
    seen.clear()
    engine.generate([5, *long], max_new_tokens=4, policy="ar")  # the kept text moves elsewhere
    assert seen.index("begin") < seen.index("take")
    seen.clear()
    engine.generate([5, *long[:50], 7], max_new_tokens=4, policy="ar")  # goes on from the kept one
    assert seen.index("begin") < seen.index("take")


class InPlace(LogitsProcessor):
    """Writes to what it is given."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.mul_(-3)


def test_a_processor_that_writes_to_its_scores_is_no_fault_of_graphs(llama64: LlamaForCausalLM) -> None:
    """What is compared with eager rounds are the model's own logits."""
    found = []
    for runner in ("eager", "captured"):
        engine = SelfSpecGenerator(from_transformers(llama64, layout="plain"), runner=runner)
        for policy in ("ar", "ls:2-3"):
            processors = LogitsProcessorList([InPlace()])
            result = engine.generate(PROMPT, max_new_tokens=12, policy=policy, logits_processor=processors)
            assert result.stats.runner == runner
            found.append(result.new_tokens)
    assert found == found[:1] * 4
