"""Speed and memory over the length of the context: what a long text costs beside reading its keys and values.

A prompt is run through the layers once per context, timed; what decoding costs there is then measured with every policy on
the same cache, which the generator keeps between calls: all but the last rows of the prompt are not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from bench.datasets import EncodedPrompt, load_prompts
from bench.memory import peak_bytes
from bench.peers import generation_settings
from bench.record import Line
from bench.roofline import best_fixed
from layerskip_models import LayerSkipModel
from policies import CostModel
from selfspec import SelfSpecGenerator
from selfspec.calibrate import synchronize
from selfspec.kv_cache import KVCache

CONTEXTS = (128, 1024, 4096, 16384)
"""Tokens of the prompt."""
_CHUNK = 64


def long_prompt(tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> EncodedPrompt:
    """The shipped prompts one behind the other, from the start again when they are used up, cut to so many tokens."""
    text = "\n\n".join(prompt.prompt for prompt in load_prompts())
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.long)
    repeated = ids.repeat(-(-num_tokens // ids.numel()))[:num_tokens]
    return EncodedPrompt(id=f"context-{num_tokens}", task="context", ids=repeated)


@contextmanager
def prefix_kept(model: LayerSkipModel, length: int) -> Iterator[None]:
    """Within it, passes over rows below `length` do nothing: the cache must hold these rows from an earlier call.

    Prefill is in small chunks meanwhile, so that only the last few rows run again.
    """
    original = model.run_layers

    def run_layers(
        hidden: Tensor,
        start: int,
        stop: int,
        cache: Any,
        position: int,
        capture: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        if position + hidden.shape[0] <= length:
            return hidden
        return original(hidden, start, stop, cache, position, capture)

    with patch.object(model, "run_layers", run_layers), patch("selfspec.decoding._PREFILL_CHUNK", _CHUNK):
        yield


def measure_context(
    generator: SelfSpecGenerator,
    prompt: EncodedPrompt,
    *,
    max_new_tokens: int,
    repeats: int,
    memory: bool,
    prefill: bool,
    cost: CostModel,
    write: Callable[[Line], None],
    advance: Callable[[str], None] = lambda label: None,
) -> None:
    """Prefill once, then plain decoding, the fixed setting that is best here by replay, and auto, in turn.

    memory: measure it, which takes a prefill more. prefill: False leaves the prompt unread; its keys and values are random.
    Writes a "prefill" line, a "decode" line per policy and repeat, and a "memory" line.
    """
    context = prompt.ids.numel()
    model = generator.model
    if memory:
        fresh = SelfSpecGenerator(model)  # without a cache, so that it is counted
        cache_bytes = []

        def afresh() -> None:
            result = fresh.generate(prompt.ids, max_new_tokens=max_new_tokens, policy="ar", **_GREEDY)
            cache_bytes.append(result.stats.peak_cache_bytes)

        peak = peak_bytes(model.device, afresh)
        del fresh
        write({"kind": "memory", "context": context, "peak_bytes": peak, "kv_bytes": cache_bytes[0]})
        advance("memory")
    # Its cache has a row for every token of the runs that follow, which therefore take it over.
    with nullcontext() if prefill else _unread(model, context - 1):
        first = generator.generate(prompt.ids, max_new_tokens=max_new_tokens, policy="ar", **_GREEDY)
    seconds = first.stats.time_to_first_token if prefill else None
    write({"kind": "prefill", "context": context, "time_to_first_token": seconds})
    advance("prefill")
    with prefix_kept(model, context - 1):
        fixed = best_fixed(generator, prompt, max_new_tokens, cost)
        policies = ["ar", fixed, "auto"]
        for policy in policies:
            _decode(generator, policy, prompt, max_new_tokens)
        for repeat in range(repeats):
            for offset in range(len(policies)):
                policy = policies[(repeat + offset) % len(policies)]
                line = _decode(generator, policy, prompt, max_new_tokens)
                tokens = line.pop("new_tokens")
                equal = tokens == first.new_tokens
                write({**line, "repeat": repeat, "outputs_equal": equal, "role": _role(policy)})
                advance(policy)


@contextmanager
def _unread(model: LayerSkipModel, length: int) -> Iterator[None]:
    """Within it, a new cache is full of random keys and values, and rows below `length` are not run."""

    def filled(model: LayerSkipModel, max_length: int) -> KVCache:
        cache = KVCache(model, max_length)
        for values in (cache.keys, cache.values):
            values.normal_()
        return cache

    with prefix_kept(model, length), patch("selfspec.generator.KVCache", filled):
        yield


_GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": []}


def _role(policy: str) -> str:
    return "best fixed" if policy.startswith("ls:") else {"ar": "plain"}.get(policy, policy)


def _decode(generator: SelfSpecGenerator, policy: str, prompt: EncodedPrompt, max_new_tokens: int) -> Line:
    generator.resolve_policy(policy).reset()
    result = generator.generate(prompt.ids, max_new_tokens=max_new_tokens, policy=policy, **_GREEDY)
    stats = result.stats
    return {
        "kind": "decode",
        "context": prompt.ids.numel(),
        "policy": policy,
        "tokens": stats.num_new_tokens - 1,
        "seconds": stats.seconds - stats.time_to_first_token,
        "etpl": stats.etpl,
        "new_tokens": result.new_tokens,
    }


class _Clock(BaseStreamer):
    """When the first new token was there; the prompt comes before it."""

    def __init__(self, device: torch.device) -> None:
        self.puts = 0
        self.first = 0.0
        self._device = device

    def put(self, value: Tensor) -> None:
        self.puts += 1
        if self.puts == 2:
            synchronize(self._device)
            self.first = perf_counter()

    def end(self) -> None:
        pass


def measure_transformers(network: LlamaForCausalLM, prompt: EncodedPrompt, max_new_tokens: int) -> Line:
    """transformers' own `generate` on the same prompt: time to the first token, and decoding after it, in one call."""
    ids = prompt.ids.to(network.device).unsqueeze(0)
    clock = _Clock(network.device)
    synchronize(network.device)
    start = perf_counter()
    with torch.inference_mode(), generation_settings(network):
        network.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            streamer=clock,
        )
    synchronize(network.device)
    end = perf_counter()
    return {
        "kind": "transformers",
        "context": prompt.ids.numel(),
        "tokens": max_new_tokens - 1,
        "seconds": end - clock.first,
        "time_to_first_token": clock.first - start,
    }


def usable_contexts(contexts: Sequence[int], max_new_tokens: int, max_positions: int) -> list[int]:
    """Those that leave room for the new tokens. Raises ValueError where none does."""
    usable = sorted({context for context in contexts if context + max_new_tokens <= max_positions})
    if not usable:
        raise ValueError(
            f"the model has {max_positions} positions: no context of {', '.join(map(str, contexts))} leaves room for "
            f"{max_new_tokens} new tokens"
        )
    return usable
