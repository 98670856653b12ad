"""What our own kernels read and write in memory: their rooms are large enough, and numbers are where C expects them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from torch import Tensor

from exact_rooms import exact_rooms
from layerskip_models import LayerSkipModel, from_transformers
from layerskip_models.grouped_weight import GroupedWeight
from layerskip_models.kernels.native_linear import NativeGroupedLinear, NativeInt8Linear, NativeLinear
from layerskip_models.kernels.threads import on_threads
from layerskip_models.kv_cache import KVCache
from layerskip_models.norm import RMSNorm
from selfspec import SelfSpecGenerator
from test_four_bits import wide
from test_native import drawn, every_variant, needs_native, use
from test_products import drawn_weight, linear_of

pytestmark = needs_native
KINDS = ("float32", "bfloat16", "float16", "int8", "int4 64, offsets")


def mixed(model: LayerSkipModel, kinds: Sequence[str]) -> LayerSkipModel:
    """Return the same model, each of whose layers has weights of another kind."""
    layers = []
    for kind, layer in zip(kinds, model.layers, strict=True):
        shapes = {name: getattr(layer, name).weight.shape for name in ("qkv", "output", "gate_up", "down")}
        made = {name: linear_of(kind, *shape, seed=0, bias=False) for name, shape in shapes.items()}
        layers.append(replace(layer, **made))
    return model.with_layers(layers, model.head)


def run(model: LayerSkipModel, x: Tensor, sizes: list[int]) -> Tensor:
    """Run the rows of one text through all layers. sizes: of the passes."""
    cache = KVCache(model, len(x))
    return torch.cat([model.run_layers(part, 0, model.num_layers, cache) for part in x.split(sizes)])


@every_variant
def test_layers_of_different_kinds_stay_in_their_memory(variant: str) -> None:
    """Of every two kinds, either first: passes of growing size, in all of which a row is the same."""
    with use(variant):
        model = from_transformers(wide(num_layers=2, max_position_embeddings=68), layout="native")
    x = drawn(68, model.hidden_size)
    for kinds in permutations(KINDS, 2):
        with use(variant):
            own = mixed(model, kinds)
        with on_threads(1):
            alone = run(own, x, [1] * len(x))
        for threads in (1, 2):
            with on_threads(threads), exact_rooms():
                assert torch.equal(run(own, x, [1, 2, 3, 16, 46]), alone), kinds


@pytest.mark.parametrize("threads", [1, 3])
def test_generation_stays_in_its_memory(threads: int) -> None:
    """Steps, heads and prompts of a model whose first layer has 8 bits and the others 4, alone and together."""
    generator = SelfSpecGenerator(from_transformers(wide(max_position_embeddings=256), layout="int4"))
    prompts = [[1, 2], [1, 2, 3], [5] * 40, [7] * 60, [2] * 96]
    with on_threads(threads), exact_rooms():
        for policy, sampling in (("ar", {}), ("ls:1-3", {}), ("ls:1-3", {"do_sample": True, "top_p": 0.9, "seed": 3})):
            options = {"max_new_tokens": 3, "policy": policy, **sampling}
            alone = [generator.generate(prompt, **options).sequences for prompt in prompts]
            together = generator.generate_batch(prompts, **options)
            assert all(torch.equal(result.sequences, text) for result, text in zip(together, alone))


@pytest.mark.parametrize("kind", [NativeLinear, NativeInt8Linear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_that_is_not_contiguous_is_the_same_weight(kind: type[NativeLinear], dtype: torch.dtype) -> None:
    """Turned, every second column of a wider one, and one row that stands for all; biases likewise."""
    x, bias = drawn(3, 64, seed=1), drawn(128, seed=2)[::2]
    wider = drawn(64, 128).to(dtype)
    for strange in (wider[:, :64].T, wider[:, ::2], wider[:1, :64].expand(64, 64), wider.bfloat16().float()[:, ::2]):
        assert not strange.is_contiguous() and not bias.is_contiguous()
        found, same = kind(strange, bias), kind(strange.contiguous(), bias.contiguous())
        assert kind is NativeInt8Linear or torch.equal(found.weight, strange.float())
        assert torch.equal(found.weight, same.weight) and torch.equal(found(x), same(x))
        assert all(tensor.is_contiguous() for tensor in found.tensors)


@pytest.mark.parametrize("outputs", [8, 32])
def test_groups_that_are_not_contiguous_or_at_an_odd_address_are_the_same_weight(outputs: int) -> None:
    weight, x = drawn_weight(outputs, 128, 32, True, False), drawn(3, 128)
    turned = GroupedWeight(*(part.t().contiguous().t() for part in (weight.packed, weight.groups, weight.offsets)))
    room = torch.empty(weight.packed.numel() + 1, dtype=torch.uint8)
    room[1:] = weight.packed.flatten()
    odd = GroupedWeight(room[1:].view_as(weight.packed), weight.groups, weight.offsets)
    for other in (turned, odd):
        assert torch.equal(NativeGroupedLinear(other)(x), NativeGroupedLinear(weight)(x))


def test_rows_and_residuals_that_are_not_contiguous_are_the_same_rows() -> None:
    linear, norm = NativeLinear(drawn(16, 64)), RMSNorm(drawn(128, seed=2)[::2], 1e-5)
    x, residual = drawn(64, 5, seed=3).T, drawn(16, 5, seed=4).T
    assert torch.equal(linear(x), linear(x.contiguous()))
    assert torch.equal(linear.add_to(residual, x), linear.add_to(residual.contiguous(), x.contiguous()))
    assert torch.equal(linear.of_normalised(norm, x), linear.of_normalised(norm, x.contiguous()))
    for detail in ("token", "all"):
        found, same = (linear.choices_of_normalised(norm, rows, detail) for rows in (x, x.contiguous()))  # type: ignore[arg-type]
        assert torch.equal(found.numbers, same.numbers)
