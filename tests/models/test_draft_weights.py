"""Weights in fewer bits, one linear at a time. `test_fewer_bits` has texts that are drafted with them."""

from __future__ import annotations

import pytest
import torch

from layerskip_models.decoder_layer import Linear
from layerskip_models.draft_weights import rounded_linear
from layerskip_models.grouped_weight import GroupedWeight, pack_sixes
from layerskip_models.kernels.check import native_works
from layerskip_models.kernels.native_linear import NativeGroupedLinear, NativeInt8Linear

pytestmark = pytest.mark.skipif(not native_works(torch.device("cpu"), torch.float32), reason="no native kernels here")


@pytest.mark.parametrize("outputs", [64, 37])
@pytest.mark.parametrize("bits", [8, 6])
def test_weights_of_few_bits_are_rounded_to_four_from_what_they_stand_for(outputs: int, bits: int) -> None:
    weight = (
        torch.randn(outputs, 256, generator=torch.Generator().manual_seed(1)) * torch.logspace(-2, 0, outputs)[:, None]
    )
    linear: Linear = NativeInt8Linear(weight)
    if bits == 6:
        peaks = weight.abs().amax(1, keepdim=True) / 31
        packed = pack_sixes((weight / peaks).round() + 32)
        linear = NativeGroupedLinear(GroupedWeight(packed, peaks.repeat(1, 8), bits=6, zero=32))
    found = rounded_linear(linear, "int4", layer=5)
    assert isinstance(found, NativeGroupedLinear)
    assert ((found.weight - weight).norm(dim=1) < 0.15 * weight.norm(dim=1)).all()
