"""Tiny random Llamas whose early exits often agree with the last layer, and a tokenizer for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fuzz_models import ROPES, random_model, word_tokenizer
from layerskip_models import LayerSkipModel
from layerskip_models.kv_cache import KVCache
from selfspec.engine.request import Request, make_request

VOCAB_SIZE = 24
CONTEXT = 64
WORDS = [*"abcdefghijkl", "ab", "ba", "cab", "fig", "bed", "head", " ", " a", " be", ".", ", ", "\n"]


def tiny_llama(
    *,
    num_layers: int = 4,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 8,
    hidden_size: int = 16,
    intermediate_size: int = 24,
    vocab_size: int = VOCAB_SIZE,
    rope: str | dict[str, Any] = "default",
    late_scale: float = 0.3,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **config: Any,
) -> LlamaForCausalLM:
    """A random model (see `random_model`) without any special token.

    rope: a name in ROPES, or a configuration's rope_parameters.
    """
    options = {"max_position_embeddings": CONTEXT, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    shape = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rope_parameters=dict(ROPES[rope] if isinstance(rope, str) else rope),
        **{**options, **config},
    )
    return random_model(shape, late_scale=late_scale, sharpness=1.5, seed=seed).to(dtype)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per entry of WORDS; the caller's own, who may change it."""
    return word_tokenizer(WORDS)


def reference_greedy(llama: LlamaForCausalLM, prompt: list[int], **options: Any) -> list[int]:
    """What transformers' own `generate(do_sample=False)` continues the prompt with; options of a GenerationConfig."""
    ids = torch.tensor([prompt], device=llama.device)
    config = GenerationConfig(do_sample=False, pad_token_id=0, **options)
    out = llama.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, tokenizer=tiny_tokenizer())
    assert isinstance(out, Tensor)
    return out[0, len(prompt) :].tolist()


def request_for(model: LayerSkipModel, prompt: list[int], *, seed: int | None = None, **options: Any) -> Request:
    """A checked call, as `generate` makes it; options of a GenerationConfig."""
    return make_request(
        model=model,
        defaults=model.generation_config,
        prompt=prompt,
        tokenizer=None,
        options={**options, "seed": seed},
    )


def lean_logits(model: LayerSkipModel, text: Sequence[int]) -> Tensor:
    """Logits of every position of a text, read in one pass, [n, vocab]."""
    with torch.inference_mode():
        hidden = model.run_layers(model.embed(torch.tensor(text)), 0, model.num_layers, KVCache(model, len(text)))
        return model.logits(hidden)


def full_logits(llama: LlamaForCausalLM, tokens: list[int]) -> Tensor:
    """Float32 logits of transformers' forward over a whole text, [n, vocab]."""
    with torch.no_grad():
        return llama(torch.tensor([tokens]), use_cache=False).logits[0].float()
