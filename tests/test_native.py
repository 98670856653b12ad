"""Our own kernels: they compute what transformers does, row by row the same in any company, and nothing needs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_policies import EVERY_POLICY, named_policy
from tiny_llama import VOCAB_SIZE, full_logits, tiny_llama
from torch import Tensor

from layerskip_models import LayerSkipModel, from_transformers, loading
from layerskip_models.kernels import library, native_layers, native_linear
from layerskip_models.kernels.native_linear import (
    MOST_ROWS,
    NativeInt8Linear,
    NativeLinear,
    native_works,
    operators_only,
)
from layerskip_models.linear import possible_layouts
from selfspec import SelfSpecGenerator
from selfspec.graphs.capture import RecordedOperations
from selfspec.kv_cache import KVCache

CPU = torch.device("cpu")
needs_native = pytest.mark.skipif(not native_works(CPU, torch.float32), reason="no native kernels here")


RUNNABLE = library.runnable_variants() if native_works(CPU, torch.float32) else ()
every_variant = pytest.mark.parametrize("variant", RUNNABLE)


@contextmanager
def use(variant: str) -> Iterator[None]:
    """Within it new linears and models take these kernels."""
    chosen = library.load(variant)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_linear, "kernels", lambda: chosen)
        patch.setattr(native_layers, "kernels", lambda: chosen)
        yield


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerskip_models.kernels.native_linear.kernels", lambda: None)


@needs_native
@every_variant
@given(
    seed=st.integers(0, 1000),
    rows=st.one_of(st.integers(1, 20), st.integers(1, 140)),
    size=st.integers(1, 90),
    outputs=st.integers(1, 70),
    kind=st.sampled_from(["float32", "bfloat16", "int8"]),
    bias=st.booleans(),
)
@settings(max_examples=100)
def test_a_linear_is_exact_whatever_its_shape(
    variant: str, seed: int, rows: int, size: int, outputs: int, kind: str, bias: bool
) -> None:
    weight, x = drawn(outputs, size, seed=seed), drawn(rows, size, seed=seed + 1)
    residual, shift = drawn(rows, outputs, seed=seed + 2), drawn(outputs, seed=seed + 3) if bias else None
    weight = weight.bfloat16().float() if kind == "bfloat16" else weight
    with use(variant):
        linear = NativeInt8Linear(weight, shift) if kind == "int8" else NativeLinear(weight, shift)
    assert linear.stored.element_size() == {"float32": 4, "bfloat16": 2, "int8": 1}[kind]
    if kind == "int8":
        steps = weight.abs().amax(dim=1, keepdim=True) / 127
        assert ((linear.weight - weight).abs() <= 0.5001 * steps).all()
    else:
        assert torch.equal(linear.weight, weight)
    exact = F.linear(x.double(), linear.weight.double(), None if shift is None else shift.double())
    torch.testing.assert_close(linear(x).double(), exact, rtol=0, atol=5e-5)
    kept = residual.clone()
    torch.testing.assert_close(linear.add_to(residual, x).double(), exact + residual, rtol=0, atol=5e-5)
    assert torch.equal(residual, kept)
    with operators_only():
        torch.testing.assert_close(linear(x).double(), exact, rtol=0, atol=5e-5)


@needs_native
@every_variant
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_is_the_same_in_any_company_and_on_any_threads(variant: str, threads: int) -> None:
    with use(variant):
        linear, x = NativeLinear(drawn(37, 51).bfloat16()), drawn(20, 51, seed=1)
    alone = torch.cat([linear(row) for row in x.split(1)])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for rows in range(1, 21):
            assert torch.equal(linear(x[:rows]), alone[:rows])
        many = x.repeat(2 * MOST_ROWS // len(x), 1)
        assert torch.equal(linear(many), alone.repeat(len(many) // len(x), 1))
        assert torch.equal(linear.add_to(linear(many), many), 2 * linear(many))
    finally:
        torch.set_num_threads(before)


def native_model(variant: str, **changes: Any) -> tuple[Any, LayerSkipModel]:
    changes = {"max_position_embeddings": 256, **changes}
    dtype = changes.pop("stored", torch.bfloat16)
    llama = tiny_llama(dtype=dtype, **changes).to(torch.float32)
    with use(variant):
        return llama, from_transformers(llama, layout="native")


@needs_native
@every_variant
@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 2},
        {"seed": 3, "stored": torch.float32},
        {"seed": 4, "attention_bias": True, "mlp_bias": True},
        {"seed": 5, "heads": 6, "kv_heads": 3, "hidden_size": 24, "tie_word_embeddings": True},
        {
            "seed": 6,
            "head_dim": 82,
            "hidden_size": 70,
            "intermediate_size": 45,
        },  # neither a multiple of four vectors nor the hidden size over heads
    ],
)
def test_layers_are_those_of_transformers(variant: str, changes: dict[str, Any]) -> None:
    llama, model = native_model(variant, **changes)
    text = [
        int(token)
        for token in torch.randint(0, VOCAB_SIZE, (MOST_ROWS + 9,), generator=torch.Generator().manual_seed(1))
    ]
    expected = full_logits(llama, text)
    for rows in (1, 2, 7, MOST_ROWS, len(text)):  # the last one in two pieces
        cache, parts = KVCache(model, len(text)), []
        for first in range(0, len(text), rows):
            chunk, seen = torch.tensor(text[first : first + rows]), dict[int, Tensor]()
            hidden = model.run_layers(model.embed(chunk), 0, model.num_layers, cache, first, seen.__setitem__)
            assert torch.equal(seen[model.num_layers], hidden) and len(seen) == model.num_layers
            parts.append(model.logits(hidden))
        torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-5, atol=2e-4)


@needs_native
@every_variant
def test_what_verification_computes_is_what_decoding_would_have(variant: str) -> None:
    """Bit for bit: so near-ties cannot tell speculative from plain decoding."""
    _, model = native_model(variant, seed=7)
    tokens = torch.randint(0, VOCAB_SIZE, (MOST_ROWS + 7,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        one = KVCache(model, len(tokens))
        alone = torch.cat([model.run_layers(model.embed(t), 0, 4, one, i) for i, t in enumerate(tokens.split(1))])
        for rows in (2, 3, 5, 6, 7, 11, 13, 24, MOST_ROWS, len(tokens)):
            cache = KVCache(model, len(tokens))
            together = [
                model.run_layers(model.embed(part), 0, 4, cache, rows * i) for i, part in enumerate(tokens.split(rows))
            ]
            assert torch.equal(torch.cat(together), alone)
            assert torch.equal(model.logits(torch.cat(together)), model.logits(alone))
            assert torch.equal(cache.keys, one.keys) and torch.equal(cache.values, one.values)


@needs_native
@pytest.mark.parametrize("name", EVERY_POLICY)
@pytest.mark.parametrize("layout", ["native", "int8", "native with a draft head"])
def test_every_policy_is_exact_bit_for_bit(name: str, layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if "draft" in layout:
        monkeypatch.setattr(loading, "DRAFT_HEAD_BYTES", 0)
        layout = "native"
    model = from_transformers(tiny_llama(seed=8, late_scale=0.8), layout=layout)
    plain = SelfSpecGenerator(model, policy="ar").generate([1, 2, 3, 4, 5], max_new_tokens=40).sequences
    speculative = SelfSpecGenerator(model, policy=named_policy(name, 2, model))
    assert torch.equal(speculative.generate([1, 2, 3, 4, 5], max_new_tokens=40).sequences, plain)


@needs_native
def test_not_a_number_is_not_lost() -> None:
    """Somebody must be told of broken weights; no kernel may turn them into numbers."""
    llama = tiny_llama(seed=9)
    with torch.no_grad():
        llama.model.layers[1].mlp.down_proj.weight[3, 4] = float("nan")
    model = from_transformers(llama, layout="native")
    for rows in (1, 9):
        hidden = model.run_layers(model.embed(torch.arange(rows)), 0, 4, KVCache(model, 16), 0)
        assert model.logits(hidden).isnan().all()


@needs_native
@every_variant
def test_a_far_context_and_large_scores(variant: str) -> None:
    """Softmax over many positions, some of whose scores are far apart."""
    llama = tiny_llama(seed=10, max_position_embeddings=700)
    text = [int(token) for token in torch.randint(0, VOCAB_SIZE, (600,), generator=torch.Generator().manual_seed(3))]
    with torch.no_grad():
        llama.model.layers[2].self_attn.q_proj.weight.mul_(60.0)
    with use(variant):
        model = from_transformers(llama, layout="native")
    cache = KVCache(model, 600)
    model.run_layers(model.embed(torch.tensor(text[:595])), 0, 4, cache, 0)
    hidden = model.run_layers(model.embed(torch.tensor(text[595:])), 0, 4, cache, 595)
    torch.testing.assert_close(model.logits(hidden), full_logits(llama, text)[595:], rtol=1e-4, atol=5e-3)


@needs_native
def test_those_who_watch_operators_see_all_of_them() -> None:
    linear, x = NativeLinear(drawn(6, 5)), drawn(2, 5, seed=1)
    y = torch.zeros(2, 6)
    recorded = RecordedOperations(lambda: y.copy_(linear(x)))
    x.copy_(drawn(2, 5, seed=2))
    recorded.replay()
    torch.testing.assert_close(y, F.linear(x, linear.weight))


def test_without_the_library_nothing_is_missing(no_kernels: None) -> None:
    llama = tiny_llama(seed=2)
    assert "native" not in possible_layouts(llama.lm_head.weight.detach())
    with pytest.raises(ValueError, match="native kernels"):
        from_transformers(llama, layout="native")
    with pytest.raises(RuntimeError, match="native kernels"):
        NativeLinear(drawn(3, 3))
    model = from_transformers(llama)
    hidden = model.run_layers(model.embed(torch.arange(5)), 0, 4, KVCache(model, 5), 0)
    torch.testing.assert_close(model.logits(hidden), full_logits(llama, list(range(5))), rtol=1e-5, atol=1e-4)
