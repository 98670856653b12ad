"""Models of real shapes with random weights whose early layers agree with the last one about as often as the recipe says.

They cost what the real ones cost, at an acceptance that one chooses, without a download. They say nothing of text quality,
and whatever is measured with them is to be called "synthetic weights".

The recipe: seeded normal weights, no end-of-text token. Queries and keys are wide enough for attention to be peaked, so that
the next token depends on the context and greedy text does not loop; the head is sharp enough for probabilities as a language
model has them. Then each layer's two output matrices are scaled, in order, on random tokens, so that what the layer adds
has a chosen size relative to what it adds to: large in the first layers, small and falling behind them. The smaller the
later updates, the more often an early exit's argmax is already the last layer's.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from layerskip_models.checkpoints.loading import resolve_device
from layerskip_models.checkpoints.parameters import parameter_shapes
from layerskip_models.checkpoints.weights import SafetensorsWeights
from layerskip_models.families import FAMILIES
from layerskip_models.families.plain_config import known_config
from layerskip_models.training.exit_losses import run_layer

PREFIX = "synthetic:"
"""In front of a shape's name where a checkpoint's is expected."""
_CALIBRATION_TOKENS = 256
_QUERY_KEY_GAIN = 3**0.5  # attention logits of standard deviation 3
_SHARPNESS = 6.0  # what the head is multiplied by
_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip


def _shape(*sizes: int, **more: Any) -> Mapping[str, Any]:
    """Fields of a LlamaConfig. sizes: in the order of `_SIZES`."""
    return {**dict(zip(_SIZES, sizes, strict=True)), **more}


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "small": _shape(384, 12, 6, 6, 1024, 4096, 32768),
    "medium": _shape(1024, 24, 16, 8, 2816, 32000, 32768),
    "llama3.2-1B": _shape(
        2048, 16, 32, 8, 8192, 128256, 131072, head_dim=64, tie_word_embeddings=True, rope_parameters=_LLAMA3_ROPE
    ),
    "llama2-7B": _shape(4096, 32, 32, 32, 11008, 32000, 4096),
    "codellama-7B": _shape(4096, 32, 32, 32, 11008, 32016, 16384, rope_parameters=_rope(1e6)),
    "llama3-8B": _shape(4096, 32, 32, 8, 14336, 128256, 8192, rope_parameters=_rope(5e5)),
    "llama2-13B": _shape(5120, 40, 40, 40, 13824, 32000, 4096),
    "codellama-34B": _shape(8192, 48, 64, 8, 22016, 32000, 16384, rope_parameters=_rope(1e6)),
    "llama2-70B": _shape(8192, 80, 64, 8, 28672, 32000, 4096),
}
"""Shapes of Meta's seven LayerSkip checkpoints, and of two that a laptop runs."""
LOOPED: Mapping[str, Mapping[str, Any]] = {
    "ouro-1.4B": {
        **_shape(2048, 24, 16, 16, 5632, 49152, 65536),
        **{"model_type": "ouro", "total_ut_steps": 4, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e6},
        **{"hidden_act": "silu", "tie_word_embeddings": False},
    },
}
"""Shapes of looped models, as config.json has them. They have no recipe: none of their exits agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How large what each layer adds is, relative to the stream that it adds to (root mean squares).

    The first `wide` layers make the text; layer l behind them adds eps * decay^(l - wide). A smaller eps or decay makes early
    exits agree more often. seed: of all weights. Raises ValueError for eps or decay not above 0, and for wide < 0.
    """

    eps: float = 0.1
    decay: float = 0.8
    wide: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("eps", "decay"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.wide < 0:
            raise ValueError(f"wide must be at least 0, got {self.wide}")

    def update(self, layer: int, tied: bool = False) -> float:
        """Relative size of what layer 0, 1, .. adds. tied: the head is the embedding."""
        if layer >= self.wide:
            return self.eps * self.decay ** (layer - self.wide)
        return 3.0 if tied else 0.7  # tied: else a token would be its own likeliest successor


def parse_synthetic(name: str) -> tuple[str, Recipe]:
    """Read "synthetic:medium" or "synthetic:medium,eps=0.2,decay=0.7,wide=2,seed=1". Raises ValueError that lists options."""
    shape, *options = name.removeprefix(PREFIX).split(",")
    _fields_of(shape)
    kinds: dict[str, type] = {"eps": float, "decay": float, "wide": int, "seed": int}
    values: dict[str, Any] = {}
    for option in options:
        key, _, value = option.partition("=")
        if key not in kinds:
            raise ValueError(f"{name!r}: {key!r} is no option of a synthetic model: there are {', '.join(kinds)}")
        try:
            values[key] = kinds[key](value)
        except ValueError:
            raise ValueError(f"{name!r}: {key} must be a number, got {value!r}") from None
    return shape, Recipe(**values)


def _fields_of(shape: str) -> Mapping[str, Any]:
    if shape not in SHAPES:
        raise ValueError(f"unknown shape {shape!r}: there are {', '.join(SHAPES)}")
    return SHAPES[shape]


def synthetic_llama(
    shape: str | LlamaConfig,
    recipe: Recipe | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "auto",
) -> LlamaForCausalLM:
    """Make a transformers model with such weights, on the device, in the dtype; its name says that it is synthetic.

    shape: a name out of `SHAPES`, or a configuration of one's own. The same arguments give the same weights on the same kind
    of device. `from_transformers(model, release=True)` turns it into a `LayerSkipModel` without a second copy.
    Raises ValueError for an unknown shape.
    """
    recipe = recipe or Recipe()
    target = resolve_device(device)
    if isinstance(shape, str):
        config = LlamaConfig(**copy.deepcopy(dict(_fields_of(shape))))
        config.name_or_path = f"{PREFIX}{shape}"
    else:
        config = shape
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    config.dtype = dtype
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
    model = model.to_empty(device=target).eval()
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(target)
    model.tie_weights()
    model.generation_config = GenerationConfig(eos_token_id=None)
    generator = torch.Generator(target).manual_seed(recipe.seed)
    with torch.no_grad():
        _fill(model, generator)
        _scale(model, recipe, generator)
        for parameter in model.parameters():  # as published checkpoints are, whatever dtype the model has
            parameter.copy_(parameter.bfloat16())
    return model


def _fill(model: LlamaForCausalLM, generator: torch.Generator) -> None:
    """Fill with normal weights; norms with 1; biases, where there are any, with 0."""
    width, tied = model.config.hidden_size**-0.5, model.config.tie_word_embeddings
    # A tied head is the embedding: it keeps the head's scale, which the first norm takes out of the stream.
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        elif name.endswith("bias"):
            parameter.zero_()
        elif "embed_tokens" in name:
            parameter.normal_(0.0, _SHARPNESS * width if tied else 1.0, generator=generator)
        elif "q_proj" in name or "k_proj" in name:
            parameter.normal_(0.0, _QUERY_KEY_GAIN * width, generator=generator)
        else:
            gain = _SHARPNESS if "lm_head" in name else 1.0
            parameter.normal_(0.0, gain * parameter.shape[1] ** -0.5, generator=generator)


def _scale(model: LlamaForCausalLM, recipe: Recipe, generator: torch.Generator) -> None:
    """Scale every layer's output matrices, in order, on random tokens: attention's and the MLP's alike."""
    count = min(_CALIBRATION_TOKENS, model.config.max_position_embeddings)
    device = model.lm_head.weight.device
    tokens = torch.randint(model.config.vocab_size, (1, count), generator=generator, device=device)
    hidden = model.model.embed_tokens(tokens)
    positions = torch.arange(count, device=device)[None]
    rotary = model.model.rotary_emb(hidden, positions)
    for index, layer in enumerate(model.model.layers):
        size = recipe.update(index, model.config.tie_word_embeddings)
        added: dict[nn.Module, Tensor] = {}

        def keep(module: nn.Module, inputs: Any, output: Tensor, into: dict[nn.Module, Tensor] = added) -> None:
            into[module] = output

        attention, mlp = layer.self_attn.o_proj, layer.mlp.down_proj
        hooks = [matrix.register_forward_hook(keep) for matrix in (attention, mlp)]
        run_layer(layer, hidden, positions, rotary)
        attention.weight.mul_(size * _rms(hidden) / _rms(added[attention]))
        run_layer(layer, hidden, positions, rotary)
        mlp.weight.mul_(size * _rms(hidden + added[attention]) / _rms(added[mlp]))
        for hook in hooks:
            hook.remove()
        hidden = run_layer(layer, hidden, positions, rotary)


def _rms(values: Tensor) -> Tensor:
    return values.float().square().mean().sqrt()


class LoopedWeights(SafetensorsWeights):
    """Weights of a looped model that are in no file: seeded normal numbers, each parameter's made when it is loaded."""

    generation_config = GenerationConfig(eos_token_id=None)

    def __init__(self, shape: str) -> None:
        said, self.checkpoint = LOOPED[shape], f"{PREFIX}{shape}"
        self.config = known_config(FAMILIES[said["model_type"]], said, self.checkpoint)
        self._shapes = parameter_shapes(self.config)

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def load(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        made = torch.ones(self._shapes[name], dtype=torch.bfloat16)
        if "norm" in name:
            return made
        gain = 1.0 if "embed" in name else made.shape[1] ** -0.5
        return made.normal_(0.0, gain, generator=torch.Generator().manual_seed(crc32(name.encode())))
