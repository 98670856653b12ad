"""The parameters that files are read into, against those of the model that transformers builds."""

from __future__ import annotations

from random import Random

import pytest
import torch

from fuzz_models import draw_config
from layerskip_models.checkpoints.config_checks import built_on_meta, shell_of
from layerskip_models.checkpoints.shell import RotaryFrequencies
from layerskip_models.families import FAMILIES


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 40))])
@pytest.mark.parametrize("kind", FAMILIES)
def test_names_shapes_ties_and_frequencies_are_transformers(kind: str, seed: int) -> None:
    config = draw_config(Random(f"{kind} {seed}"), kind, 24)
    if kind != "llama":
        config.mlp_bias = True  # fields that only some classes read, which a file may have all the same
    if kind in ("mistral", "phi3", "qwen2"):
        config.attention_bias = seed % 2 == 0
    theirs, ours = built_on_meta(config, "it"), shell_of(config, "it")
    assert shapes(ours.named_parameters()) == shapes(theirs.named_parameters())
    assert shapes(ours.state_dict().items()) == shapes(theirs.state_dict().items())
    rotary, own = type(theirs.model.rotary_emb)(config), RotaryFrequencies(config)
    assert torch.equal(own.inv_freq, rotary.inv_freq)
    assert torch.equal(own.original_inv_freq, rotary.original_inv_freq)
    assert own.attention_scaling == rotary.attention_scaling
    assert own.rope_type == rotary.rope_type


def shapes(named: object) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in named}  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_cannot_be_built_is_refused(kind: str) -> None:
    config = draw_config(Random(kind), kind, 24)
    config.pad_token_id = 24
    for build in (built_on_meta, shell_of):
        with pytest.raises(ValueError, match="builds no model"):
            build(config, "it")
