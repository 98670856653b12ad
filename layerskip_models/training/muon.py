"""Muon, the optimiser whose steps have equal singular values, for the matrices inside the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from layerskip_models.training.microbatches import rows_of

# Coefficients of the quintic X <- aX + b(XX')X + c(XX')^2 X, whose repetition takes singular values towards 1.
_QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrix: Tensor, iterations: int = 5) -> Tensor:
    """Nearly U V' of matrix = U S V': singular values in about [0.7, 1.2], by Newton-Schulz iteration; same shape.

    Works in the matrix's own dtype. This is why torch.optim.Muon does not replace this file: it is the same otherwise, but
    always works in bfloat16, which a CPU without bfloat16 arithmetic emulates in three times the time of float32.
    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
    """
    a, b, c = _QUINTIC
    wide = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = wide / (wide.norm() + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised: w <- (1 - lr * weight_decay) w - lr * 0.2 sqrt(max(rows, columns)) * U V'.

    The factor 0.2 sqrt(max(...)) gives a step the usual size of an AdamW step, so that both can share a learning rate.
    Every parameter must be a matrix. Sources: Jordan et al. 2024; the factor from Liu et al. 2025, "Muon is Scalable
    for LLM Training".
    """

    def __init__(
        self, params: Iterable[Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        if any(parameter.ndim != 2 for group in self.param_groups for parameter in group["params"]):
            raise ValueError("Muon takes matrices only: give other parameters to AdamW")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step from the parameters' gradients. A closure is not supported."""
        if closure is not None:
            raise ValueError("Muon.step takes no closure")
        for group in self.param_groups:
            self._step_group(group)

    def _step_group(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if parameter.grad is not None:
                self._move(group, parameter, parameter, orthogonalise(self._direction(group, parameter)))

    def _direction(self, group: dict[str, Any], parameter: Parameter) -> Tensor:
        """The gradient averaged with those before it, as far as this process holds it."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        gradient = local_part(parameter.grad)
        average = local_part(state["momentum"]).lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(average, group["momentum"])  # Nesterov

    def _move(self, group: dict[str, Any], parameter: Parameter, held: Tensor, update: Tensor) -> None:
        """Move what this process holds of a parameter by its part of the orthogonal matrix."""
        held.mul_(1 - group["lr"] * group["weight_decay"])
        held.add_(update, alpha=-group["lr"] * 0.2 * max(parameter.shape) ** 0.5)


class ShardedMuon(Muon):
    """Muon for matrices whose rows are divided over several processes.

    Each process gathers one whole matrix at a time and makes it orthogonal, while the others do so with theirs. No matrix is
    computed twice, and a process gathers one matrix at a time.
    """

    def _step_group(self, group: dict[str, Any]) -> None:
        """All parameters must have gradients."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        for first in range(0, len(group["params"]), ranks):
            turn = group["params"][first : first + ranks]  # one matrix for each process; in the end, for some
            parts = [self._direction(group, parameter) for parameter in turn]
            lengths = [part.numel() for part in parts] + [0] * (ranks - len(turn))
            mine = turn[rank] if rank < len(turn) else None
            counts = [0] * ranks
            if mine is not None:
                rows, columns = mine.shape
                counts = [len(rows_of(rows, other, ranks)) * columns for other in range(ranks)]
            whole = _exchange(torch.cat([part.flatten() for part in parts]), lengths, counts)
            if mine is not None:
                whole = orthogonalise(whole.view(mine.shape)).flatten()
            updates = _exchange(whole, counts, lengths).split(lengths)
            for parameter, part, update in zip(turn, parts, updates):
                self._move(group, parameter, local_part(parameter), update.view_as(part))


def _exchange(numbers: Tensor, lengths: list[int], counts: list[int]) -> Tensor:
    """Send lengths[r] of the numbers, in turn, to each rank r, and return the counts[r] that came from each, in turn."""
    received = numbers.new_empty(sum(counts))
    dist.all_to_all_single(received, numbers.contiguous(), counts, lengths)
    return received


def local_part(tensor: Tensor) -> Tensor:
    """This process's rows of a tensor that is divided; else the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
