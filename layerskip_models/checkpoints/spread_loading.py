"""Checkpoints over several GPUs, divided as accelerate divides them, for a model that no single device can hold.

Rows move from device to device as they go through the layers, so only one device works at a time: this makes nothing faster.
The numbers are the same wherever a layer is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from accelerate import infer_auto_device_map
from accelerate.utils import get_balanced_memory
from torch import Tensor

from layerskip_models.checkpoints.conversion import build_model
from layerskip_models.checkpoints.loading import find_source, resolve_dtype
from layerskip_models.checkpoints.parameters import built_on_meta
from layerskip_models.checkpoints.supported import quantisation_of
from layerskip_models.exits.lean import ExitsChoice, with_exits
from layerskip_models.kv_cache import CacheRows
from layerskip_models.model import LayerSkipModel
from layerskip_models.operators import Capture, OperatorLayers

_LAYER = "model.layers.{}"
_FIRST, _LAST = "model.embed_tokens", ("model.norm", "lm_head")


class SpreadLayers:
    """`LayerBackend` on several devices. Hidden states come in and go out on `home`, the device of the embedding."""

    variant = None

    def __init__(self, operators: OperatorLayers, devices: Sequence[torch.device], home: torch.device) -> None:
        self._operators, self._devices, self._home = operators, devices, home
        self._tables: dict[torch.device, Tensor] = {}  # the rotary table, by device

    def run(
        self, hidden: Tensor, start: int, stop: int, rows: CacheRows, rotary: Tensor, capture: Capture | None
    ) -> Tensor:
        layer = start
        for device, layers in groupby(self._devices[start:stop]):
            end = layer + len(list(layers))
            seen = None if capture is None else partial(self._bring_home, capture)
            hidden = self._operators.run(hidden.to(device), layer, end, rows, self._rotary_on(device, rotary), seen)
            layer = end
        return hidden.to(self._home)

    def _bring_home(self, capture: Capture, layers_done: int, hidden: Tensor) -> None:
        capture(layers_done, hidden.to(self._home))

    def _rotary_on(self, device: torch.device, rotary: Tensor) -> Tensor:
        table = self._tables.get(device)
        if table is None or table.shape != rotary.shape:
            table = self._tables[device] = rotary.to(device)
        return table


def spread(model: LayerSkipModel, devices: Sequence[torch.device], last: torch.device) -> LayerSkipModel:
    """Return the model whose layers are on these devices. last: device of the last norm and the head."""
    return model.with_backend(SpreadLayers(model.operators, devices, model.device), devices, last)


def load_spread(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    local_files_only: bool = False,
    exits: ExitsChoice = "auto",
    max_memory: Mapping[int, int] | None = None,
) -> LayerSkipModel:
    """Load a checkpoint over all GPUs of this machine, as accelerate divides it; arguments as of `load_model`.

    max_memory: bytes of each GPU that may be used, by its number; None for nearly all that are free.
    Raises what `load_model` raises; ValueError without two GPUs, for quantised checkpoints, and where all GPUs together do
    not hold the model: a part on the processor would make every token wait for it.
    """
    source = find_source(name_or_path, revision, local_files_only)
    config = source.config
    if quantisation_of(config) is not None:
        raise ValueError(f"{source.name} is quantised, and loads on one device only: leave out device_map")
    if max_memory is None and torch.cuda.device_count() < 2:
        has = f"this machine has {torch.cuda.device_count()}"
        raise ValueError(f"device_map='auto' spreads a model over several GPUs, and {has}: leave it out")
    chosen = resolve_dtype(dtype, torch.device("cuda"), getattr(config, "dtype", None))
    where = places(config, chosen, max_memory)
    weights = source.weights()
    weights.config.dtype = chosen
    model = build_model(weights, dtype=chosen, layout="plain", device=where)
    devices = [where[_LAYER.format(index)] for index in range(model.num_layers)]
    return with_exits(spread(model, devices, where[_LAST[1]]), exits)


def places(config: Any, dtype: torch.dtype, max_memory: Mapping[int, int] | None = None) -> dict[str, torch.device]:
    """Choose the device of the embedding, of each layer, of the last norm and of the head, by their names.

    Raises ValueError where they do not fit.
    """
    shell: Any = built_on_meta(config, "the model").to(dtype)
    shell.tie_weights()
    whole = [type(shell.model.layers[0]).__name__]
    limits: Any = None if max_memory is None else {**max_memory, "cpu": 0}
    balanced = get_balanced_memory(shell, max_memory=limits, dtype=dtype, no_split_module_classes=whole)
    found: Any = infer_auto_device_map(shell, max_memory=balanced, dtype=dtype, no_split_module_classes=whole)
    names = [_FIRST, *(_LAYER.format(index) for index in range(config.num_hidden_layers)), *_LAST]
    placed = {name: _of(name, found) for name in names}
    if missing := [name for name, place in placed.items() if not isinstance(place, int)]:
        raise ValueError(
            f"the GPUs of this machine do not hold the model: {len(missing)} of its {len(names)} parts are left over, first "
            f"{missing[0]}; take a smaller dtype, or more GPUs"
        )
    if config.tie_word_embeddings:
        placed["lm_head"] = placed[_FIRST]
    placed["model.norm"] = placed["lm_head"]
    return {name: torch.device("cuda", place) for name, place in placed.items()}


def _of(name: str, found: Mapping[str, Any]) -> Any:
    """Return the place of a module, or of what it is in."""
    while name not in found and name:
        name = name.rpartition(".")[0]
    return found.get(name)
