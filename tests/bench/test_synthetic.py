"""Synthetic weights: deterministic, of the real shapes, agreeing about as often as the recipe says, in every dtype."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.synthetic import SHAPES, Recipe, parse_synthetic, synthetic_llama
from layerskip_models import from_transformers
from layerskip_models.checkpoints.supported import LAYERSKIP_CHECKPOINTS, check_config
from layerskip_models.training.exit_losses import exit_sums
from selfspec import SelfSpecGenerator
from tiny_llama import full_logits

PARAMETERS = {  # of Meta's checkpoints, in units of 1e9
    "llama3.2-1B": 1.236, "llama2-7B": 6.738, "codellama-7B": 6.739, "llama3-8B": 8.030, "llama2-13B": 13.016,
    "codellama-34B": 33.744, "llama2-70B": 68.977,
}  # fmt: skip


def config(**changes: object) -> LlamaConfig:
    fields = {
        "hidden_size": 192, "num_hidden_layers": 8, "num_attention_heads": 6, "num_key_value_heads": 2,
        "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 512, **changes,
    }  # fmt: skip
    return LlamaConfig(**fields)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_those_of_the_checkpoints(name: str) -> None:
    fields = {key: dict(value) if isinstance(value, dict) else value for key, value in SHAPES[name].items()}
    shape = LlamaConfig(**fields)
    check_config(shape, name)
    assert shape.hidden_size % 64 == shape.intermediate_size % 64 == 0  # so that it can be measured in 4 bits
    if name in PARAMETERS:
        with torch.device("meta"):
            model = LlamaForCausalLM(shape)
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(PARAMETERS[name], abs=5e-4)


def test_all_of_metas_checkpoints_have_a_shape() -> None:
    assert {name.removeprefix("facebook/layerskip-") for name in LAYERSKIP_CHECKPOINTS} == set(PARAMETERS)
    assert set(PARAMETERS) < set(SHAPES)


def agreement_curve(model: LlamaForCausalLM) -> list[float]:
    """Of each exit with the last layer, on a random text."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(model.config.vocab_size, (1, 129), generator=generator)
    return (exit_sums(model.eval(), ids[:, :-1], ids[:, 1:])[1] / 128).tolist()


@pytest.mark.parametrize(
    ("dtype", "tied"),
    [
        (torch.float32, False),
        pytest.param(torch.float32, True, marks=pytest.mark.slow),
        (torch.bfloat16, False),
        pytest.param(torch.bfloat16, True, marks=pytest.mark.slow),
    ],
)
def test_agreement_follows_the_recipe(dtype: torch.dtype, tied: bool) -> None:
    make = lambda recipe: synthetic_llama(config(tie_word_embeddings=tied), recipe, dtype=dtype, device="cpu")  # noqa: E731
    model = make(Recipe())
    assert {p.dtype for p in model.parameters()} == {dtype}
    curve = agreement_curve(model)
    assert curve[-1] == 1
    assert curve[0] < 0.3  # the first two layers make the text
    assert 0.4 < curve[1] < curve[3] < curve[6]
    assert agreement_curve(make(Recipe(eps=0.02)))[2] > curve[2] + 0.1
    assert agreement_curve(make(Recipe(eps=0.5)))[2] < curve[2] - 0.1


def test_a_seed_repeats_exactly_and_another_does_not() -> None:
    one, two, other = (synthetic_llama(config(), Recipe(seed=seed), device="cpu") for seed in (3, 3, 4))
    states = [model.state_dict() for model in (one, two, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["lm_head.weight"], states[2]["lm_head.weight"])


def test_the_engine_runs_it_losslessly_and_its_text_does_not_loop() -> None:
    model = synthetic_llama(config(), device="cpu")
    generator = SelfSpecGenerator(from_transformers(model))
    plain = generator.generate([5, 77, 3], max_new_tokens=80, policy="ar")
    drafted = generator.generate([5, 77, 3], max_new_tokens=80, policy="ls:3-4")
    assert drafted.new_tokens == plain.new_tokens
    assert drafted.stats.num_accepted > 0
    assert len(set(plain.new_tokens)) > 60
    ids = [5, 77, 3]
    assert int(full_logits(model, ids)[-1].argmax()) == plain.new_tokens[0]


def test_names() -> None:
    assert parse_synthetic("synthetic:medium") == ("medium", Recipe())
    named = parse_synthetic("synthetic:llama2-7B,eps=0.2,decay=0.7,wide=1,seed=9")
    assert named == ("llama2-7B", Recipe(eps=0.2, decay=0.7, wide=1, seed=9))
    for wrong, message in (
        ("synthetic:tiny", "unknown shape 'tiny': there are small, medium"),
        ("synthetic:small,epsilon=1", "there are eps, decay"),
        ("synthetic:small,eps=x", "eps must be a number"),
        ("synthetic:small,eps=0", "eps must be above 0"),
        ("synthetic:small,wide=-1", "wide must be at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_synthetic(wrong)
    with pytest.raises(ValueError, match="unknown shape"):
        synthetic_llama("tiny")
    assert replace(Recipe(), wide=0).update(0) == 0.1
