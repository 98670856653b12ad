"""Changes one thing of a live transformers model at a time: each must be refused, or be in the engine's logits as well.

    python -m tests.fuzz.mutated_modules --minutes 10 --seed 0

Nothing is listed by hand: the attributes, parameters, buffers, submodules and configuration fields are whatever the model's
objects hold. `--live` changes the model between two calls of one generator instead of before the first.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fuzz_models import draw_config, random_model
from layerskip_models import from_transformers
from layerskip_models.families import FAMILIES
from layerskip_models.kv_cache import KVCache
from selfspec import SelfSpecGenerator

VOCAB_SIZE = 24
TEXT = [(7 * i * i + 3) % VOCAB_SIZE for i in range(24)]
_SCALED_ATTENTION = "selfspec_scaled_attention"


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of a model, in words and as a function."""

    about: str
    apply: Callable[[PreTrainedModel], object]


def build(kind: str, seed: int) -> PreTrainedModel:
    """A random model of one family, in float64."""
    random = Random(f"mutated {kind} {seed}")
    config = draw_config(random, kind, VOCAB_SIZE)
    config.num_hidden_layers = 3
    for name in ("layer_types", "no_rope_layers"):
        if getattr(config, name, None) is not None:
            setattr(config, name, (getattr(config, name) * 3)[:3])
    return random_model(config, late_scale=0.5, sharpness=1.5, seed=seed)


def mutations(model: PreTrainedModel) -> list[Mutation]:
    """All changes that are tried of a model. They are of modules by name, so they can be applied to its copies."""
    found = [
        Mutation("a forward hook for all modules", _global_hook),
        Mutation("another attention function", _other_attention),
        Mutation("training mode with dropout", _train_with_dropout),
        Mutation("training mode", lambda other: other.train()),
        Mutation("layers in another order", lambda other: _swap_layers(other)),
        Mutation("a layer less", lambda other: other.model.layers.__delitem__(1)),
        Mutation("the head untied", _untie),
        Mutation("the head tied", lambda other: setattr(other.lm_head, "weight", other.model.embed_tokens.weight)),
    ]
    for name, value in vars(model.config).items():
        for about, changed in _other_values(value):
            found.append(Mutation(f"config.{name} {about}", partial(_set_field, name, changed)))
    for name, module in model.named_modules():
        found += _of_module(name, module)
    return found


def _of_module(name: str, module: nn.Module) -> Iterator[Mutation]:
    def on(about: str, change: Callable[[Any], object]) -> Mutation:
        return Mutation(f"{name or 'model'}: {about}", lambda model: change(model.get_submodule(name)))

    yield on("forward hook", lambda own: own.register_forward_hook(lambda m, x, out: _scaled(out)))
    yield on("forward hook that only looks", lambda own: own.register_forward_hook(lambda m, x, out: None))
    yield on("forward pre-hook", lambda own: own.register_forward_pre_hook(_pre_hook, with_kwargs=True))
    yield on("backward hook", lambda own: own.register_full_backward_hook(lambda m, x, out: None))
    yield on("own forward", _patch_forward)
    yield on("a subclass's forward", _subclass)
    yield on("a subclass that adds nothing", lambda own: setattr(own, "__class__", type("Same", (type(own),), {})))
    yield on("an attribute more", lambda own: setattr(own, "something_else", 3.0))
    for key, value in vars(module).items():
        if key in ("_parameters", "_buffers", "_modules", "_backward_hooks", "_backward_pre_hooks"):
            continue
        for about, changed in _other_values(value):
            yield on(f"{key} {about}", partial(_set, key, changed))
    for key, parameter in module._parameters.items():
        if parameter is None:
            yield on(f"{key} added", partial(_add_parameter, key))
            continue
        yield on(f"{key} written", lambda own, key=key: getattr(own, key).data.mul_(1.25))  # type: ignore[misc]
        yield on(f"{key} replaced", partial(_replace_parameter, key))
        yield on(f"{key} parametrized", partial(_parametrize, key))
        if key == "bias":
            yield on("bias removed", lambda own: setattr(own, "bias", None))
    for key, buffer in module._buffers.items():
        if buffer is not None:
            yield on(f"{key} written", lambda own, key=key: getattr(own, key).mul_(1.5))  # type: ignore[misc]
            yield on(f"{key} replaced", lambda own, key=key: setattr(own, key, getattr(own, key) * 1.5))  # type: ignore[misc]
    for key, child in module._modules.items():
        if child is None or isinstance(child, nn.ModuleList):
            continue
        yield on(f"{key} left out", lambda own, key=key: setattr(own, key, nn.Identity()))  # type: ignore[misc]
        yield on(f"{key} wrapped", lambda own, key=key: setattr(own, key, _Wrapped(getattr(own, key))))  # type: ignore[misc]
    if isinstance(module, nn.SiLU) or "act" in name.rpartition(".")[2]:
        parent, _, key = name.rpartition(".")
        yield Mutation(f"{name}: GELU", lambda model: setattr(model.get_submodule(parent), key, nn.GELU()))


def _other_values(value: Any) -> Iterator[tuple[str, Any]]:
    """Values that an attribute might have instead."""
    if isinstance(value, bool):
        yield "negated", not value
    elif isinstance(value, int):
        yield "+ 1", value + 1
        yield "- 1", value - 1
    elif isinstance(value, float):
        yield "larger", value * 1.5 + 0.1
    elif value is None:
        yield "2", 2
        yield "0.5", 0.5
    elif isinstance(value, str):
        yield "another", f"{value}_other"
    elif isinstance(value, list) and len(set(map(repr, value))) > 1:
        yield "reversed", value[::-1]


class _Wrapped(nn.Module):
    """What adapters do: the module's own output, and something beside it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @property
    def weight(self) -> Any:
        return self.inner.weight

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _scaled(self.inner(*args, **kwargs))


def _scaled(out: Any) -> Any:
    """The first tensor of a module's output, changed."""
    if isinstance(out, Tensor):
        return out * 1.1 + 0.05 if out.is_floating_point() else out
    if isinstance(out, tuple):
        return (_scaled(out[0]), *out[1:])
    for key in ("logits", "last_hidden_state"):
        if getattr(out, key, None) is not None:
            out[key] = _scaled(out[key])
    return out


def _pre_hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
    kwargs = {k: _scaled(v) if k == "hidden_states" else v for k, v in kwargs.items()}
    return tuple(_scaled(arg) for arg in args), kwargs


def _patch_forward(module: Any) -> None:
    original = module.forward
    module.forward = lambda *args, **kwargs: _scaled(original(*args, **kwargs))


def _subclass(module: nn.Module) -> None:
    base = module.__class__

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _scaled(base.forward(self, *args, **kwargs))

    module.__class__ = type("Steered", (base,), {"forward": forward})


def _set(key: str, value: Any, module: Any) -> None:
    setattr(module, key, value)


def _set_field(key: str, value: Any, model: Any) -> None:
    setattr(model.config, key, value)


def _add_parameter(key: str, module: Any) -> None:
    size = module.weight.shape[0]
    values = torch.linspace(-0.5, 0.5, size, dtype=module.weight.dtype)
    setattr(module, key, nn.Parameter(values))


def _replace_parameter(key: str, module: Any) -> None:
    setattr(module, key, nn.Parameter(getattr(module, key).detach().clone() * 0.75))


def _parametrize(key: str, module: nn.Module) -> None:
    class Halved(nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            return values * 0.5

    nn.utils.parametrize.register_parametrization(module, key, Halved())


def _global_hook(model: PreTrainedModel) -> None:
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: _scaled(out) if isinstance(module, nn.Linear) else out
    )
    model._selfspec_undo = handle.remove


def _other_attention(model: PreTrainedModel) -> None:
    def scaled(*args: Any, **kwargs: Any) -> Any:
        out, weights = sdpa_attention_forward(*args, **kwargs)
        return out * 0.5, weights

    AttentionInterface.register(_SCALED_ATTENTION, scaled)
    model.config._attn_implementation = _SCALED_ATTENTION


def _train_with_dropout(model: PreTrainedModel) -> None:
    model.train()
    for module in model.modules():
        if "attention_dropout" in vars(module):
            module.attention_dropout = 0.5


def _swap_layers(model: Any) -> None:
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def _untie(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone() * 0.5)


def outcome(model: PreTrainedModel, mutation: Mutation, *, live: bool = False) -> str:
    """ "refused", "equal", "broken" (transformers itself fails), or what is wrong, beginning with "WRONG".

    live: a generator has decoded with the model before it is changed. The model is changed.
    """
    engine: SelfSpecGenerator | None = None
    if live:
        engine = SelfSpecGenerator(model, policy="ls:1-2")
        engine.generate(TEXT[:8], max_new_tokens=4)
    try:
        mutation.apply(model)
    except Exception:  # of any kind: transformers checks what a configuration is given
        return "broken"
    try:
        try:
            expected = _reference(model, live)
        except Exception:  # of any kind, from inside transformers
            expected = None
        try:
            if engine is not None:
                found: Any = engine.generate(TEXT[:8], max_new_tokens=12).new_tokens
            else:
                found = _logits(model)
        except ValueError as error:
            return "refused" if "\n" not in str(error) else f"WRONG: an error of several lines: {error}"
        except Exception as error:
            return "broken" if expected is None else f"WRONG: {type(error).__name__}: {error}"
        if expected is None:
            return "broken"
        if live:
            return "equal" if found == expected else f"WRONG: {found} instead of {expected}"
        off = float((found - expected).abs().max())
        return "equal" if off < 1e-4 else f"WRONG: logits differ by {off:.2g}"
    finally:
        undo = vars(model).pop("_selfspec_undo", None)
        if undo is not None:
            undo()


def _reference(model: PreTrainedModel, live: bool) -> Any:
    with torch.no_grad():
        if live:
            out = list(TEXT[:8])
            for _ in range(12):
                out.append(int(model(torch.tensor([out]), use_cache=False).logits[0, -1].argmax()))
            return out[8:]
        return model(torch.tensor([TEXT]), use_cache=False).logits[0].float()


def _logits(model: PreTrainedModel) -> Tensor:
    lean = from_transformers(model, layout="plain")
    with torch.inference_mode():
        hidden = lean.run_layers(lean.embed(torch.tensor(TEXT)), 0, lean.num_layers, KVCache(lean, len(TEXT)))
        return lean.logits(hidden)


def main(arguments: list[str] | None = None) -> int:
    """Try mutations until the time is over. Returns 1 if one was decoded wrongly."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.mutated_modules", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to go on")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument("--live", action="store_true", help="change the model between two calls of a generator")
    options = parser.parse_args(arguments)
    random, ends, counts = Random(options.seed), monotonic() + 60 * options.minutes, Counter[str]()
    while monotonic() < ends:
        kind, seed = random.choice([*FAMILIES]), random.randrange(1000)
        model = build(kind, seed)
        for mutation in random.sample(chosen := mutations(model), min(40, len(chosen))):
            found = outcome(copy.deepcopy(model), mutation, live=options.live)
            counts[found.partition(":")[0]] += 1
            if found.startswith("WRONG"):
                print(f"{kind}, seed {seed}, {mutation.about}: {found}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    return 1 if counts["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
