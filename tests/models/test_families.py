"""Every family of models against transformers' own: logits, texts, kernels and captures, over generated configurations."""

from __future__ import annotations

import copy
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Phi3Config, PreTrainedModel

import layerskip_models.checkpoints.conversion
from fuzz_models import draw_config, random_model
from layerskip_models import LayerSkipModel, from_transformers, load_model
from layerskip_models.checkpoints.parameters import HEAD, built_on_meta, parameter_shapes, rotary_frequencies
from layerskip_models.checkpoints.supported import check_config
from layerskip_models.families import FAMILIES, IN_TRANSFORMERS, family_of
from layerskip_models.families.unsupported import NEEDS
from layerskip_models.kernels.check import native_works
from layerskip_models.kv_cache import KVCache
from layerskip_models.prefill import prefill
from selfspec import SelfSpecGenerator
from selfspec.pacer.network import LeanPreVerifier, PreVerifierConfig, PreVerifierModule, describe_layer
from tiny_llama import VOCAB_SIZE, full_logits, reference_greedy

TEXT = [(7 * i * i + 3) % VOCAB_SIZE for i in range(40)]
SEEDS = 3
OTHERS = [kind for kind in IN_TRANSFORMERS if kind != "llama"]  # of which the other tests are
every_family = pytest.mark.parametrize("kind", OTHERS)
every_model = pytest.mark.parametrize(
    ("kind", "seed"),
    [
        pytest.param(kind, seed, marks=pytest.mark.slow if seed == SEEDS - 1 else ())
        for kind in FAMILIES
        for seed in range(SEEDS)
    ],
)
some_models = pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for kind in OTHERS for seed in range(2)])
needs_native = pytest.mark.skipif(not native_works(torch.device("cpu"), torch.float32), reason="no native kernels here")


@cache
def reference(kind: str, seed: int) -> PreTrainedModel:
    """In float64. Tests must not change it."""
    random = Random(f"{kind} {seed}")
    config = draw_config(random, kind, VOCAB_SIZE)
    if seed == 0:  # whatever is drawn, one model of each family has what the family is known for
        if kind in ("mistral", "phi3", "qwen2", "qwen3"):
            config.sliding_window, config.use_sliding_window = 5, True
        if kind in ("qwen2", "qwen3"):
            config.layer_types = ["full_attention", *["sliding_attention"] * (config.num_hidden_layers - 1)]
    return random_model(config, late_scale=random.choice([0.2, 0.5]), sharpness=1.5, seed=seed)


def read(model: LayerSkipModel, tokens: list[int], cache: KVCache) -> Tensor:
    """Logits of tokens that follow what the cache holds, [tokens, vocab]."""
    with torch.inference_mode():
        hidden = model.run_layers(model.embed(torch.tensor(tokens)), 0, model.num_layers, cache)
        return model.logits(hidden)


@every_model
def test_a_saved_checkpoint_has_transformers_logits(kind: str, seed: int, tmp_path: Path) -> None:
    """Whole, row by row, in pieces, and again after a roll back."""
    theirs = reference(kind, seed)
    theirs.save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="float64", device="cpu")
    assert isinstance(model.config, FAMILIES[kind].config)
    expected = full_logits(theirs, TEXT)
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)  # logits come back as float32
    for rows in (1, 7, len(TEXT)):
        cache = KVCache(model, len(TEXT))
        parts = [read(model, TEXT[first : first + rows], cache) for first in range(0, len(TEXT), rows)]
        close(torch.cat(parts), expected)
        cache.roll_back(21)
        close(read(model, TEXT[21:25], cache), expected[21:25])
        close(read(model, TEXT[25:], cache), expected[25:])
    cache = KVCache(model, len(TEXT))
    with torch.inference_mode():
        hidden = prefill(model, torch.tensor(TEXT), cache, most=11)
    close(model.logits(hidden), expected[-hidden.shape[0] :])


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.06), (torch.float16, 0.01)])
@every_family
def test_half_precision_is_close(kind: str, dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the dtype itself, as on other devices than a CPU."""
    monkeypatch.setattr(layerskip_models.checkpoints.conversion, "arithmetic_dtype", lambda weights, device: weights)
    theirs = copy.deepcopy(reference(kind, 1)).to(dtype)
    model = from_transformers(theirs)
    assert model.dtype == dtype
    expected = full_logits(theirs, TEXT[:12])
    error = (read(model, TEXT[:12], KVCache(model, 12)) - expected).square().mean().sqrt()
    assert error < bound * expected.abs().max()


@some_models
def test_shared_weights_have_them_and_follow_what_is_written(kind: str, seed: int) -> None:
    """Not interleaved, as on CUDA."""
    theirs = copy.deepcopy(reference(kind, seed))
    model = from_transformers(theirs, layout="plain", share=True)
    for _ in range(2):
        found = read(model, TEXT, KVCache(model, len(TEXT)))
        torch.testing.assert_close(found, full_logits(theirs, TEXT), rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.mul_(0.9)


@every_family
def test_a_pre_verifier_fits_every_family(kind: str) -> None:
    """Its own layer is Llama's, of the model's shape."""
    config = reference(kind, 3).config
    described = PreVerifierConfig(base_model=kind, fingerprint=(0.0,), exit_layers=(1,), layer=describe_layer(config))
    module = PreVerifierModule(described).eval()
    one = LeanPreVerifier(copy.deepcopy(module), torch.float64, torch.device("cpu"))
    hidden = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    nothing = torch.zeros(5, 3), torch.zeros(5, dtype=torch.long), torch.arange(5)
    with torch.no_grad():
        expected = module(hidden, *nothing, mask, 1).sigmoid()
        out = one.layer.run_layers(one.context_inputs(hidden.double(), 1), 0, 1, KVCache(one.layer, 5))
        torch.testing.assert_close(torch.tensor(one.estimates(out, 1)), expected, rtol=1e-4, atol=1e-5)


def test_the_windows_are_those_of_the_configurations() -> None:
    """Else the comparisons above might be of models without any."""
    assert set(from_transformers(reference("mistral", 0)).sliding_windows) == {5}
    assert set(from_transformers(reference("phi3", 0)).sliding_windows) == {5}
    for kind in ("qwen2", "qwen3"):
        first, *others = from_transformers(reference(kind, 0)).sliding_windows
        assert first is None and set(others) == {5}
    rotated = [layer.rotated for layer in from_transformers(reference("smollm3", 0)).layers]
    assert {True, False} == set(rotated)


def test_longrope_runs_as_far_as_its_angles_are_fixed() -> None:
    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
        "num_attention_heads": 2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
        "max_position_embeddings": 128, "original_max_position_embeddings": 20,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 20,
            "short_factor": [1.0, 1.5], "long_factor": [4.0, 9.0],
        },
    }  # fmt: skip
    theirs = random_model(Phi3Config(**shape), late_scale=0.3, sharpness=1.5, seed=0)
    full_logits(theirs, TEXT)  # leaves the angles of long texts in the rotary embedding
    model = from_transformers(theirs, layout="plain")
    assert model.max_positions == family_of(theirs.config).max_positions(theirs.config) == 20
    expected = full_logits(theirs, TEXT[:20])
    torch.testing.assert_close(read(model, TEXT[:20], KVCache(model, 20)), expected, rtol=1e-5, atol=1e-5)
    engine = SelfSpecGenerator(model)
    assert engine.generate(TEXT[:8], policy="ls:1-3").new_tokens == reference_greedy(
        theirs, TEXT[:8], max_new_tokens=12
    )
    with pytest.raises(ValueError, match="20"):
        engine.generate(TEXT[:8], max_new_tokens=13)


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 40))])
@pytest.mark.parametrize("kind", IN_TRANSFORMERS)
def test_names_shapes_ties_and_frequencies_are_transformers(kind: str, seed: int) -> None:
    """Of the parameters of the model that transformers builds."""
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


@pytest.mark.parametrize("kind", IN_TRANSFORMERS)
def test_what_cannot_be_built_is_refused(kind: str) -> None:
    config = draw_config(Random(kind), kind, 24)
    assert kind not in NEEDS
    config.pad_token_id = 24
    with pytest.raises(ValueError, match="builds no model"):
        built_on_meta(config, "it")
    with pytest.raises(ValueError, match="pad_token_id=24, where a token of the vocabulary of 24 is meant"):
        check_config(config, "it")
