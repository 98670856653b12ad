"""What a live transformers model computes beyond its weights is refused by name, or is in our logits, too."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from layerskip_models import from_transformers
from layerskip_models.families import FAMILIES
from selfspec import SelfSpecGenerator, custom_generate
from tests.fuzz.mutated_modules import build, mutations, outcome
from tiny_llama import reference_greedy, tiny_llama

PROMPT = [5, 1, 7]
EACH = 40  # of a family's mutations, one in so many is tried in a short run
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about what was changed


@cache
def family_model(kind: str) -> PreTrainedModel:
    return build(kind, 3)


def wrong_of(kind: str, *, first: int, step: int, live: bool = False) -> list[str]:
    """What came out wrong, of every `step`-th mutation."""
    chosen = mutations(family_model(kind))[first::step]
    assert len(chosen) > 3
    found = {m.about: outcome(copy.deepcopy(family_model(kind)), m, live=live) for m in chosen}
    assert "equal" in found.values()
    return [f"{about}: {what}" for about, what in found.items() if what.startswith("WRONG")]


@pytest.mark.parametrize("kind", FAMILIES)
def test_one_thing_changed_at_a_time(kind: str) -> None:
    assert wrong_of(kind, first=[*FAMILIES].index(kind), step=EACH) == []


@pytest.mark.slow
@pytest.mark.parametrize("live", [False, True], ids=["before", "between calls"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_anything_changed(kind: str, live: bool) -> None:
    assert wrong_of(kind, first=0, step=5 if live else 1, live=live) == []


def steer(model: PreTrainedModel) -> None:
    model.model.layers[1].register_forward_hook(lambda module, args, out: out * 1.5)


def steer_the_input_of_the_head(model: PreTrainedModel) -> None:
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def bias_of_the_head(model: PreTrainedModel) -> None:
    model.lm_head.bias = nn.Parameter(torch.randn(model.config.vocab_size, dtype=model.dtype))


def other_activation(model: PreTrainedModel) -> None:
    model.model.layers[2].mlp.act_fn = nn.GELU()


def other_scaling(model: PreTrainedModel) -> None:
    model.model.layers[0].self_attn.scaling *= 2


def other_eps(model: PreTrainedModel) -> None:
    model.model.norm.variance_epsilon = 0.5


def scaled_embedding(model: PreTrainedModel) -> None:
    class Scaled(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) * 4

    model.model.embed_tokens.__class__ = Scaled


def own_forward(model: PreTrainedModel) -> None:
    original = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda hidden: 2 * original(hidden)


REFUSED = {
    "a forward hook": (steer, r"model\.layers\.1 has a forward hook \(.*steer.*\).*remove it"),
    "a pre-hook of the head": (steer_the_input_of_the_head, "lm_head has a forward pre-hook"),
    "a bias of the head": (bias_of_the_head, r"lm_head\.bias"),
    "an activation": (other_activation, r"model\.layers\.2\.mlp\.act_fn is a .*GELU"),
    "attention's scaling": (other_scaling, r"model\.layers\.0\.self_attn\.scaling is"),
    "a norm's eps": (other_eps, r"model\.norm\.variance_epsilon is 0\.5"),
    "a scaled embedding": (scaled_embedding, r"model\.embed_tokens is a .*Scaled"),
    "a forward": (own_forward, r"the forward of model\.layers\.0\.mlp has been replaced"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_everywhere(name: str) -> None:
    """By from_transformers, by custom_generate, and by a generator that has decoded before."""
    change, message = REFUSED[name]
    llama = tiny_llama(dtype=torch.float64, seed=3)
    engine = SelfSpecGenerator(llama, policy="ls:2-4")
    engine.generate(PROMPT, max_new_tokens=3)
    change(llama)
    with pytest.raises(ValueError, match=message):
        engine.generate(PROMPT, max_new_tokens=3)
    with pytest.raises(ValueError, match=message):
        from_transformers(llama)
    ids = torch.tensor([PROMPT])
    with pytest.raises(ValueError, match=message):
        llama.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=custom_generate(), max_new_tokens=3)


def test_a_hook_that_is_removed_again() -> None:
    llama = tiny_llama(dtype=torch.float64, seed=3)
    engine = SelfSpecGenerator(llama, policy="ls:2-4")
    before = engine.generate(PROMPT, max_new_tokens=12).new_tokens
    handle = llama.model.layers[0].register_forward_hook(lambda module, args, out: out * 1.5)
    with pytest.raises(ValueError, match="forward hook"):
        engine.generate(PROMPT, max_new_tokens=12)
    handle.remove()
    assert engine.generate(PROMPT, max_new_tokens=12).new_tokens == before


def test_hooks_of_transformers_itself_stay() -> None:
    """Those that keep hidden states, and that of training with gradient checkpoints."""
    llama = tiny_llama(dtype=torch.float64, seed=3)
    llama(torch.tensor([PROMPT]), output_hidden_states=True)
    llama.enable_input_require_grads()
    assert any(module._forward_hooks for module in llama.modules())
    expected = reference_greedy(llama, PROMPT, max_new_tokens=12)
    assert SelfSpecGenerator(llama, policy="ls:2-4").generate(PROMPT, max_new_tokens=12).new_tokens == expected


def test_accelerate_may_place_modules() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    llama = tiny_llama(dtype=torch.float64, seed=3)
    expected = reference_greedy(llama, PROMPT, max_new_tokens=12)
    for module in llama.modules():
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True))
    assert SelfSpecGenerator(llama, policy="ls:2-4").generate(PROMPT, max_new_tokens=12).new_tokens == expected

    class Doubles(hooks.ModelHook):
        def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
            return output * 2

    hooks.add_hook_to_module(llama.model.layers[0].mlp, Doubles())
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp has a Doubles of accelerate"):
        from_transformers(llama)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("place", ["self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.gate_proj"])
def test_a_bias_on_one_linear_of_several_is_taken_over(place: str, share: bool) -> None:
    llama = tiny_llama(dtype=torch.float64, seed=3)
    linear = llama.model.layers[1].get_submodule(place)
    assert isinstance(linear, nn.Linear)
    linear.bias = nn.Parameter(torch.linspace(-3, 3, linear.out_features, dtype=torch.float64))
    expected = reference_greedy(llama, PROMPT, max_new_tokens=20)
    model = from_transformers(llama, layout="plain", share=share)
    assert SelfSpecGenerator(model).generate(PROMPT, max_new_tokens=20, policy="ls:2-4").new_tokens == expected


def test_rotary_frequencies_that_are_written_are_noticed() -> None:
    llama = tiny_llama(dtype=torch.float64, seed=3)
    engine = SelfSpecGenerator(llama, policy="ls:2-4")
    first = engine.generate(PROMPT, max_new_tokens=20).new_tokens
    llama.model.rotary_emb.inv_freq.mul_(0.1)
    llama.model.rotary_emb.attention_scaling = 2.0
    changed = reference_greedy(llama, PROMPT, max_new_tokens=20)
    assert changed != first
    assert engine.generate(PROMPT, max_new_tokens=20).new_tokens == changed
