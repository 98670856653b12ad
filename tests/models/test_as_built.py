"""What a live transformers model computes beyond its weights is refused by name, before and between calls."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from fuzz_models import draw_config, random_model
from layerskip_models import from_transformers
from layerskip_models.families import IN_TRANSFORMERS
from selfspec import SelfSpecGenerator, custom_generate
from tiny_llama import reference_greedy, tiny_llama

PROMPT = [5, 1, 7]


def doubled(module: nn.Module, args: Any, out: Any) -> Any:
    return (2 * out[0], *out[1:]) if isinstance(out, tuple) else out


class Wrapped(nn.Module):
    """What adapters do: the module's own output, and something beside it."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.weight = inner, inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


class Scaled(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 4


def steer_the_input_of_the_head(model: PreTrainedModel) -> None:
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def hook_of_accelerate(model: PreTrainedModel) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(model.model.layers[0].mlp, hooks.AlignDevicesHook(execution_device="cpu"))


def own_forward(model: PreTrainedModel) -> None:
    original = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda hidden: 2 * original(hidden)


def tensor_in_place_of_a_parameter(model: PreTrainedModel) -> None:
    weight = model.model.norm.weight
    del model.model.norm.weight
    model.model.norm.weight = 2 * weight.detach()


def put(place: str, made: Callable[[PreTrainedModel], Any]) -> Callable[[PreTrainedModel], None]:
    """A change that sets the attribute at this place of a model."""
    owner, _, name = place.rpartition(".")
    return lambda model: setattr(model.get_submodule(owner), name, made(model))


REFUSED: dict[str, tuple[Callable[[PreTrainedModel], object], str]] = {
    "a forward hook": (
        lambda model: model.model.layers[1].register_forward_hook(doubled),
        r"model\.layers\.1 has a forward hook \(.*doubled.*\).*remove it",
    ),
    "a pre-hook of the head": (steer_the_input_of_the_head, "lm_head has a forward hook"),
    "a hook of accelerate": (hook_of_accelerate, r"forward of model\.layers\.0\.mlp.*remove_hook_from_module"),
    "weight norm": (
        lambda model: nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj),
        r"model\.layers\.0\.mlp\.up_proj is a .*ParametrizedLinear",
    ),
    "a wrapper": (
        put("model.layers.1.self_attn.q_proj", lambda model: Wrapped(model.model.layers[1].self_attn.q_proj)),
        r"model\.layers\.1\.self_attn\.q_proj is a .*Wrapped.*merge_and_unload",
    ),
    "a norm left out": (
        put("model.layers.0.input_layernorm", lambda model: nn.Identity()),
        r"model\.layers\.0\.input_layernorm is a .*Identity",
    ),
    "a bias of the head": (
        put("lm_head.bias", lambda model: nn.Parameter(torch.randn(model.config.vocab_size, dtype=model.dtype))),
        r"lm_head\.bias",
    ),
    "an activation": (
        put("model.layers.2.mlp.act_fn", lambda model: nn.GELU()),
        r"model\.layers\.2\.mlp\.act_fn is a .*GELU",
    ),
    "a scaled embedding": (put("model.embed_tokens.__class__", lambda model: Scaled), r"model\.embed_tokens is a .*Scaled"),
    "another class": (
        put("__class__", lambda model: type("Steered", (type(model),), {"forward": lambda self, *args, **kwargs: None})),
        "the model is a .*Steered",
    ),
    "a forward": (own_forward, r"the forward of model\.layers\.0\.mlp has been replaced"),
    "a layer less": (lambda model: model.model.layers.pop(1), r"the model has no model\.layers\.3"),
    "a layer more": (
        lambda model: model.model.layers.append(copy.deepcopy(model.model.layers[1])),
        "the model has 5 layers and its configuration says 4",
    ),
    "no parameter": (tensor_in_place_of_a_parameter, r"model\.norm\.weight is missing"),
}  # fmt: skip


def test_an_empty_subclass_is_refused_with_a_remedy_that_works() -> None:
    class Empty(LlamaForCausalLM):
        """Adds nothing."""

    llama = tiny_llama(seed=3)
    expected = from_transformers(llama)
    llama.__class__ = Empty
    with pytest.raises(ValueError, match=r"Empty, a subclass of .*adds nothing.*module\.__class__ = LlamaForCausalLM"):
        from_transformers(llama)
    llama.__class__ = LlamaForCausalLM
    assert from_transformers(llama).num_layers == expected.num_layers


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


@pytest.mark.parametrize("before", [False, True], ids=["output", "input"])
def test_a_hook_for_all_modules_is_refused(before: bool) -> None:
    llama = tiny_llama(dtype=torch.float64, seed=3)
    engine = SelfSpecGenerator(llama, policy="ls:2-4")
    expected = engine.generate(PROMPT, max_new_tokens=6).new_tokens
    registries = nn.modules.module
    handle = (
        registries.register_module_forward_pre_hook(lambda module, args: None)
        if before
        else registries.register_module_forward_hook(doubled)
    )
    try:
        with pytest.raises(ValueError, match="every module has a forward hook"):
            engine.generate(PROMPT, max_new_tokens=6)
    finally:
        handle.remove()
    assert engine.generate(PROMPT, max_new_tokens=6).new_tokens == expected


def test_a_forward_replaced_for_a_whole_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubles(self: Any, hidden: Tensor) -> Tensor:
        return 2 * self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))

    monkeypatch.setattr(LlamaMLP, "forward", doubles)
    with pytest.raises(ValueError, match=r"the forward of model\.layers\.0\.mlp has been replaced"):
        from_transformers(tiny_llama(dtype=torch.float64, seed=3))


@pytest.mark.parametrize("kind", IN_TRANSFORMERS)
def test_a_hook_on_any_module_of_any_family_is_refused(kind: str) -> None:
    model = random_model(draw_config(Random(kind), kind, 24), late_scale=0.5, sharpness=1.5, seed=3)
    from_transformers(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):  # is never called
            continue
        handle = module.register_forward_hook(doubled)
        with pytest.raises(ValueError, match=f"^{re.escape(name or 'the model')} has a forward hook"):
            from_transformers(model)
        handle.remove()


def test_hooks_of_transformers_itself_stay() -> None:
    """Those that keep hidden states, and that of training with gradient checkpoints."""
    llama = tiny_llama(dtype=torch.float64, seed=3)
    llama(torch.tensor([PROMPT]), output_hidden_states=True)
    llama.enable_input_require_grads()
    assert any(module._forward_hooks for module in llama.modules())
    expected = reference_greedy(llama, PROMPT, max_new_tokens=12)
    assert SelfSpecGenerator(llama, policy="ls:2-4").generate(PROMPT, max_new_tokens=12).new_tokens == expected


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
