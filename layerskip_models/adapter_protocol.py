"""What a model asks of the adapters after its exits. The adapters themselves are in `layerskip_models.exits`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from layerskip_models.kernels.native_forward import Matrices


class SteeredRound(Protocol):
    """What steers the exits in one round (`layerskip_models.exits.lean_steering`)."""

    def bias(self, exit_layer: int) -> Tensor:
        """[rank], or [rows, rank]."""
        ...


class ExitSteering(Protocol):
    """What the steered exits of a model share. layers: after which the states that steer are taken, ascending."""

    @property
    def layers(self) -> tuple[int, ...]: ...

    def of(self, states: Tensor) -> SteeredRound:
        """states: [depths, hidden], of one row for all; or [rows, depths, hidden]."""
        ...

    def rows_before(self, states: Tensor, before: Tensor | None = None) -> SteeredRound:
        """Each row steered by the one before it. states: [layers, rows, hidden]. before: [layers, hidden]."""
        ...

    def none(self) -> SteeredRound:
        """As if nothing steered."""
        ...


class Adapter(Protocol):
    """A small network between an early exit and the draft head (`layerskip_models.exits.lean`).

    num_bytes: size of its weights. rank: its inner width. matrices: its weights, and where our kernels read them.
    steering: of a steered adapter, else None.
    """

    num_bytes: int
    rank: int

    @property
    def steering(self) -> ExitSteering | None: ...

    @property
    def matrices(self) -> Matrices: ...

    def __call__(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """[rows, hidden], in and out. bias: of a steered adapter."""
        ...
