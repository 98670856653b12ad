"""Layers on several devices of one process, one after another, for a model that no single device can hold.

Rows move from device to device as they go through the layers, so only one device works at a time: this makes nothing faster.
The numbers are the same wherever a layer is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from layerskip_models.backends.operators import OperatorLayers
from layerskip_models.backends.protocol import Capture
from layerskip_models.kv_cache import CacheRows
from layerskip_models.model import LayerSkipModel


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
