"""Exit adapters as they draft: a few rows between an early exit and the draft head, on our own kernels where these run."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip_models.exits.adapter import ExitAdapter, ExitAdapters
from layerskip_models.exits.folder import adapters_beside, check_fits, load_adapters
from layerskip_models.exits.lean_steering import LeanSteering
from layerskip_models.exits.steering import SteeredAdapters
from layerskip_models.kernels import library
from layerskip_models.kernels.library import AdapterWeights
from layerskip_models.kernels.native_linear import (
    MOST_ROWS,
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


class AdapterMatrices:
    """The weights of one exit's adapter in the layout that drafts use. They never change; an adapter may get others.

    address: of the description that C reads, valid as long as this object; None where PyTorch's operators do the work.
    """

    def __init__(self, adapter: ExitAdapter, *, dtype: torch.dtype, device: torch.device, layout: Layout) -> None:
        config = adapter.config
        self.rank, self.hidden_size = config.rank, config.hidden_size

        def matrix(weight: Tensor) -> Tensor:
            return weight.detach().to(device=device, dtype=dtype, copy=True)

        with torch.inference_mode(False), torch.no_grad():
            self.gate_up = LAYOUTS[layout](matrix(torch.cat([adapter.gate.weight, adapter.up.weight])), None)
            self.down = LAYOUTS[layout](matrix(adapter.down.weight * adapter.scale), None)
            self.norm = RMSNorm(torch.ones(config.hidden_size, dtype=dtype, device=device), config.eps)
        self.num_bytes = self.gate_up.num_bytes + self.down.num_bytes
        self._described: AdapterWeights | None = None
        factors = self.norm.factors
        if isinstance(self.gate_up, NativeLinear) and isinstance(self.down, NativeLinear) and factors is not None:
            norm = pointer("the adapter's norm", factors, torch.float32, self.hidden_size)
            self._described = AdapterWeights(self.gate_up.matrix, self.down.matrix, norm)

    @property
    def address(self) -> int | None:
        return None if self._described is None else addressof(self._described)


class LeanAdapter:
    """One exit's adapter, in the model's dtype, on its device.

    layout: of its matrices. On our own kernels a row's result does not depend on the other rows.
    matrices: what it computes with now. Whoever starts a pass holds on to them until it ends, since `use` may replace them.
    steering: what a model's steered exits share; None for an adapter that nothing steers.
    """

    def __init__(
        self,
        adapter: ExitAdapter,
        *,
        dtype: torch.dtype,
        device: torch.device,
        layout: Layout,
        steering: LeanSteering | None = None,
    ) -> None:
        self.steering = steering
        self._dtype, self._device, self._layout = dtype, device, layout
        self.matrices = self.laid_out(adapter)
        self.rank, self.num_bytes = self.matrices.rank, self.matrices.num_bytes

    def laid_out(self, adapter: ExitAdapter) -> AdapterMatrices:
        """Other weights for this exit, as `use` takes them."""
        return AdapterMatrices(adapter, dtype=self._dtype, device=self._device, layout=self._layout)

    def use(self, matrices: AdapterMatrices) -> None:
        """Compute with these from the next pass on. ValueError for matrices of another shape, which buffers do not fit."""
        if (matrices.rank, matrices.hidden_size) != (self.rank, self.matrices.hidden_size):
            raise ValueError(f"an adapter of rank {self.rank} cannot become one of rank {matrices.rank}")
        self.matrices = matrices

    def __call__(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """hidden: [rows, hidden], of the exit. Returns the same shape: what the norm and the head see in its place.

        bias: of a steered adapter, [rank] or [rows, rank] (`RoundSteering.bias`).
        """
        held = self.matrices
        if bias is None and held.address is not None and not only_operators():
            return _by_kernels(held, hidden.contiguous(), held.address)
        gate, up = held.gate_up(held.norm(hidden)).view(hidden.shape[0], 2, -1).unbind(1)
        return held.down.add_to(hidden, F.silu(gate).mul_(up if bias is None else up + bias))


def _by_kernels(held: AdapterMatrices, hidden: Tensor, address: int) -> Tensor:
    check_rows("hidden", hidden, held.hidden_size)
    chosen = library.kernels()
    assert chosen is not None
    rows, size = hidden.shape
    adapted, gated = torch.empty_like(hidden), hidden.new_empty(min(rows, MOST_ROWS), held.rank)
    for first, count in pieces(rows):
        offset = 4 * first * size
        job = chosen.adapt(
            address, held.norm.eps, hidden.data_ptr() + offset, count, gated.data_ptr(),
            adapted.data_ptr() + offset, num_threads(),
        )  # fmt: skip
        if job:
            keep(job, held, hidden, gated, adapted)
    return adapted


def lean_adapters(
    adapters: ExitAdapters, model: LayerSkipModel, exit_layers: Sequence[int] | None = None
) -> dict[int, LeanAdapter]:
    """By exit layer, as this model drafts with them. exit_layers: of these exits only, None for all."""
    layout: Layout = "native" if model.kernels is not None else "plain"
    dtype, device = model.dtype, model.device
    layers = adapters.config.exit_layers if exit_layers is None else exit_layers
    steering = (
        LeanSteering(adapters, layers, dtype=dtype, device=device) if isinstance(adapters, SteeredAdapters) else None
    )
    return {
        layer: LeanAdapter(adapters.at(layer), dtype=dtype, device=device, layout=layout, steering=steering)
        for layer in layers
    }


def with_exits(model: LayerSkipModel, exits: ExitsChoice = "auto") -> LayerSkipModel:
    """The same model, weights shared, that drafts with these adapters.

    Raises FileNotFoundError or ValueError for a folder that holds none, or some that were trained for another model.
    """
    folder = adapters_beside(model.name) if exits == "auto" else exits
    if folder is None:
        return model.with_adapters({})
    trained = load_adapters(folder)
    check_fits(trained.config, model, folder)
    return model.with_adapters(lean_adapters(trained, model))
