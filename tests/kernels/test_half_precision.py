"""16-bit models on a CPU: their weights as they are, float32 arithmetic, so a text depends on model and prompt alone."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from layerskip_models import from_transformers
from layerskip_models.checkpoints.conversion import arithmetic_dtype
from layerskip_models.kv_cache import KVCache
from layerskip_models.linear import default_layout
from selfspec import SelfSpecGenerator
from tiny_llama import full_logits, tiny_llama

HALVES = [torch.bfloat16, torch.float16]
PROMPTS = [[5, 1, 7], [2], [9, 9, 3, 0, 23, 4, 4, 1], list(range(20))]
needs_kernels = pytest.mark.skipif(
    default_layout(torch.zeros(4, 4)) != "native", reason="without our kernels rows may differ in the last bits"
)


def near_tied(dtype: torch.dtype, seed: int) -> LlamaForCausalLM:
    """A model whose head holds every token twice, the second time changed in few places by the last bit of the dtype: the
    two best logits then differ by about what another order of summation does."""
    llama = tiny_llama(num_layers=5, heads=4, kv_heads=2, hidden_size=64, vocab_size=48, dtype=dtype, seed=seed)
    with torch.no_grad():
        head = llama.lm_head.weight
        head[24:] = head[:24]
        head[24:, 0] = torch.nextafter(head[24:, 0].float(), torch.tensor(1e9)).to(dtype)
        llama.model.embed_tokens.weight[24:] = -llama.model.embed_tokens.weight[:24]
    return llama


@needs_kernels
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_the_text_is_that_of_the_float32_model_with_these_weights(dtype: torch.dtype, tied: bool) -> None:
    for seed in range(2):
        half = tiny_llama(dtype=dtype, seed=seed, tie_word_embeddings=tied, attention_bias=True)
        single = from_transformers(
            tiny_llama(dtype=dtype, seed=seed, tie_word_embeddings=tied, attention_bias=True).float(), layout="native"
        )
        model = from_transformers(half)
        assert (model.dtype, model.weights_dtype) == (torch.float32, dtype)
        ours, theirs = SelfSpecGenerator(model), SelfSpecGenerator(single)
        ids = torch.arange(20) % 24
        logits = [m.logits(m.run_layers(m.embed(ids), 0, m.num_layers, KVCache(m, 20))) for m in (model, single)]
        assert torch.equal(*logits)
        torch.testing.assert_close(logits[0], full_logits(half.float(), ids.tolist()), rtol=1e-5, atol=1e-4)
        for policy in ("ar", "ls:1-4"):
            left, right = (g.generate([seed, 3], max_new_tokens=30, policy=policy).new_tokens for g in (ours, theirs))
            assert left == right


@needs_kernels
@pytest.mark.parametrize(("dtype", "seed"), [*zip(HALVES, range(2))])
def test_a_text_depends_on_nothing_but_the_model_and_the_prompt(dtype: torch.dtype, seed: int) -> None:
    """Whatever drafts, however often, and with other prompts in between for `auto` to learn from."""
    engine = SelfSpecGenerator(near_tied(dtype, seed))
    expected = [engine.generate(prompt, max_new_tokens=30, policy="ar").new_tokens for prompt in PROMPTS]
    for policy in ("ls:1-6", "ls:3-2", "ls:4-9", "del", "dv:2", "spide:1", "auto:cost=layers"):
        for _ in range(3 if "auto" in policy else 1):
            for prompt, text in zip(PROMPTS, expected):
                assert engine.generate(prompt, max_new_tokens=30, policy=policy).new_tokens == text, policy


@pytest.mark.parametrize("dtype", HALVES)
def test_16_bit_weights_stay_16_bits(dtype: torch.dtype) -> None:
    llama = tiny_llama(dtype=dtype, seed=1)
    model = from_transformers(llama)
    assert model.embed_one(3).dtype == torch.float32
    assert torch.equal(model.embed_one(3), llama.model.embed_tokens.weight[3:4].float())
    if dtype == torch.bfloat16 and default_layout(torch.zeros(4, 4)) != "plain":
        full = from_transformers(tiny_llama(dtype=dtype, seed=1).float(), layout="plain")
        assert 2 * (model.layer_bytes - 2 * 16 * 4) == full.layer_bytes - 2 * 16 * 4  # two norms of 16 stay float32


def test_arithmetic() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for dtype in HALVES:
        assert arithmetic_dtype(dtype, cpu) == torch.float32
        assert arithmetic_dtype(dtype, cuda) == dtype
    assert arithmetic_dtype(torch.float64, cpu) == torch.float64
    assert arithmetic_dtype(torch.float32, cpu) == torch.float32
