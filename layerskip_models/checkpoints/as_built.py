"""Whether a transformers model in memory computes what its weights say: every module of its family's own class, and no hooks.

Only weights, biases and the rotary frequencies are taken from a model. A hook, another forward, another module or a weight
of another kind would be left out, so it is refused by name. Numbers that somebody sets on a module by hand (`scaling`,
`variance_epsilon`) are not looked at: the configuration's are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from layerskip_models.checkpoints.parameters import built_on_meta

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

MERGE = "merge adapters into the weights first (PEFT: model = model.merge_and_unload())"
_INSTEAD = "or decode with transformers' own generate"
_HARMLESS_HOOKS = ("output_capturing_hook", "make_inputs_require_grads")
"""Hooks that transformers itself sets, which leave the output as it is."""
_BIASED = tuple(f".{name}_proj" for name in ("q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down"))
"""Linears whose bias is taken over, whatever the configuration says of it."""

_OF_AN_EMPTY_CLASS = frozenset({"__module__", "__doc__", "__firstlineno__", "__static_attributes__", "config_class"})


def check_as_built(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """ValueError that names the first module that computes something else than the family's class would."""
    own = dict(model.named_modules(remove_duplicate=False))
    everywhere = torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks
    _check_hooks("every module", *everywhere, harmless=("torch.",))  # its own only look
    for name, expected in built_on_meta(config, "the model").named_modules(remove_duplicate=False):
        if name not in own:
            raise ValueError(f"the model has no {name}, which its configuration builds: give the one it was built from")
        module, called = own[name], name or "the model"
        _check_hooks(called, module._forward_hooks, module._forward_pre_hooks)
        _check_class(called, module, expected.__class__)
        _check_parameters(called, module, expected)
    if len(own["model.layers"]) != config.num_hidden_layers:
        raise ValueError(
            f"the model has {len(own['model.layers'])} layers and its configuration says {config.num_hidden_layers}: "
            "set config.num_hidden_layers, and layer_idx of each layer"
        )


def _check_hooks(name: str, *kinds: dict[int, Any], harmless: tuple[str, ...] = ()) -> None:
    """harmless: how the names of hooks begin that are left alone."""
    for called in (_called(hook) for hooks in kinds for hook in hooks.values()):
        known = called.startswith("transformers.") and called.endswith(_HARMLESS_HOOKS)
        if not known and not called.startswith(harmless):
            raise ValueError(f"{name} has a forward hook ({called}), which would be left out: remove it, {_INSTEAD}")


def _check_class(name: str, module: nn.Module, expected: type[nn.Module]) -> None:
    """Check that a module is of exactly the family's class, and that nobody has replaced its forward."""
    own = module.__class__
    if own is not expected and own.__base__ is expected and not vars(own).keys() - _OF_AN_EMPTY_CLASS:
        raise ValueError(
            f"{name} is a {_called(own)}, a subclass of {_called(expected)}, and only the class itself is taken. It adds "
            f"nothing, so make it one: module.__class__ = {expected.__qualname__}"
        )
    if own is not expected:
        raise ValueError(
            f"{name} is a {_called(own)} where the configuration builds a {_called(expected)}, and what it adds "
            f"would be left out: {MERGE}, or put the original module back"
        )
    owner = next(base for base in expected.__mro__ if "forward" in vars(base))
    if "forward" in vars(module) or vars(owner)["forward"].__module__ != owner.__module__:
        raise ValueError(
            f"the forward of {name} has been replaced, and would be left out: restore it (accelerate's hooks: "
            f"accelerate.hooks.remove_hook_from_module(model, recurse=True)), {_INSTEAD}"
        )


def _check_parameters(name: str, module: nn.Module, expected: nn.Module) -> None:
    own = module._parameters | module._buffers
    for kind, value in (*expected._parameters.items(), *expected._buffers.items()):
        found, where = own.get(kind), f"{name}.{kind}"
        if kind == "bias" and name.endswith(_BIASED) and (value is None or found is None):
            continue
        if value is None and found is not None:
            raise ValueError(f"the model has a {where}, which would be left out: set it to None, {_INSTEAD}")
        if value is not None and (found is None or found.shape != value.shape):
            has = "missing" if found is None else f"of shape {list(found.shape)}"
            raise ValueError(f"{where} is {has} where the configuration says {list(value.shape)}: give one that fits")
        if found is not None and type(found) not in (nn.Parameter, Tensor, nn.Buffer):
            raise ValueError(f"{where} is a {_called(type(found))}, no ordinary tensor: load the model unquantised")


def _called(thing: Any) -> str:
    kind = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"


def rotary_angles(rotary: Any) -> Tensor:
    """Return the frequencies of transformers' rotary embedding; of longrope for short texts, whatever it read last."""
    found: Tensor = rotary.original_inv_freq if rotary.rope_type == "longrope" else rotary.inv_freq
    return found.detach()
