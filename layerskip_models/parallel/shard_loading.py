"""Reads this rank's part of a checkpoint, tensor by tensor out of its safetensors files: nobody holds the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from layerskip_models.backends.tensor_parallel import tensor_parallel
from layerskip_models.checkpoints.checkpoint_files import clear_errors, resolve_checkpoint
from layerskip_models.checkpoints.conversion import WholeOf, convert
from layerskip_models.checkpoints.gguf_checkpoint import GGUF_METHOD, gguf_file, gguf_generation_config
from layerskip_models.checkpoints.loading import load_config, resolve_device, resolve_dtype, resolve_layout
from layerskip_models.checkpoints.quantised import quantisation_of, unquantised
from layerskip_models.checkpoints.schemes import schemes_of
from layerskip_models.checkpoints.weight_files import tensors_of
from layerskip_models.exits.lean import ExitsChoice, with_exits
from layerskip_models.families import family_of
from layerskip_models.four_bits import CHUNK, FourBitWeight
from layerskip_models.linear import Layout, Whole
from layerskip_models.model import LayerSkipModel
from layerskip_models.parallel.cores import share_cores
from layerskip_models.parallel.gguf_parts import GgufParts
from layerskip_models.parallel.part_files import Parts, QuantisedParts, Shapes
from layerskip_models.parallel.ranks import Ranks, local_rank
from layerskip_models.parallel.shard_plan import ShardPlan


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint that is read in parts. config: may say how it is quantised. origin: revision and local_files_only."""

    name: str
    config: Any
    origin: Mapping[str, Any]

    @classmethod
    def of(
        cls, name_or_path: str | Path, revision: str | None, local_files_only: bool, quantised: str | None = None
    ) -> Source:
        """quantised: why it may not be, and what to do. Raises what `load_config` raises, and ValueError for that."""
        name = resolve_checkpoint(name_or_path)
        origin = {"revision": revision, "local_files_only": local_files_only}
        config = load_config(name, revision=revision, local_files_only=local_files_only)
        if quantised is not None and quantisation_of(config) is not None:
            raise ValueError(f"{name} is quantised, and {quantised}")
        return cls(name, config, origin)

    @contextmanager
    def open(self, keep_packed: bool = False) -> Iterator[Parts]:
        """Its files. What is wrong with them is said clearly. The caller's default device has no say in what is read.

        keep_packed: as in `load_quantised`.
        """
        with torch.device("cpu"), clear_errors(self.name), self._parts(keep_packed) as files:
            yield files

    def _parts(self, keep_packed: bool) -> Parts:
        settings = quantisation_of(self.config)
        if settings is not None and settings["quant_method"] == GGUF_METHOD:
            return GgufParts(self.name, unquantised(self.config), keep_packed=keep_packed)
        tensors, shapes = tensors_of(self.name, self.origin), _shapes(unquantised(self.config))
        if settings is None:
            tensors.check_floats()
            return Parts(tensors, shapes)
        return QuantisedParts(tensors, shapes, scheme_of=schemes_of(settings), keep_packed=keep_packed)

    def generation_config(self) -> GenerationConfig:
        """The checkpoint's, or what follows from its configuration."""
        if gguf_file(self.name) is not None:
            return gguf_generation_config(self.name, self.config)
        try:
            return GenerationConfig.from_pretrained(self.name, **self.origin)
        except OSError:
            return GenerationConfig.from_model_config(self.config)


def load_shard(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    layout: Layout | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
    exits: ExitsChoice = "auto",
) -> LayerSkipModel:
    """This process's part of a checkpoint whose other parts the processes launched with it load; arguments as `load_model`'s.

    Every process must call it. On CUDA each takes the device of its local rank, on CPUs its share of the cores. Peak memory
    is the part, and one layer of it.
    Raises what `load_model` raises; ValueError for a model that cannot be divided by so many, and for a GGUF file of an
    architecture that is not read in parts;
    RankError if the processes do not find each other.
    """
    target = _own_device(resolve_device(device))
    source = Source.of(name_or_path, revision, local_files_only)
    dtype, layout, keep_packed = resolve_layout(source.config, dtype, layout, target)
    config = unquantised(source.config)
    config.name_or_path = source.name
    chosen = resolve_dtype(dtype, target, getattr(config, "dtype", None))
    ranks = Ranks.join(target)
    if target.type == "cpu":
        share_cores(ranks)
    plan = ShardPlan.of(config, ranks.rank, ranks.size, CHUNK if keep_packed else 1)
    whole_of = partial(_whole, plan, ranks)
    with torch.inference_mode(False), torch.no_grad(), source.open(keep_packed) as files:
        part = load_part(
            files, plan, chosen, lambda module: target, layout, source.generation_config(), whole_of=whole_of
        )
    model = tensor_parallel(part, plan, ranks)
    ranks.collect(None)  # nobody begins before all have read theirs, which may take longer than an answer
    return with_exits(model, exits)


def load_layers(
    name_or_path: str | Path,
    layers: range,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    revision: str | None = None,
    local_files_only: bool = False,
) -> LayerSkipModel:
    """Some layers of a checkpoint that follow each other, with embedding, last norm and head, as a model of their own.

    Its layers count from 0, and its exits are bare. Arguments and errors as those of `load_model`; quantised checkpoints and
    GGUF files are refused.
    """
    alone = "its layers cannot be read one by one: load it whole"
    source = Source.of(name_or_path, revision, local_files_only, alone)
    config, target = source.config, resolve_device(device)
    if not 0 <= layers.start < layers.stop <= config.num_hidden_layers:
        raise ValueError(
            f"layers {layers.start} to {layers.stop} are not among the {config.num_hidden_layers} of {source.name}"
        )
    dtype, layout, _ = resolve_layout(config, dtype, None, target)
    chosen = resolve_dtype(dtype, target, getattr(config, "dtype", None))
    plan = ShardPlan.of(config, 0, 1)
    with torch.inference_mode(False), torch.no_grad(), source.open() as files:
        return load_part(files, plan, chosen, lambda module: target, layout, source.generation_config(), only=layers)


def _whole(plan: ShardPlan, ranks: Ranks, kind: str, weight: Tensor) -> Whole | None:
    """See `WholeOf`."""
    inputs = plan.num_inputs(kind)
    return None if inputs is None else Whole(inputs, ranks.largest(weight.abs().amax(dim=1)))


def _own_device(device: torch.device) -> torch.device:
    if device.type != "cuda" or device.index is not None:
        return device
    own = torch.device("cuda", local_rank())
    torch.cuda.set_device(own)
    return own


def make_shell(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """transformers' model without memory."""
    with torch.device("meta"):
        return family_of(config).model(config).to(dtype)


def _shapes(config: PreTrainedConfig) -> Shapes:
    return {name: tuple(value.shape) for name, value in make_shell(config, torch.float32).state_dict().items()}


def load_part(
    files: Parts,
    plan: ShardPlan,
    dtype: torch.dtype,
    device_of: Callable[[str], torch.device],
    layout: Layout | None,
    generation_config: GenerationConfig,
    only: range | None = None,
    whole_of: WholeOf = lambda kind, weight: None,
) -> LayerSkipModel:
    """A model as large as the part, in which one layer after the other gets its weights.

    device_of: a module, by its name. only: the layers to read, None for all. whole_of: for weights that are rounded.
    """
    local: Any = plan.local_config()
    shell = make_shell(local, dtype)
    decoder: Any = shell.model
    for index in range(len(decoder.layers)):
        if only is not None and index not in only:
            decoder.layers[index] = nn.Identity()
    tied = bool(local.tie_word_embeddings)
    packed: dict[str, FourBitWeight] = {}  # of the layer that is filled

    def fill(name: str, module: nn.Module) -> None:
        packed.clear()
        for own, _ in [*module.named_parameters()]:
            place, _, kind = own.rpartition(".")
            weight = files.read_packed(f"{name}.{place}", plan) if kind == "weight" else None
            if weight is None:
                value = files.read(f"{name}.{own}", plan, dtype, device_of(name))
            else:
                packed[f"{name}.{place}"] = weight
                value = torch.zeros((), dtype=dtype, device=device_of(name)).expand(weight.shape)
            setattr(module.get_submodule(place), kind, nn.Parameter(value, requires_grad=False))

    decoder.rotary_emb = type(decoder.rotary_emb)(local).to(device_of("model.embed_tokens"))
    fill("model.embed_tokens", decoder.embed_tokens)
    fill("model.norm", decoder.norm)
    if tied and not files.has("lm_head.weight"):
        shell.lm_head.weight = decoder.embed_tokens.weight
    else:
        if tied:
            shell.lm_head.weight = nn.Parameter(shell.lm_head.weight.detach(), requires_grad=False)
        fill("lm_head", shell.lm_head)
        # As transformers does it: a head in the file is tied only if it says the same.
        if tied and torch.equal(shell.lm_head.weight, decoder.embed_tokens.weight):
            shell.lm_head.weight = decoder.embed_tokens.weight
    shell.generation_config = generation_config
    return convert(shell, local, layout, release=True, packed=packed, fill=fill, only=only, whole_of=whole_of)
