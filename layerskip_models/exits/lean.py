"""Exit adapters as they draft: a few rows between an early exit and the draft head, on our own kernels where these run."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from ctypes import addressof
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip_models.exits.adapter import ExitAdapter, ExitAdapters, Steering
from layerskip_models.exits.folder import adapters_beside, check_fits, load_adapters
from layerskip_models.kernels import library
from layerskip_models.kernels.library import AdapterWeights
from layerskip_models.kernels.native_linear import (
    MAX_ROWS,
    NativeLinear,
    check_rows,
    only_operators,
    pieces,
    pointer,
)
from layerskip_models.kernels.threads import keep, num_threads
from layerskip_models.linear import LAYOUTS, Layout
from layerskip_models.model import LayerSkipModel
from layerskip_models.norm import RMSNorm

ExitsChoice = Literal["auto"] | str | Path | None
"""Which adapters a model drafts with: "auto" takes those beside the checkpoint, a path another folder's, None none."""


class LeanAdapter:
    """One exit's adapter, in the model's dtype, on its device.

    layout: of its matrices. On our own kernels a row's result does not depend on the other rows.
    address: of the description that C reads, valid as long as this object; None where PyTorch's operators do the work.
    steering: what a model's steered exits share; None for an adapter that nothing steers.
    """

    def __init__(
        self,
        adapter: ExitAdapter,
        *,
        dtype: torch.dtype,
        device: torch.device,
        layout: Layout,
        steering: Steering | None = None,
    ) -> None:
        config = adapter.config
        self.rank, self.hidden_size, self.steering = config.rank, config.hidden_size, steering

        def matrix(weight: Tensor) -> Tensor:
            return weight.detach().to(device=device, dtype=dtype, copy=True)

        with torch.inference_mode(False), torch.no_grad():
            self._gate_up = LAYOUTS[layout](matrix(torch.cat([adapter.gate.weight, adapter.up.weight])), None)
            self._down = LAYOUTS[layout](matrix(adapter.down.weight * adapter.scale), None)
            self._norm = RMSNorm(torch.ones(config.hidden_size, dtype=dtype, device=device), config.eps)
            self._steer = None if adapter.steer is None else matrix(adapter.steer.weight)
        self.num_bytes = self._gate_up.num_bytes + self._down.num_bytes
        self._described: AdapterWeights | None = None
        factors = self._norm.factors
        if isinstance(self._gate_up, NativeLinear) and isinstance(self._down, NativeLinear) and factors is not None:
            norm = pointer("the adapter's norm", factors, torch.float32, self.hidden_size)
            self._described = AdapterWeights(self._gate_up.matrix, self._down.matrix, norm)

    @property
    def address(self) -> int | None:
        return None if self._described is None else addressof(self._described)

    def __call__(self, hidden: Tensor, steering: Tensor | None = None) -> Tensor:
        """hidden: [rows, hidden], of the exit. Returns the same shape: what the norm and the head see in its place.

        steering: g (`Steering`), [size] or [rows, size]; None if nothing steers.
        """
        steers = steering is not None and self._steer is not None
        address = self.address
        if address is not None and not steers and not only_operators():
            return self._by_kernels(hidden.contiguous(), address)
        gate, up = self._gate_up(self._norm(hidden)).view(hidden.shape[0], 2, -1).unbind(1)
        if steering is not None and self._steer is not None:
            up = up + F.linear(steering, self._steer)
        return self._down.add_to(hidden, F.silu(gate).mul_(up))

    def _by_kernels(self, hidden: Tensor, address: int) -> Tensor:
        check_rows("hidden", hidden, self.hidden_size)
        chosen = library.kernels()
        assert chosen is not None
        rows, size = hidden.shape
        adapted, gated = torch.empty_like(hidden), hidden.new_empty(min(rows, MAX_ROWS), self.rank)
        for first, count in pieces(rows):
            offset = 4 * first * size
            job = chosen.adapt(
                address, self._norm.eps, hidden.data_ptr() + offset, count, gated.data_ptr(),
                adapted.data_ptr() + offset, num_threads(),
            )  # fmt: skip
            if job:
                keep(job, self, hidden, gated, adapted)
        return adapted


def lean_adapters(
    adapters: ExitAdapters, model: LayerSkipModel, exit_layers: Sequence[int] | None = None
) -> dict[int, LeanAdapter]:
    """By exit layer, as this model drafts with them. exit_layers: of these exits only, None for all."""
    layout: Layout = "native" if model.kernels is not None else "plain"
    dtype, device = model.dtype, model.device
    layers = adapters.config.exit_layers if exit_layers is None else exit_layers
    steering = None
    if adapters.steering is not None:
        with torch.inference_mode(False):
            steering = copy.deepcopy(adapters.steering).to(device, dtype).requires_grad_(False)
    return {
        layer: LeanAdapter(adapters.at(layer), dtype=dtype, device=device, layout=layout, steering=steering)
        for layer in layers
    }


def with_exits(model: LayerSkipModel, exits: ExitsChoice = "auto") -> LayerSkipModel:
    """Return the same model, weights shared, that drafts with these adapters.

    Raises FileNotFoundError or ValueError for a folder that holds none, or some that were trained for another model.
    """
    folder = adapters_beside(model.name) if exits == "auto" else exits
    if folder is None:
        return model.with_adapters({})
    trained = load_adapters(folder)
    check_fits(trained.config, model, folder)
    return model.with_adapters(lean_adapters(trained, model))
