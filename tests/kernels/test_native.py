"""Our own kernels: they compute what transformers does, row by row the same in any company, and nothing needs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.provenance import provenance
from layerskip_models import from_transformers
from layerskip_models.kernels import library
from layerskip_models.kernels.check import native_works
from layerskip_models.kernels.native_linear import NativeLinear
from layerskip_models.kernels.threads import SingleThreadedOperators
from layerskip_models.kv_cache import KVCache
from layerskip_models.norm import RMSNorm
from selfspec import SelfSpecGenerator
from selfspec.analysis.exactness import check_kernels
from tiny_llama import tiny_llama

CPU = torch.device("cpu")
RUNNABLE = library.runnable_variants() if native_works(CPU, torch.float32) else ()
needs_native = pytest.mark.skipif(not RUNNABLE, reason="no native kernels here")
every_variant = pytest.mark.parametrize("variant", RUNNABLE)


@contextmanager
def use(variant: str) -> Iterator[None]:
    """Within it new linears and models take these kernels."""
    chosen = library.load(variant)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "kernels", lambda: chosen)
        yield


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@needs_native
def test_where_kernels_run_they_are_used() -> None:
    assert from_transformers(tiny_llama(seed=2)).on_one_team().__class__ is SingleThreadedOperators


@needs_native
def test_calls_that_would_read_or_write_beyond_are_refused() -> None:
    """An off-by-one of a caller raises; it must not corrupt the memory behind a buffer."""
    linear, x = NativeLinear(drawn(6, 5), drawn(6)), drawn(3, 5)
    norm = RMSNorm(drawn(5), 1e-5)
    for wrong in (drawn(3, 4), drawn(3, 6), drawn(5), x.double(), x.bfloat16(), torch.empty(3, 5, device="meta")):
        calls = [linear, partial(linear.add_to, drawn(3, 6))]
        if wrong.dtype == torch.float32 and not wrong.is_meta:
            calls.append(partial(linear.of_normalised, norm))
        for call in calls:
            with pytest.raises(ValueError, match=r"x must be float32 \[rows, 5\] on the CPU"):
                call(wrong)
    for residual, message in ((drawn(2, 6), "residual has 2 rows, x has 3"), (drawn(3, 5), "residual must be float32")):
        with pytest.raises(ValueError, match=message):
            linear.add_to(residual, x)
    with pytest.raises(ValueError, match=r"norm's factors must be contiguous torch.float32 \[5\]"):
        linear.of_normalised(RMSNorm(drawn(4), 1e-5), x)
    for weight, bias in ((drawn(5), None), (drawn(0, 5), None), (drawn(6, 5), drawn(5)), (drawn(6, 5), drawn(6, 1))):
        with pytest.raises(ValueError, match="must be"):
            NativeLinear(weight, bias)


@needs_native
def test_passes_that_would_read_or_write_beyond_are_refused() -> None:
    """Before anything is written: of several texts, nothing of those that would fit either."""
    model = from_transformers(tiny_llama(seed=11), layout="native")
    hidden, size = drawn(4, model.hidden_size), model.num_layers

    def made(position: int = 3, length: int = 12, **changes: Any) -> KVCache:
        cache = KVCache(model, length)
        cache.values.fill_(1.0)  # not what memory held before, which may be NaN and then equals nothing
        cache.keys.fill_(2.0)
        for name, value in changes.items():
            setattr(cache, name, value)
        cache.declare(position)
        return cache

    whole, other = made(), made(9)
    before = whole.values.clone(), whole.keys.clone()

    def refused(message: str, cache: Any = whole, hidden: Tensor = hidden, start: int = 0, stop: int = size) -> None:
        with pytest.raises(ValueError, match=message):
            model.run_layers(hidden, start, stop, cache)

    uneven = made()
    uneven.extend(0, 2, 1)
    refused("4 rows from position 9 on do not fit into a cache of 12", other)
    refused("4 rows from position 9 on do not fit into a cache of 12", [(whole, 1), (other, 4)], drawn(5, 16))
    refused(r"4 rows were given for caches that expect \[2, 1\]", [(whole, 2), (other, 1)])
    refused("4 rows were given", [])
    refused("rows", [(whole, 5), (other, -1)])  # as many together, but C would count backwards
    for start, stop in ((0, size + 1), (-1, size), (3, 2)):
        refused("are not among", start=start, stop=stop)
    for wrong in (hidden[:, 1:], hidden.double()):
        refused("hidden must be float32", hidden=wrong)
    refused("hold different numbers of rows", uneven)
    refused("hold different numbers of rows", [(whole, 2), (uneven, 2)], start=1)
    shape = list(whole.values.shape)
    for change in ({0: 2}, {1: shape[1] + 1}, {3: shape[3] - 2}):
        sizes = [change.get(i, number) for i, number in enumerate(shape)]
        cache = made(values=torch.zeros(sizes), keys=torch.zeros(sizes).mT)
        refused("are not among|must both be in memory", cache)
        refused("are not among|must both be in memory", [(whole, 2), (cache, 2)])
    keys, values = whole.keys, whole.values
    refused("must both be in memory", made(keys=keys.contiguous()))
    refused("must both be in memory", made(keys=keys[..., 1:]))
    refused("must be float32", made(values=values.double()))
    refused("must be float32", made(keys=keys.bfloat16()))
    short = [*shape[:2], 6, shape[3]]
    refused("7 rows do not fit into a cache of 6", made(values=torch.zeros(short), keys=torch.zeros(short).mT))
    far = model.rotary.shape[0]
    long = [*shape[:2], far + 9, shape[3]]
    longer = made(far - 2, max_length=far + 9, values=torch.zeros(long), keys=torch.zeros(long).mT)
    refused(f"{far + 2} rows are more than the rotary table's {far}", longer)
    assert torch.equal(whole.values, before[0]) and torch.equal(whole.keys, before[1])
    assert (whole.length, other.length) == (3, 9)


@needs_native
def test_a_cache_whose_memory_was_exchanged_is_looked_at_again() -> None:
    """What was checked once is remembered, for that memory only."""
    model = from_transformers(tiny_llama(seed=11), layout="native")
    cache, hidden = KVCache(model, 12), drawn(2, model.hidden_size)
    model.run_layers(hidden, 0, 4, cache)
    before = cache.values[:, :, :2].clone()
    cache.keys, cache.values = torch.zeros_like(cache.values).mT, torch.zeros_like(cache.values)
    cache.declare(0)
    model.run_layers(hidden, 0, 4, cache)
    assert torch.equal(cache.values[:, :, :2], before)
    cache.values = cache.values.double()
    with pytest.raises(ValueError, match="must be float32"):
        model.run_layers(hidden, 0, 4, cache)


@needs_native
@every_variant
def test_every_number_of_16_bits_is_read_as_what_it_is(variant: str) -> None:
    """All 65,536 of them, zeros of both signs, subnormal numbers, infinities and NaN; in whole vectors and in the rest."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        numbers = patterns.view(dtype).float()
        for width in (1, 64):  # one number beside zeros: in its sum nothing is rounded
            weight = torch.zeros(len(patterns) + 3, width, dtype=dtype)
            weight[: len(patterns), -1] = patterns.view(dtype)
            with use(variant):
                linear = NativeLinear(weight)
            assert linear.stored.dtype == dtype
            product = linear(torch.ones(1, width))[0, : len(patterns)]
            torch.testing.assert_close(product, numbers, rtol=0, atol=0, equal_nan=True)


@needs_native
def test_16_bits_stay_what_they_are_and_more_are_kept_only_where_needed() -> None:
    weight = drawn(6, 7)
    assert NativeLinear(weight.bfloat16()).stored.dtype == NativeLinear(weight.bfloat16().float()).stored.dtype
    assert NativeLinear(weight.half()).stored.dtype == NativeLinear(weight.half().float()).stored.dtype == torch.float16
    assert NativeLinear(weight).stored.dtype == torch.float32
    assert torch.equal(NativeLinear(weight.half()).weight, weight.half().float())


@needs_native
@every_variant
def test_what_ran_is_said_everywhere(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with use(variant):
        model = from_transformers(tiny_llama(seed=13), layout="native")
        assert provenance(CPU, torch.float32)["kernels"] == variant
        assert provenance(CPU, torch.float64)["kernels"] is None
        assert check_kernels(model).detail == f"selfspec's own kernels for {variant}"
        monkeypatch.setattr("selfspec.analysis.exactness.fault", lambda: "step computes something else")
        failed = check_kernels(model)
        assert (failed.passed, failed.detail) == (False, "step computes something else")
    plain = from_transformers(tiny_llama(seed=13), layout="plain")
    assert check_kernels(plain).detail == "PyTorch's operators"
    for made, kernels in ((model, variant), (plain, None)):
        assert made.kernels == kernels
        assert SelfSpecGenerator(made, policy="ls:2-2").generate([1, 2, 3], max_new_tokens=4).stats.kernels == kernels
