"""A model under training of which every process holds the whole, and how it differs from a divided one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import Parameter
from transformers import LlamaForCausalLM

from layerskip_models.training import saving as checkpoints
from layerskip_models.training.muon import Muon

Result = TypeVar("Result")


class HeldModel(Protocol):
    """A model under training, as it lies over the processes.

    in_step: the processes exchange weights as they compute, so all must make the same passes.
    """

    model: LlamaForCausalLM
    in_step: bool

    def gathered(self, function: Callable[[], Result]) -> Result:
        """What the function returns; it may run layers, norm and head of the model."""
        ...

    def released(self) -> None:
        """To be called behind `gathered` where no backward pass follows."""
        ...

    def reduce(self, totals: dict[int, Tensor]) -> dict[int, float]:
        """Sum gradients and losses over the processes; return the losses."""
        ...

    def clip(self, max_norm: float) -> None:
        """Scale the gradients down to a norm of at most max_norm."""
        ...

    def muon(self, matrices: list[Parameter], learning_rate: float, weight_decay: float) -> Muon:
        """The optimiser of these parameters of the model."""
        ...

    def save(
        self, path: Path, optimizers: Sequence[torch.optim.Optimizer], write_state: Callable[[Path], None]
    ) -> None:
        """Write a checkpoint's folder, whole or not at all; write_state adds to it."""
        ...

    def load(self, path: Path, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Take up what `save` wrote."""
        ...

    def whole_tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The parameters, in the first process; every process must call it."""
        ...


class WholeCopies:
    """Every process holds the whole model, and they exchange gradients once a step."""

    in_step = False

    def __init__(self, accelerator: Accelerator, model: LlamaForCausalLM) -> None:
        self._accelerator = accelerator
        self.model = model

    def gathered(self, function: Callable[[], Result]) -> Result:
        return function()

    def released(self) -> None:
        pass

    def reduce(self, totals: dict[int, Tensor]) -> dict[int, float]:
        """Sum gradients and losses over the processes, in one message."""
        parameters = list(self.model.parameters())
        for parameter in parameters:  # a layer that all samples skipped has none; momentum still moves it
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        losses = sum_over_processes(self._accelerator, parameters, torch.stack(list(totals.values())))
        return dict(zip(totals, losses.tolist()))

    def clip(self, max_norm: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def muon(self, matrices: list[Parameter], learning_rate: float, weight_decay: float) -> Muon:
        return Muon(matrices, lr=learning_rate, weight_decay=weight_decay)

    def save(
        self, path: Path, optimizers: Sequence[torch.optim.Optimizer], write_state: Callable[[Path], None]
    ) -> None:
        def write(folder: Path) -> None:
            torch.save(self.model.state_dict(), folder / "model.pt")
            torch.save([optimizer.state_dict() for optimizer in optimizers], folder / "optimizers.pt")
            write_state(folder)

        if self._accelerator.is_main_process:
            checkpoints.write_folder(path, write)

    def load(self, path: Path, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        # Loaded to the CPU, moved by load_state_dict: a process's device may be "cpu:0", which torch.load does not know.
        self.model.load_state_dict(torch.load(path / "model.pt", map_location="cpu", weights_only=True))
        states = torch.load(path / "optimizers.pt", map_location="cpu", weights_only=True)
        for optimizer, state in zip(optimizers, states):
            optimizer.load_state_dict(state)

    def whole_tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return self.model.state_dict()


def sum_over_processes(accelerator: Accelerator, parameters: Iterable[Parameter], totals: Tensor) -> Tensor:
    """Sum the parameters' gradients in place, and return the sums of `totals` [n], in one message."""
    if accelerator.num_processes == 1:
        return totals
    gradients = []
    for parameter in parameters:  # every process must send as many numbers
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    flat = torch.cat([*(gradient.flatten() for gradient in gradients), totals])
    pieces = accelerator.reduce(flat, reduction="sum").split([*(g.numel() for g in gradients), totals.numel()])
    for gradient, piece in zip(gradients, pieces):
        gradient.copy_(piece.view_as(gradient))
    return pieces[-1]
