"""Pacer's pre-verification layer: one decoder layer over exit hidden states that estimates which drafts will be accepted.

The network is trained as a transformers module (`PreVerifierModule`, around the family's own `LlamaDecoderLayer`) and decodes
as a `LeanPreVerifier`, a `LayerSkipModel` of one layer; tests compare the two. A row is the exit hidden state of a
committed token (context), or of the row that produced a draft; only the latter get a draft-position embedding and features
of the distribution that the draft was taken from. The paper's design has no such features (docs/training.md).
Source: Pacer (Zhang et al. 2025), section 3.2.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from layerskip_models.checkpoints.conversion import LayerBuilder
from layerskip_models.checkpoints.module_folder import fingerprint, read_module, same_weights, with_tuples, write_module
from layerskip_models.checkpoints.typed_fields import check_types
from layerskip_models.checkpoints.weights import ModuleWeights
from layerskip_models.families import head_dim_of
from layerskip_models.families.described import LLAMA
from layerskip_models.kernels.check import native_works
from layerskip_models.linear import Layout, PlainLinear
from layerskip_models.model import LayerSkipModel
from layerskip_models.norm import RMSNorm
from policies.bounds import MAX_DRAFTS
from selfspec.pacer import OURS, PAPER

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedConfig

FOLDER = "pacer"
"""The name of the folder, next to the weights, that holds a checkpoint's own pre-verifier."""
CONFIG_FILE, WEIGHTS_FILE = "preverifier.json", "preverifier.safetensors"
FEATURES = ("log_confidence", "log_margin", "entropy")
"""Features of a draft row's distribution: log p1, log p1 - log p2 (of the two likeliest tokens), entropy in nats."""
_EARLIER = {"position_embedding": True, "features": True, "estimates": "conditional", "scope": "full"}
"""Fields that earlier versions wrote, and what they say of our design; with another value the file is refused."""
CONTEXT = 0
"""The draft index of a committed row; drafts are counted from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreVerifierConfig:
    """The model that a pre-verifier was trained for, and the network's design.

    base_model: name of the model whose drafts it estimates. fingerprint: of that model's weights, see `fingerprint`.
    exit_layers: those it was trained on. layer: of its own layer, the fields of a LlamaConfig of the base model's shape.
    max_drafts: draft positions that have an embedding of their own; later ones share the last.
    policy: the stopping rule's best known settings: exit_layer, b, t, rho. design: "paper" estimates for each token that it
        and all before it are accepted, "ours" the chance of each given those before it.
    Raises ValueError for impossible values.
    """

    base_model: str
    fingerprint: tuple[float, ...]
    exit_layers: tuple[int, ...]
    layer: dict[str, Any]
    max_drafts: int = 50
    policy: dict[str, float] = field(default_factory=dict)
    design: str = OURS

    def __post_init__(self) -> None:
        check_types(self)
        if not self.exit_layers or self.max_drafts < 1 or self.design not in (OURS, PAPER):
            raise ValueError(
                "a pre-verifier needs at least one exit layer, max_drafts >= 1, and a design that is known"
            )

    def llama_config(self) -> LlamaConfig:
        from transformers import LlamaConfig

        return LlamaConfig(**self.layer, attn_implementation="sdpa")


_LAYER_FIELDS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "max_position_embeddings", "rms_norm_eps", "rope_parameters", "attention_bias", "mlp_bias",
)  # fmt: skip


def describe_layer(config: PreTrainedConfig) -> dict[str, Any]:
    """Give LlamaConfig's fields for this model's pre-verifier as JSON has them. Its layer is Llama's in any family."""
    described = {name: getattr(config, name) for name in _LAYER_FIELDS if getattr(config, name, None) is not None}
    rope = described["rope_parameters"]
    if rope["rope_type"] not in LLAMA.ropes or rope.get("partial_rotary_factor", 1.0) != 1.0:
        described["rope_parameters"] = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    nothing = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    one_layer = {"num_hidden_layers": 1, "vocab_size": 1, "tie_word_embeddings": False}
    found: dict[str, Any] = json.loads(json.dumps({**described, **nothing, **one_layer}))
    return found


class PreVerifierModule(nn.Module):
    """The network as it is trained; float32 or autocast, on any device."""

    calibration: Tensor

    def __init__(self, config: PreVerifierConfig) -> None:
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

        super().__init__()
        llama = config.llama_config()
        self.config = config
        size, ours = llama.hidden_size, config.design == OURS
        self.input_norm = LlamaRMSNorm(size, llama.rms_norm_eps) if ours else nn.Identity()
        self.position = nn.Embedding(config.max_drafts + 1, size)
        self.exit = nn.Embedding(len(config.exit_layers), size) if len(config.exit_layers) > 1 else None
        self.features = nn.Linear(len(FEATURES), size) if ours else None
        self.layer = LlamaDecoderLayer(llama, 0)
        self.rotary = LlamaRotaryEmbedding(llama)
        self.norm = LlamaRMSNorm(size, llama.rms_norm_eps)
        self.head = nn.Linear(size, 1)
        # Factor and summand of the logits of each exit layer, fitted once the rest is trained.
        self.register_buffer("calibration", torch.tensor([[1.0, 0.0]] * len(config.exit_layers), dtype=torch.float32))
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def offsets(self) -> Tensor:
        """Sum what the exit layer and the draft index add to a row: [exit layers, MAX_DRAFTS + 1 or more, hidden]."""
        config = self.config
        last = max(MAX_DRAFTS, config.max_drafts)
        offsets = self.norm.weight.new_zeros(len(config.exit_layers), last + 1, len(self.norm.weight))
        if self.exit is not None:
            offsets = offsets + self.exit.weight.unsqueeze(1)
        index = torch.arange(1, last + 1, device=offsets.device).clamp(max=config.max_drafts)
        offsets[:, CONTEXT + 1 :] += self.position(index)
        return offsets

    def forward(
        self, hidden: Tensor, features: Tensor, draft_index: Tensor, position: Tensor, mask: Tensor, exit_layer: int
    ) -> Tensor:
        """Logits of acceptance, if all tokens before it are accepted, float32 [rows]; those of context rows mean nothing.

        hidden: [rows, hidden], exit hidden states. features: [rows, features], any values for context rows.
        draft_index: int64 [rows], CONTEXT or the draft's number, 1 ... position: int64 [rows], in the text.
        mask: bool [rows, rows], True where a row (first) may attend to another (second).
        """
        x = self.input_norm(hidden)
        exit_index = self.config.exit_layers.index(exit_layer)
        if self.features is not None:
            is_draft = (draft_index > CONTEXT).unsqueeze(-1).to(x.dtype)
            x = x + is_draft * self.features(features.to(x.dtype))
        offsets = self.offsets()[exit_index]
        x = (x + offsets[draft_index.clamp(max=len(offsets) - 1)]).unsqueeze(0)
        rotary = self.rotary(x, position.unsqueeze(0))
        out = self.layer(x, attention_mask=mask[None, None], position_embeddings=rotary)
        out = out[0] if isinstance(out, tuple) else out
        scale, shift = self.calibration[exit_index]
        return self.head(self.norm(out[0])).squeeze(-1).float() * scale + shift


class LeanPreVerifier:
    """The network as it decodes: in the layout that is fast, on the base model's device and in its dtype.

    layer: a LayerSkipModel of one layer, which runs rows through the decoder layer (`run_layers(x, 0, 1, ...)` with the
    caller's cache) and the head. calibration: by exit layer, factor and summand of the logits. pass_seconds: of passes that
    were timed, by the number of drafts.
    """

    def __init__(self, module: PreVerifierModule, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import GenerationConfig

        self.config, llama = module.config, module.config.llama_config()
        layout: Layout = "native" if native_works(device, dtype) else "plain"

        def tensor(value: Tensor) -> Tensor:
            return value.detach().to(device=device, dtype=dtype, copy=True)

        def linear(matrix: nn.Linear) -> PlainLinear:
            return PlainLinear(tensor(matrix.weight), tensor(matrix.bias))

        with torch.inference_mode(False), torch.no_grad():
            weights = ModuleWeights(module.layer.to(device=device, dtype=dtype), llama, prefix="model.layers.0.")
            builder = LayerBuilder(weights, dtype=dtype, computed=dtype, layout=layout)
            converted = builder.layer(0, device, rotated=head_dim_of(llama))
            self.layer = LayerSkipModel(
                llama,
                dtype=dtype,
                embedding=torch.zeros(1, llama.hidden_size, dtype=dtype, device=device),
                layers=[converted],
                final_norm=RMSNorm(tensor(module.norm.weight), llama.rms_norm_eps),
                head=linear(module.head),
                inv_freq=module.rotary.inv_freq.detach().float().to(device),
                rotary_scaling=float(module.rotary.attention_scaling),
                generation_config=GenerationConfig(),
            )
            self.calibration = dict(zip(self.config.exit_layers, module.calibration.tolist()))
            norm, features = cast(Any, module.input_norm), module.features
            self.input_norm = norm if features is None else RMSNorm(tensor(norm.weight), llama.rms_norm_eps)
            self.offsets = dict(zip(self.config.exit_layers, tensor(module.offsets())))
            self.features = None if features is None else linear(features)
        self.pass_seconds: dict[int, float] = {}

    def context_inputs(self, hidden: Tensor, exit_layer: int) -> Tensor:
        """Input rows of committed tokens: [rows, hidden] -> [rows, hidden]."""
        return self.input_norm(hidden) + self.offsets[exit_layer][CONTEXT]

    def draft_inputs(self, hidden: Tensor, features: Tensor, first_index: int, exit_layer: int) -> Tensor:
        """Input rows of the drafts first_index (1 for a draft's first), ...: hidden [rows, hidden], features [rows, F]."""
        x = self.input_norm(hidden) + self.offsets[exit_layer][first_index : first_index + hidden.shape[0]]
        return x if self.features is None else self.features.add_to(x, features.to(x.dtype))

    def estimates(self, hidden: Tensor, exit_layer: int) -> list[float]:
        """Estimates in (0, 1) from the decoder layer's output rows, [rows, hidden]."""
        scale, shift = self.calibration[exit_layer]
        logits = [scale * x + shift for [x] in self.layer.logits(hidden).tolist()]
        return [1 / (1 + math.exp(-min(max(x, -80.0), 80.0))) for x in logits]


def check_fits(config: PreVerifierConfig, model: LayerSkipModel, where: str) -> None:
    """ValueError unless the pre-verifier was trained for this model."""
    wanted = (
        f"{where} is a pre-verifier for exit layers {', '.join(map(str, config.exit_layers))} of {config.base_model}"
    )
    remedy = "train one for this model with selfspec train-pacer"
    if describe_layer(model.config) != config.layer or max(config.exit_layers) >= model.num_layers:
        raise ValueError(f"{wanted}, a model of another shape than {model.name or 'this one'}: {remedy}")
    if not same_weights(fingerprint(model), config.fingerprint):
        raise ValueError(f"{wanted}, whose weights are not those of {model.name or 'this model'}: {remedy}")


def save_preverifier(module: PreVerifierModule, folder: Path) -> None:
    """Write config and weights into an existing folder."""
    write_module(module, module.config, folder / CONFIG_FILE, folder / WEIGHTS_FILE, None)


def load_preverifier(folder: str | Path) -> PreVerifierModule:
    """Read what `save_preverifier` wrote, in float32. Raises FileNotFoundError or ValueError that says what is wrong."""
    folder = Path(folder)
    module = read_module(
        folder / CONFIG_FILE,
        folder / WEIGHTS_FILE,
        lambda fields: PreVerifierModule(_config(fields)),
        what="pre-verifier",
        missing="train one with selfspec train-pacer",
        remedy="train it again with selfspec train-pacer",
    )
    return module.eval()


def _config(fields: dict[str, Any]) -> PreVerifierConfig:
    known = {name: value for name, value in fields.items() if name != "block" and _EARLIER.get(name) != value}
    return PreVerifierConfig(**with_tuples(known, "fingerprint", "exit_layers"))
