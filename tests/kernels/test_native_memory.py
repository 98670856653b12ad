"""What our own kernels read and write in memory: their rooms are large enough, and numbers are where C expects them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exact_rooms import check_mixed_layers, exact_rooms
from layerskip_models import from_transformers
from layerskip_models.kernels.native_linear import NativeInt8Linear, NativeLinear
from layerskip_models.kernels.threads import on_threads
from layerskip_models.norm import RMSNorm
from selfspec import SelfSpecGenerator
from test_four_bits import wide
from test_native import drawn, every_variant, needs_native, use

pytestmark = needs_native


@every_variant
def test_layers_of_different_kinds_stay_in_their_memory(variant: str) -> None:
    with use(variant):
        check_mixed_layers()


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


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "float32 that bfloat16 holds", "int8"])
def test_a_weight_that_is_not_contiguous_is_the_same_weight(kind: str) -> None:
    """Turned, every second column of a wider one, and one row that stands for all; biases likewise."""

    def weight(*shape: int) -> Tensor:
        full = drawn(*shape)
        if kind == "float32 that bfloat16 holds":
            return full.bfloat16().float()
        return full.to(getattr(torch, kind)) if "float" in kind else full

    x, bias = drawn(3, 64, seed=1), drawn(128, seed=2)[::2]
    for strange in (weight(64, 64).T, weight(64, 128)[:, ::2], weight(1, 64).expand(64, 64)):
        assert not strange.is_contiguous() and not bias.is_contiguous()
        plain = strange.contiguous()
        if kind == "int8":
            found, same = NativeInt8Linear(strange, bias), NativeInt8Linear(plain, bias.contiguous())
        else:
            found, same = NativeLinear(strange, bias), NativeLinear(plain, bias.contiguous())
            assert torch.equal(found.weight, plain.float())
        assert torch.equal(found.weight, same.weight) and torch.equal(found(x), same(x))
        assert all(tensor.is_contiguous() for tensor in found.tensors)


def test_rows_and_residuals_that_are_not_contiguous_are_the_same_rows() -> None:
    linear, norm = NativeLinear(drawn(16, 64)), RMSNorm(drawn(128, seed=2)[::2], 1e-5)
    x, residual = drawn(64, 5, seed=3).T, drawn(16, 5, seed=4).T
    assert torch.equal(linear(x), linear(x.contiguous()))
    assert torch.equal(linear.add_to(residual, x), linear.add_to(residual.contiguous(), x.contiguous()))
    assert torch.equal(linear.of_normalised(norm, x), linear.of_normalised(norm, x.contiguous()))
    for detail in ("token", "spread"):
        found, same = (linear.choices_of_normalised(norm, rows, detail) for rows in (x, x.contiguous()))  # type: ignore[arg-type]
        assert torch.equal(found.numbers, same.numbers)
