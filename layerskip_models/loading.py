"""From a checkpoint, or a transformers model in memory, to a `LayerSkipModel`.

transformers reads the files (safetensors only); this module fuses and lays out the weights. `load_model` hands each
layer's original weights back as soon as they are converted, so that nothing is resident twice; `from_transformers`
copies, because the model it is given must stay as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from layerskip_models.checkpoint_files import clear_errors, resolve_checkpoint
from layerskip_models.compact_linear import fits_half
from layerskip_models.linear import (
    COMPACT,
    LAYOUTS,
    Layout,
    PlainLinear,
    check_layout,
    compact_layout,
    fastest_layout,
)
from layerskip_models.model import DecoderLayer, LayerSkipModel, interleave_heads
from layerskip_models.norm import RMSNorm

DEMO_PATH = Path(__file__).parent / "demo"
"""The checkpoint that ships with the package."""

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)
SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn")
LAYERSKIP_CHECKPOINTS = (
    "facebook/layerskip-llama2-7B",
    "facebook/layerskip-llama2-13B",
    "facebook/layerskip-llama2-70B",
    "facebook/layerskip-codellama-7B",
    "facebook/layerskip-codellama-34B",
    "facebook/layerskip-llama3-8B",
    "facebook/layerskip-llama3.2-1B",
)
"""Meta's LayerSkip checkpoints, all of the Llama family."""

DRAFT_HEAD_BYTES = 16 << 20
"""Heads from this size on get a second one in 8 bits, which drafts are chosen with: smaller ones stay in a cache."""

_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """The device to run on: "auto" takes CUDA when there is one. ValueError for one that this machine lacks."""
    if str(device) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        torch.empty(0, device=resolved)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {str(device)!r} is not available here: use 'cpu' or 'auto' ({error})") from error
    return resolved


def resolve_dtype(dtype: str | torch.dtype, device: torch.device, checkpoint: torch.dtype | None) -> torch.dtype:
    """The dtype to run in: "auto" is float32 on a CPU (exact, and fast there) and the checkpoint's own elsewhere."""
    if isinstance(dtype, torch.dtype):
        chosen = dtype
    elif dtype == "int8":
        raise ValueError("int8 weights are this engine's own, beside which transformers needs full ones: use float32")
    elif dtype == "auto":
        chosen = torch.float32 if device.type == "cpu" or checkpoint is None else checkpoint
    elif dtype in _DTYPES:
        chosen = _DTYPES[dtype]
    else:
        raise ValueError(f"dtype must be one of auto, {', '.join(_DTYPES)}, got {dtype!r}")
    if chosen not in _DTYPES.values():
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {chosen}")
    return chosen


def arithmetic_dtype(weights: torch.dtype, device: torch.device) -> torch.dtype:
    """What a model with weights of this dtype is computed in: on a CPU, 16-bit weights take part in float32 arithmetic.

    PyTorch's products of 16-bit matrices on a CPU depend on how many rows they have, so that a text would depend on how it
    was drafted. In float32 it depends on the model and the prompt. Elsewhere a model is computed in its own dtype.
    """
    return torch.float32 if device.type == "cpu" and weights in (torch.bfloat16, torch.float16) else weights


def check_config(config: object, name: str) -> LlamaConfig:
    """Return the config if this engine runs such a model; ValueError that lists what is supported if not."""
    if not isinstance(config, LlamaConfig) or config.model_type != "llama":
        kind = getattr(config, "model_type", type(config).__name__)
        raise ValueError(
            f"{name} is a {kind!r} model; supported are {', '.join(SUPPORTED_ARCHITECTURES)} checkpoints "
            f"(Llama 2, Llama 3, CodeLlama), such as {', '.join(LAYERSKIP_CHECKPOINTS)}"
        )
    if config.hidden_act != "silu":
        raise ValueError(f"{name} uses hidden_act={config.hidden_act!r}; supported is 'silu'")
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope not in SUPPORTED_ROPE:
        raise ValueError(f"{name} uses {rope!r} rope scaling; supported are {', '.join(SUPPORTED_ROPE)}")
    if config.num_hidden_layers < 2:
        raise ValueError(f"{name} has {config.num_hidden_layers} layer; an early exit needs at least 2")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{name} is quantised; supported are float32, bfloat16 and float16 weights")
    return config


def load_model(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    layout: Layout | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
) -> LayerSkipModel:
    """Load a Llama-family checkpoint by hub name or local folder.

    dtype: "auto" (float32 on a CPU, the checkpoint's own elsewhere) or a name or torch.dtype. On a CPU "bfloat16" and
        "float16" round the weights to that dtype; the arithmetic stays float32 (`arithmetic_dtype`). "int8" on a CPU:
        weights rounded to 8 bits, all else in float32 (another model, a little; `int8_linear` says how).
    layout: of the weights; None times the possible ones and takes the fastest for each shape.
    Only safetensors files are read and no code of the checkpoint is run. Peak memory is the weights plus one layer.
    name_or_path: the output folder of `selfspec train` works as well as the `model/` folder in it.
    Raises ValueError for another architecture or NaN weights, FileNotFoundError or OSError when it cannot be found or read.
    """
    if dtype == "int8":
        dtype, layout = torch.float32, "int8"
    model = load_transformers(
        name_or_path, dtype=dtype, device=device, revision=revision, local_files_only=local_files_only
    )
    return from_transformers(model, layout=layout, release=True)


def load_transformers(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    revision: str | None = None,
    local_files_only: bool = False,
) -> LlamaForCausalLM:
    """The checkpoint as transformers' own model, in evaluation mode; arguments and errors as in `load_model`."""
    name = resolve_checkpoint(name_or_path)
    target = resolve_device(device)
    config = load_config(name, revision=revision, local_files_only=local_files_only)
    chosen = resolve_dtype(dtype, target, getattr(config, "dtype", None))
    with clear_errors(name):
        model = LlamaForCausalLM.from_pretrained(
            name,
            config=config,
            dtype=chosen,
            device_map={"": target},
            revision=revision,
            local_files_only=local_files_only,
            use_safetensors=True,
            trust_remote_code=False,
        )
    _check_finite(model, name)
    return model


def _check_finite(model: LlamaForCausalLM, name: str) -> None:
    """ValueError if a weight is NaN or infinite: nothing could be decoded with it."""
    for parameter_name, parameter in model.named_parameters():
        # A sum shows a NaN at the cost of reading; only where it is not finite every element is looked at.
        if not bool(parameter.sum(dtype=torch.float32).isfinite()) and not bool(parameter.isfinite().all()):
            raise ValueError(
                f"{name} holds NaN or infinite weights, first in {parameter_name}: "
                "the checkpoint is damaged or its training diverged; load another one"
            )


def load_config(
    name_or_path: str | Path, *, revision: str | None = None, local_files_only: bool = False
) -> LlamaConfig:
    """The checked configuration of a checkpoint; errors as in `load_model`."""
    name = resolve_checkpoint(name_or_path)
    with clear_errors(name):
        try:
            config = AutoConfig.from_pretrained(
                name, revision=revision, local_files_only=local_files_only, trust_remote_code=False
            )
        except ValueError as error:  # transformers' answer to a config.json of something else
            raise ValueError(
                f"{name} holds no model that transformers knows: give a Llama checkpoint, "
                f"a folder with config.json and *.safetensors ({error})"
            ) from error
    return check_config(config, name)


def load_tokenizer(name_or_path: str | Path, **options: object) -> PreTrainedTokenizerBase:
    """The tokenizer that lies beside a checkpoint. Raises OSError that names the remedy where there is none."""
    name = resolve_checkpoint(name_or_path)
    with clear_errors(name):
        try:
            return AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)
        except (ValueError, TypeError) as error:
            # transformers tries every kind of tokenizer and reports the last one that failed.
            raise FileNotFoundError(
                f"{name} has no tokenizer that can be loaded: save one beside the model with "
                "tokenizer.save_pretrained(), or load the model alone with load_model() and give token ids"
            ) from error


def load_demo(
    *, dtype: str | torch.dtype = "auto", device: str | torch.device = "auto"
) -> tuple[LayerSkipModel, PreTrainedTokenizerBase]:
    """The demo checkpoint and its tokenizer, from the package, without a network."""
    return load_model(DEMO_PATH, dtype=dtype, device=device, local_files_only=True), load_tokenizer(DEMO_PATH)


def from_transformers(
    model: LlamaForCausalLM, *, layout: Layout | None = None, release: bool = False
) -> LayerSkipModel:
    """Convert a model that transformers holds in memory.

    release: False copies the weights and leaves `model` as it is (they are then resident twice, the price of a fused
        layout beside a model that stays usable); True empties `model` while converting it.
    Raises ValueError for another architecture, weights that are quantised, offloaded or on several devices.
    """
    config = check_transformers(model)
    with torch.inference_mode(False), torch.no_grad():
        return _convert(model, config, layout, release)


def check_transformers(model: object) -> LlamaConfig:
    """The configuration of a model in memory; ValueError if `from_transformers` cannot copy it."""
    if not isinstance(model, LlamaForCausalLM):
        raise ValueError(
            f"expected a {', '.join(SUPPORTED_ARCHITECTURES)}, got {type(model).__name__}; "
            f"supported checkpoints are Llama 2, Llama 3 and CodeLlama, such as {', '.join(LAYERSKIP_CHECKPOINTS)}"
        )
    config = check_config(model.config, model.config.name_or_path or type(model).__name__)
    _check_weights(model)
    return config


def _check_weights(model: LlamaForCausalLM) -> None:
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        raise ValueError(f"the model's weights must be on one device, they are on {sorted(map(str, devices))}")
    dtypes = {p.dtype for p in model.parameters()}
    if len(dtypes) != 1 or next(iter(dtypes)) not in _DTYPES.values():
        raise ValueError(
            f"the model's weights must be of one dtype out of {', '.join(_DTYPES)}, "
            f"they are {sorted(map(str, dtypes))}: call model.to(torch.float32), or load it unquantised"
        )


def _convert(model: LlamaForCausalLM, config: LlamaConfig, layout: Layout | None, release: bool) -> LayerSkipModel:
    decoder = model.model
    stored = decoder.norm.weight.dtype
    dtype = arithmetic_dtype(stored, decoder.norm.weight.device)
    layouts: dict[str, Layout] = {}
    if layout is not None:
        check_layout(layout, model.lm_head.weight.new_empty(0, dtype=dtype))

    def layout_of(kind: str, weight: Tensor) -> Layout:
        if layout is not None:
            return layout
        if kind not in layouts:  # layers are alike, so the first one's timing serves them all
            layouts[kind] = fastest_layout(weight) if dtype == stored else compact_layout(weight)
        if layouts[kind] == "half" and not fits_half(weight):
            return "plain"
        return layouts[kind]

    def norm(weight: Tensor) -> RMSNorm:
        return RMSNorm(weight.detach().to(dtype, copy=True), config.rms_norm_eps)

    layers = []
    for layer in decoder.layers:
        layers.append(convert_layer(layer, config, layout_of, dtype))
        if release:
            _release(layer)

    embedding = decoder.embed_tokens.weight.detach()
    head_weight = model.lm_head.weight.detach()
    tied = head_weight.data_ptr() == embedding.data_ptr()
    if not release:
        embedding = embedding.clone()
        head_weight = embedding if tied else head_weight.clone()
    head_weight = head_weight.to(dtype)
    head_layout = layout_of("head", head_weight)
    head = LAYOUTS[head_layout](head_weight, None)
    draft_head = None
    if head_layout == "native" and head.num_bytes >= DRAFT_HEAD_BYTES:
        draft_head = LAYOUTS["int8"](head_weight, None)
    if tied and isinstance(head, PlainLinear):
        embedding = head.weight  # of a transposed head a view: one copy serves both
    elif (
        dtype == stored and head_layout in COMPACT and torch.equal(embedding.bfloat16().to(embedding.dtype), embedding)
    ):
        embedding = embedding.bfloat16()
    result = LayerSkipModel(
        config,
        dtype=dtype,
        weights_dtype=stored,
        embedding=embedding,
        layers=layers,
        final_norm=norm(decoder.norm.weight),
        head=head,
        draft_head=draft_head,
        inv_freq=decoder.rotary_emb.inv_freq.detach().float().clone(),
        rotary_scaling=float(decoder.rotary_emb.attention_scaling),
        generation_config=copy.deepcopy(model.generation_config),
        name=config.name_or_path or None,
    )
    if release:
        _release(model)
    return result


def convert_layer(
    layer: LlamaDecoderLayer, config: LlamaConfig, layout_of: Callable[[str, Tensor], Layout], dtype: torch.dtype
) -> DecoderLayer:
    """Copy a transformers layer into the fused layout.

    layout_of: the layout of one of its four matrices, (kind, weight). dtype: what the layer is computed in.
    """
    norms = {
        "qkv": RMSNorm(layer.input_layernorm.weight.detach().to(dtype, copy=True), config.rms_norm_eps),
        "gate_up": RMSNorm(layer.post_attention_layernorm.weight.detach().to(dtype, copy=True), config.rms_norm_eps),
    }
    fused = {
        kind: (weight.to(dtype), None if bias is None else bias.to(dtype))
        for kind, (weight, bias) in _fuse_layer(layer, config).items()
    }
    layouts = {kind: layout_of(kind, weight) for kind, (weight, _) in fused.items()}
    for kind, before in norms.items():
        factors = None if layouts[kind] in COMPACT else before.fold()
        if factors is not None:
            fused[kind][0].mul_(factors)
    projections = {kind: LAYOUTS[layouts[kind]](*parts) for kind, parts in fused.items()}
    return DecoderLayer(input_norm=norms["qkv"], post_attention_norm=norms["gate_up"], **projections)


def _fuse_layer(layer: LlamaDecoderLayer, config: LlamaConfig) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Weight and bias of the four fused projections of a transformers layer, as new tensors."""
    attention, mlp = layer.self_attn, layer.mlp
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads

    def fuse(parts: list[Tensor | None]) -> Tensor | None:
        return None if parts[0] is None else torch.cat([p.detach() for p in parts if p is not None])

    def interleaved(values: Tensor | None, count: int) -> Tensor | None:
        return None if values is None else interleave_heads(values.detach(), count)

    def copied(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.detach().clone()

    def qkv(field: str) -> Tensor | None:
        query, key, value = (getattr(p, field) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        return fuse([interleaved(query, heads), interleaved(key, kv_heads), value])

    fused = {
        "qkv": (qkv("weight"), qkv("bias")),
        "output": (copied(attention.o_proj.weight), copied(attention.o_proj.bias)),
        "gate_up": (
            fuse([mlp.gate_proj.weight, mlp.up_proj.weight]),
            fuse([mlp.gate_proj.bias, mlp.up_proj.bias]),
        ),
        "down": (copied(mlp.down_proj.weight), copied(mlp.down_proj.bias)),
    }
    return {kind: (weight, bias) for kind, (weight, bias) in fused.items() if weight is not None}


def _release(module: nn.Module) -> None:
    """Give the memory of a module's parameters back."""
    for parameter in module.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype)


__all__ = [
    "DEMO_PATH",
    "LAYERSKIP_CHECKPOINTS",
    "SUPPORTED_ARCHITECTURES",
    "arithmetic_dtype",
    "check_config",
    "convert_layer",
    "from_transformers",
    "load_config",
    "load_demo",
    "load_model",
    "load_tokenizer",
    "load_transformers",
    "resolve_device",
    "resolve_dtype",
]
