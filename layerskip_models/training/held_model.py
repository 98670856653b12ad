"""A model under training, and what each process holds of it: here the whole, in `sharding` a part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from layerskip_models.training.saving import write_folder

Result = TypeVar("Result")


class HeldModel(ABC):
    """A model under training.

    in_step: the processes exchange weights as they compute, so all must make the same passes.
    """

    in_step: bool

    def __init__(self, accelerator: Accelerator, model: nn.Module) -> None:
        self._accelerator = accelerator
        self.model: Any = model

    def gathered(self, function: Callable[[], Result]) -> Result:
        """Run the function, which may use layers, norm and head of the model, and return its result."""
        return function()

    def released(self) -> None:  # noqa: B027
        """To be called after `gathered` where no backward pass follows."""

    def reduce(self, totals: Tensor) -> Tensor:
        """Sum the gradients over the processes, in place, and return the sums of `totals` [n], such as losses."""
        for parameter in self.model.parameters():  # none in a layer that all samples skipped; momentum still moves it
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return self._summed(totals)

    @abstractmethod
    def _summed(self, totals: Tensor) -> Tensor:
        """`reduce`, now that every parameter has a gradient."""

    @abstractmethod
    def clip(self, max_norm: float) -> None:
        """Scale the gradients down to a norm over all processes of at most max_norm."""

    @abstractmethod
    def save(
        self, path: Path, optimizers: Sequence[torch.optim.Optimizer], write_state: Callable[[Path], None]
    ) -> None:
        """Write a checkpoint's folder, whole or not at all; write_state adds to it."""

    @abstractmethod
    def load(self, path: Path, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Read what `save` wrote. Raises ValueError when a part of it is missing."""

    @abstractmethod
    def whole_tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The parameters, in the first process; every process must call it."""


class WholeCopies(HeldModel):
    """Every process holds the whole model, and they exchange gradients once a step."""

    in_step = False

    def _summed(self, totals: Tensor) -> Tensor:
        if self._accelerator.num_processes == 1:
            return totals
        gradients = [parameter.grad for parameter in self.model.parameters()]
        flat = torch.cat([*(gradient.flatten() for gradient in gradients), totals])
        pieces = self._accelerator.reduce(flat, reduction="sum").split([*(g.numel() for g in gradients), len(totals)])
        for gradient, piece in zip(gradients, pieces):
            gradient.copy_(piece.view_as(gradient))
        return pieces[-1]

    def clip(self, max_norm: float) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def save(
        self, path: Path, optimizers: Sequence[torch.optim.Optimizer], write_state: Callable[[Path], None]
    ) -> None:
        def write(folder: Path) -> None:
            torch.save(self.model.state_dict(), folder / "model.pt")
            torch.save([optimizer.state_dict() for optimizer in optimizers], folder / "optimizers.pt")
            write_state(folder)

        if self._accelerator.is_main_process:
            write_folder(path, write)

    def load(self, path: Path, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        # Loaded to the CPU, moved by load_state_dict: a process's device may be "cpu:0", which torch.load does not know.
        self.model.load_state_dict(torch.load(path / "model.pt", map_location="cpu", weights_only=True))
        states = torch.load(path / "optimizers.pt", map_location="cpu", weights_only=True)
        for optimizer, state in zip(optimizers, states):
            optimizer.load_state_dict(state)

    def whole_tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.model.state_dict()
        return found
