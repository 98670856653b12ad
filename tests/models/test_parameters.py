"""Names, shapes and rotary frequencies of a model's parameters are those of the model that transformers builds."""

from __future__ import annotations

from random import Random

import pytest
import torch

from fuzz_models import draw_config
from layerskip_models.checkpoints.parameters import HEAD, built_on_meta, parameter_shapes, rotary_frequencies
from layerskip_models.checkpoints.supported import check_config
from layerskip_models.families import FAMILIES


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 40))])
@pytest.mark.parametrize("kind", FAMILIES)
def test_names_shapes_ties_and_frequencies_are_transformers(kind: str, seed: int) -> None:
    config = draw_config(Random(f"{kind} {seed}"), kind, 24)
    if kind != "llama":
        config.mlp_bias = True  # fields that only some classes read, which a file may have all the same
    if kind in ("mistral", "phi3", "qwen2"):
        config.attention_bias = seed % 2 == 0
    theirs, ours = built_on_meta(config, "it"), parameter_shapes(config)
    assert ours == {name: tuple(value.shape) for name, value in theirs.state_dict().items()}
    assert (HEAD in dict(theirs.named_parameters())) != config.tie_word_embeddings
    rotary = type(theirs.model.rotary_emb)(config)
    frequencies, scaling = rotary_frequencies(config)
    assert torch.equal(frequencies, rotary.original_inv_freq) and torch.equal(frequencies, rotary.inv_freq)
    assert scaling == rotary.attention_scaling


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_cannot_be_built_is_refused(kind: str) -> None:
    config = draw_config(Random(kind), kind, 24)
    config.pad_token_id = 24
    with pytest.raises(ValueError, match="builds no model"):
        built_on_meta(config, "it")
    with pytest.raises(ValueError, match="pad_token_id=24, where a token of the vocabulary of 24 is meant"):
        check_config(config, "it")
