"""A checkpoint that is read tensor by tensor, and a `LayerSkipModel` of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from layerskip_models.checkpoints.checkpoint_files import clear_errors
from layerskip_models.checkpoints.config_checks import shapes_of, shell_of
from layerskip_models.checkpoints.conversion import convert
from layerskip_models.checkpoints.gguf_checkpoint import GgufCheckpoint, gguf_generation_config
from layerskip_models.checkpoints.quantised import quantisation_of, unquantised
from layerskip_models.checkpoints.schemes import schemes_of
from layerskip_models.checkpoints.shell import RotaryFrequencies
from layerskip_models.checkpoints.stored_tensor import StoredTensor
from layerskip_models.checkpoints.stored_weights import SafetensorsWeights, StoredWeights
from layerskip_models.checkpoints.weight_files import tensor_files
from layerskip_models.grouped_weight import GroupedWeight
from layerskip_models.linear import Layout
from layerskip_models.model import LayerSkipModel

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig


@dataclass(frozen=True, slots=True)
class Source:
    """name: a folder, a .gguf file or a hub name. config: may say how the weights are quantised.

    origin: revision and local_files_only, for transformers. gguf: the opened file, if it is one.
    """

    name: str
    config: Any
    origin: Mapping[str, Any]
    gguf: GgufCheckpoint | None = None

    def float_config(self) -> PreTrainedConfig:
        """Return the configuration of the same model with float weights, under the checkpoint's name."""
        config = unquantised(self.config)
        config.name_or_path = self.name
        return config

    @contextmanager
    def open(self, keep_bits: int = 0) -> Iterator[StoredWeights]:
        """Its weights. Errors say what is wrong with the files. The caller's default device does not matter.

        keep_bits: as in `StoredWeights`. Raises ValueError for weights that are not those of the configuration.
        """
        with torch.device("cpu"), clear_errors(self.name):
            weights = self._weights(keep_bits)
            try:
                yield weights
            finally:
                weights.close()

    def _weights(self, keep_bits: int) -> StoredWeights:
        config, settings = unquantised(self.config), quantisation_of(self.config)
        if self.gguf is not None:
            return self.gguf.weights(config, keep_bits=keep_bits)
        return SafetensorsWeights(
            self.name,
            tensor_files(self.name, self.origin),
            shapes_of(config, self.name),
            scheme_of=None if settings is None else schemes_of(settings),
            keep_bits=keep_bits,
        )

    def has_every_weight(self) -> bool:
        """Whether the files have the model's weights under their present names. Of quantised weights nobody else has others.

        Raises FileNotFoundError or OSError for files that are missing or damaged.
        """
        if quantisation_of(self.config) is not None:
            return True
        with clear_errors(self.name):
            there = tensor_files(self.name, self.origin).keys()
        tied = {"lm_head.weight"} if self.config.tie_word_embeddings else set()
        return shapes_of(self.config, self.name).keys() - tied <= there

    def generation_config(self) -> GenerationConfig:
        """Read the checkpoint's own, or make what follows from its configuration."""
        from transformers import GenerationConfig

        if self.gguf is not None:
            return gguf_generation_config(self.gguf.path, self.config)
        try:
            return GenerationConfig.from_pretrained(self.name, **self.origin)
        except OSError:  # it has none
            return GenerationConfig.from_model_config(self.config)

    def read_model(
        self,
        dtype: torch.dtype,
        layout: Layout | None,
        device_of: Callable[[str], torch.device],
        *,
        keep_bits: int = 0,
    ) -> LayerSkipModel:
        """Read a model in which one layer after the other gets its weights: peak memory is the model and one layer.

        device_of: a module, by its name. keep_bits: as in `StoredWeights`.
        """
        with torch.inference_mode(False), torch.no_grad(), self.open(keep_bits) as weights:
            config: Any = self.float_config()
            if quantisation_of(self.config) is None:
                config.dtype = dtype  # as transformers says it of a model that it has loaded
            shell: Any = shell_of(config, self.name).to(dtype)
            packed: dict[str, GroupedWeight | StoredTensor] = {}  # of the module that is filled
            weights.expect(_in_order(shell))

            def fill(name: str, module: nn.Module) -> None:
                packed.clear()
                for own, parameter in [*module.named_parameters()]:
                    place, _, kind = own.rpartition(".")
                    full, device = f"{name}.{own}", device_of(name)
                    weight: GroupedWeight | StoredTensor | None = None
                    if device.type == "cpu" and parameter.dim() == 2:
                        weight = weights.stored(full, dtype)
                    if weight is None and kind == "weight" and name.startswith("model.layers."):
                        weight = weights.read_packed(f"{name}.{place}")
                    if isinstance(weight, StoredTensor) and not name.startswith("model.layers."):
                        value = weight.tensor()
                    elif weight is not None:
                        packed[f"{name}.{place}"] = weight
                        value = torch.zeros((), dtype=dtype, device=device).expand(weight.shape)
                    else:
                        value = weights.read(full, dtype, device)
                    setattr(module.get_submodule(place), kind, nn.Parameter(value, requires_grad=False))

            tied, has_head = config.tie_word_embeddings, "lm_head.weight" in weights.names
            head: StoredTensor | None = None  # that keeps its numbers, or is read when it is converted
            module = "model.embed_tokens" if tied else "lm_head"
            if device_of("lm_head").type == "cpu" and f"{module}.weight" in weights.names:
                own = weights.stored(f"{module}.weight", dtype)
                head = None if own is None or (tied and not own.is_quantised) else own
            _fill_ends(shell, fill, tied=tied, fills_head=head is None and (has_head or not tied))
            decoder = shell.model
            decoder.rotary_emb = RotaryFrequencies(config).to(device_of("model.embed_tokens"))
            shell.generation_config = self.generation_config()
            return convert(shell, config, layout, release=True, packed=packed, fill=fill, own_head=head)


def _in_order(shell: Any) -> list[str]:
    """List the parameters in the order in which they are filled."""
    names = [name for name, _ in shell.named_parameters()]
    return [*(name for name in names if not name.startswith("model.layers.")), *names]


def _fill_ends(shell: Any, fill: Callable[[str, nn.Module], None], *, tied: bool, fills_head: bool) -> None:
    """Embedding, last norm, perhaps the head. As in transformers a head in the files is tied only if it is the embedding."""
    embedding = shell.model.embed_tokens
    fill("model.embed_tokens", embedding)
    fill("model.norm", shell.model.norm)
    if fills_head:
        # No longer the embedding's parameter.
        shell.lm_head.weight = nn.Parameter(shell.lm_head.weight.detach(), requires_grad=False)
        fill("lm_head", shell.lm_head)
    if tied and (not fills_head or torch.equal(shell.lm_head.weight, embedding.weight)):
        shell.lm_head.weight = embedding.weight
