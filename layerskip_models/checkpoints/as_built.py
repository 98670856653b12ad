"""Whether a transformers model in memory computes what its weights and its configuration say, and nothing else.

Only weights, biases and the rotary frequencies are taken from a model. Whatever else can change its output (a hook, another
forward, another module, another scalar) is compared with what the family's own class builds from the configuration, and
refused by name where it differs. Attributes that the class doesn't have are left alone: its forward doesn't read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from layerskip_models.checkpoints.config_checks import built_on_meta

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

MERGE = "merge adapters into the weights first (PEFT: model = model.merge_and_unload())"
_INSTEAD = "or decode with transformers' own generate"
_NOT_READ = frozenset(
    {
        "training", "config", "attention_dropout", "gradient_checkpointing", "name_or_path", "padding_idx", "vocab_size",
        "num_embeddings", "in_features", "out_features", "max_seq_len_cached", "original_max_seq_len", "loss_type",
        "kernel_config", "scale_grad_by_freq", "sparse", "inplace", "p", "hidden_size", "intermediate_size",
        "embedding_dim", "norm_type", "warnings_issued", "attention_scaling",
    }
)  # fmt: skip
"""Attributes that change nothing, are checked in another way (dropout, shapes), or are taken over (attention_scaling)."""
_CALLS = frozenset({"forward", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__"})
_HARMLESS_HOOKS = frozenset(
    {
        ("transformers.utils.output_capturing", "install_output_capuring_hook.<locals>.output_capturing_hook"),
        (
            "transformers.modeling_utils",
            "PreTrainedModel.enable_input_require_grads.<locals>.make_inputs_require_grads",
        ),
    }
)
"""Hooks that transformers itself sets, which leave the output as it is: (module, qualified name)."""
_PLACING_HOOKS = frozenset({"AlignDevicesHook", "SequentialHook"})
_BIASED = tuple(f".{name}_proj" for name in ("q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down"))
"""Linears whose bias is taken over, whatever the configuration says of it."""


def check_as_built(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """ValueError that names the first module that computes something else than the family's class would."""
    built = built_on_meta(config, "the model")
    own = dict(model.named_modules(remove_duplicate=False))
    _check_global_hooks()
    _check_attention(config)
    for name, expected in built.named_modules(remove_duplicate=False):
        module = own.get(name)
        if module is None:
            raise ValueError(
                f"the model has no {name}, which its configuration builds: give it the configuration that it was built from"
            )
        _check_module(name or "the model", module, expected, config)
    num_layers = len(own["model.layers"])
    if num_layers != config.num_hidden_layers:
        raise ValueError(
            f"the model has {num_layers} layers and its configuration says {config.num_hidden_layers}: "
            "set config.num_hidden_layers, and layer_idx of each layer"
        )


def _check_module(name: str, module: nn.Module, expected: nn.Module, config: PreTrainedConfig) -> None:
    _check_hooks(name, module)
    _check_forward(name, module, expected.__class__)
    _check_parameters(name, module, expected)
    _check_scalars(name, module, expected)
    _check_dropout(name, module)
    other = vars(module).get("config")
    if other is not None and other is not config and other.to_dict() != config.to_dict():
        raise ValueError(f"{name} has a configuration of its own, unlike the model's: give it the model's, {_INSTEAD}")


def _check_hooks(name: str, module: nn.Module) -> None:
    for kind, hooks in (("forward hook", module._forward_hooks), ("forward pre-hook", module._forward_pre_hooks)):
        for hook in hooks.values():
            if not _is_harmless(hook):
                raise ValueError(
                    f"{name} has a {kind} ({_called(hook)}), and what it changes would be left out: remove it, {_INSTEAD}"
                )
    placed = vars(module).get("_hf_hook")
    if placed is not None and not _only_places(placed):
        raise ValueError(
            f"{name} has a {type(placed).__name__} of accelerate, which would be left out: call "
            f"accelerate.hooks.remove_hook_from_module(model, recurse=True), {_INSTEAD}"
        )


def _check_global_hooks() -> None:
    for hooks in (torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks):
        for hook in hooks.values():
            if not str(getattr(hook, "__module__", "")).startswith("torch."):  # PyTorch's own only look
                raise ValueError(
                    f"a forward hook is set for all modules ({_called(hook)}), and what it changes would be left out: "
                    f"remove it, {_INSTEAD}"
                )


def _check_attention(config: PreTrainedConfig) -> None:
    """An attention function that somebody registered may compute anything."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # a second: not for those who pass no such model

    chosen = config._attn_implementation
    if chosen is None or chosen == "eager" or "/" in chosen:  # with a slash it is a kernel from the hub
        return
    function = ALL_ATTENTION_FUNCTIONS.get(chosen)
    if function is not None and not function.__module__.startswith("transformers."):
        raise ValueError(
            f"the model's attention is {chosen!r} ({_called(function)}), which is not one of transformers' own and would be "
            f"left out: call model.set_attn_implementation('sdpa'), {_INSTEAD}"
        )


def _check_forward(name: str, module: nn.Module, expected: type[nn.Module]) -> None:
    """The module is of the family's class, or of one that computes the same, and nobody has replaced its forward."""
    kind = module.__class__
    own = _CALLS | {key for key, value in vars(expected).items() if callable(value) and not key.startswith("__")}
    if not issubclass(kind, expected):
        raise ValueError(
            f"{name} is a {_called(kind)} where the configuration builds a {_called(expected)}, and what it adds would be "
            f"left out: {MERGE}, or put the original module back"
        )
    for base in kind.__mro__[: kind.__mro__.index(expected)]:
        if changed := sorted(own & vars(base).keys()):
            raise ValueError(
                f"{name} is a {_called(kind)}, whose own {changed[0]} would be left out: give a "
                f"{_called(expected)}, {_INSTEAD}"
            )
    owner = next(base for base in expected.__mro__ if "forward" in vars(base))
    placed = _only_places(vars(module).get("_hf_hook"))
    replaced = sorted((own - {"forward"} if placed else own) & vars(module).keys())
    if placed and "forward" in vars(module) and not _is_own(vars(module).get("_old_forward"), module):
        replaced = ["forward"]
    if not replaced and vars(owner)["forward"].__module__ != owner.__module__:
        replaced = ["forward"]
    if replaced:
        raise ValueError(
            f"the {replaced[0]} of {name} has been replaced, and would be left out: restore it, {_INSTEAD}"
        )


def _is_own(forward: Any, module: nn.Module) -> bool:
    return getattr(forward, "__func__", None) is getattr(module.__class__, "forward", None)


def _check_parameters(name: str, module: nn.Module, expected: nn.Module) -> None:
    for kind, value in (*expected._parameters.items(), *expected._buffers.items()):
        found = getattr(module, kind, None)
        where = f"{name}.{kind}"
        if value is None:
            if found is not None and not (kind == "bias" and name.endswith(_BIASED)):
                raise ValueError(f"the model has a {where}, which would be left out: set it to None, {_INSTEAD}")
        elif kind not in module._parameters and kind not in module._buffers:
            raise ValueError(
                f"{where} is not a parameter of its own (it is computed, or missing): remove the parametrization "
                f"(torch.nn.utils.parametrize.remove_parametrizations), {_INSTEAD}"
            )
        elif kind == "bias" and found is None and name.endswith(_BIASED):
            continue
        elif found is None or found.shape != value.shape:
            has = "missing" if found is None else f"of shape {list(found.shape)}"
            raise ValueError(
                f"{where} is {has} where the configuration says {list(value.shape)}: give the one that fits"
            )
        elif type(found) not in (nn.Parameter, Tensor, nn.Buffer):
            raise ValueError(
                f"{where} is a {_called(type(found))}, not an ordinary tensor: load the model unquantised and whole"
            )


def _check_scalars(name: str, module: nn.Module, expected: nn.Module) -> None:
    for key in compared_names(expected):
        wanted, found = vars(expected)[key], vars(module).get(key)
        if key not in vars(module) or found != wanted:
            raise ValueError(
                f"{name}.{key} is {found!r} where the configuration builds {wanted!r}: set it back or change the "
                f"configuration, {_INSTEAD}"
            )


def _check_dropout(name: str, module: nn.Module) -> None:
    share = module.p if isinstance(module, nn.Dropout) else vars(module).get("attention_dropout")
    if module.training and share:
        raise ValueError(f"{name} is in training mode with a dropout of {share}: call model.eval() first")


def compared_names(module: nn.Module) -> list[str]:
    """The attributes of a module as built that its forward may read, other than parameters, buffers and modules."""
    return [
        key
        for key, value in vars(module).items()
        if not key.startswith("_")
        and key not in _NOT_READ
        and (value is None or isinstance(value, (bool, int, float, str)))
    ]


def _is_harmless(hook: Any) -> bool:
    return (getattr(hook, "__module__", None), getattr(hook, "__qualname__", None)) in _HARMLESS_HOOKS


def _only_places(hook: Any) -> bool:
    """Whether this is a hook with which accelerate moves inputs to a module's device, and nothing else."""
    if hook is None or not type(hook).__module__.startswith("accelerate.") or type(hook).__name__ not in _PLACING_HOOKS:
        return False
    return all(map(_only_places, getattr(hook, "hooks", ()))) and not getattr(hook, "offload", False)


def _called(thing: Any) -> str:
    kind = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"


class BeyondWeights:
    """What a model had besides its parameters when this was made, and whether it still has it. Cheap: every call asks.

    Parameters and the modules themselves are for others to watch. The model is referred to weakly.
    """

    def __init__(self, model: nn.Module) -> None:
        whole, *self._inner = model.modules()  # `model` may be a proxy
        self._root, self._kind = ref(whole), whole.__class__
        self._tables = [(module.__dict__, _getter(compared_names(module))) for module in model.modules()]
        self._config = getattr(model, "config", None)
        self._rotary = [
            module for module in model.modules() if isinstance(module._buffers.get("original_inv_freq"), Tensor)
        ]
        self._before = self._now()
        self._angles = [(scaling, angles.clone()) for scaling, angles in self._turns()]

    def changed(self) -> bool:
        """Whether something is different now."""
        if self._now() != self._before:
            return True
        now = list(self._turns())
        return any(
            scaling != old_scaling or not torch.equal(angles, old)
            for (scaling, angles), (old_scaling, old) in zip(now, self._angles)
        )

    def _now(self) -> list[Any]:
        found: list[Any] = [
            (
                id(table.get("forward")),
                id(table.get("_hf_hook")),
                *table["_forward_hooks"],
                None,
                *table["_forward_pre_hooks"],
                None,
                getter(table),
                table["training"] and (table.get("attention_dropout") or table.get("p")),
            )
            for table, getter in self._tables
        ]
        found += [module.__class__ for module in self._inner]
        root = self._root()  # None once it is freed, when nobody asks any more
        found.append(self._kind if root is None else root.__class__)
        found.append(len(torch_modules._global_forward_hooks) + len(torch_modules._global_forward_pre_hooks))
        found.append([(key, _frozen(value)) for key, value in _fields(self._config)])
        return found

    def _turns(self) -> Iterator[tuple[float, Tensor]]:
        """What `conversion` reads of each rotary embedding."""
        for module in self._rotary:
            table: Any = module
            yield table.attention_scaling, rotary_angles(table)


def rotary_angles(rotary: Any) -> Tensor:
    """The frequencies of transformers' rotary embedding; of longrope for short texts, whatever it read last."""
    found: Tensor = rotary.original_inv_freq if rotary.rope_type == "longrope" else rotary.inv_freq
    return found.detach()


def _getter(names: list[str]) -> Any:
    if not names:
        return lambda table: None
    getter = itemgetter(*names)

    def values(table: Mapping[str, Any]) -> Any:
        try:
            return getter(table)
        except KeyError:
            return KeyError

    return values


def _fields(config: Any) -> Iterator[tuple[str, Any]]:
    if config is not None:
        yield from vars(config).items()


def _frozen(value: Any) -> Any:
    """A copy of a list or a table, which may be changed in place."""
    if isinstance(value, list):
        return tuple(value)
    return tuple(value.items()) if isinstance(value, dict) else value
