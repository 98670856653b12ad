"""After prefill nothing of the KV cache's size is allocated, and ten thousand tokens leave no trace in memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from decoding import decode
from layerskip_models import from_transformers
from layerskip_models.kv_cache import KVCache
from policies import Policy, parse_policy
from scripted_policies import StopBelow, fixed
from selfspec import SelfSpecGenerator
from selfspec.engine.runners.eager import EagerRunner
from selfspec.engine.sequence import Sequence
from tiny_llama import request_for, tiny_llama


class LargestAllocation(TorchDispatchMode):
    """Remembers the largest new storage that any operator returned, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self.operator = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in known:
                size = tensor.untyped_storage().nbytes()
                if size > self.num_bytes:
                    self.num_bytes, self.operator = size, str(func)
        return out


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("policy", ["ar", "ls:1-6", "stopping"])
def test_rounds_allocate_nothing_that_grows_with_the_context(policy: str, do_sample: bool) -> None:
    """A context of 8,192: one layer's keys would be 262 kB, a round's own tensors stay under a tenth of that."""
    llama = tiny_llama(num_layers=3, max_position_embeddings=8192, seed=3)
    model = from_transformers(llama, layout="plain")
    chosen = fixed(1, 6, StopBelow(0.3)) if policy == "stopping" else parse_policy(policy, num_layers=3)
    prompt = [i * i % 24 for i in range(2000)]
    cache = KVCache(model, 8192)
    one_layer_keys = cache.num_bytes // model.num_layers // 2
    assert one_layer_keys == 8192 * 8 * 4
    request = request_for(model, prompt, seed=1, max_new_tokens=30, do_sample=do_sample, eos_token_id=[])
    text = Sequence(model, cache, request, chosen)
    with torch.inference_mode():
        rounds = decode(text, EagerRunner(model))
        next(rounds)
        with LargestAllocation() as largest:
            for _ in rounds:
                pass
    assert text.num_new == 30
    # The largest are one layer's attention scores, rows x heads x context, or the mask of more rows: 7 x 2,030 floats.
    assert 0 < largest.num_bytes < one_layer_keys // 2, largest.operator
    assert cache.num_bytes == 2 * model.num_layers * one_layer_keys


def test_the_recorder_sees_a_concatenated_cache() -> None:
    """The measure itself: one `torch.cat` of a layer's keys would have been seen."""
    keys = torch.zeros(1, 1, 8192, 8)
    with torch.inference_mode(), LargestAllocation() as largest:
        torch.cat([keys[:, :, :2000], keys[:, :, :1]], dim=2)
    assert largest.num_bytes == 2001 * 8 * 4


def live_bytes() -> tuple[int, int]:
    """(tensors alive, their bytes), after a collection."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if issubclass(type(o), Tensor) and not o.is_mkldnn]
    return len(tensors), sum(t.untyped_storage().nbytes() for t in tensors)


@pytest.mark.slow
def test_ten_thousand_tokens_in_pieces_do_not_grow_memory() -> None:
    """One generator, 50 calls of 200 tokens: as many tensors and bytes alive at the end as after the first calls."""
    model = from_transformers(tiny_llama(num_layers=2, max_position_embeddings=256, seed=3), layout="plain")
    policy: Policy = parse_policy("ls:1-6", num_layers=2)
    engine = SelfSpecGenerator(model, policy=policy)
    after_warm_up = None
    produced = 0
    for piece in range(50):
        result = engine.generate(
            [piece % 24, 5], max_new_tokens=200, eos_token_id=[], do_sample=piece % 2 == 1, seed=None
        )
        produced += result.stats.num_new_tokens
        del result
        if piece == 3:
            after_warm_up = live_bytes()
    assert produced == 10_000
    assert live_bytes() == after_warm_up
