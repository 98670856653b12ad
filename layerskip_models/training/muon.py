"""Muon, the optimiser whose steps have equal singular values, for the matrices inside the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

# Coefficients of the quintic X <- aX + b(XX')X + c(XX')^2 X, whose repetition takes singular values towards 1.
_QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrix: Tensor, iterations: int = 5) -> Tensor:
    """Nearly U V' of matrix = U S V': singular values in about [0.7, 1.2], by Newton-Schulz iteration; same shape.

    Works in the matrix's own dtype. This is why torch.optim.Muon does not replace this file: it is the same otherwise, but
    always works in bfloat16, which a CPU without bfloat16 arithmetic emulates: there a step of the demo's training (16 layers
    of 192, 4,096 tokens) takes 18.4 seconds of one core with it and 8.5 with this.
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
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update = orthogonalise(self._direction(parameter, group["momentum"]))
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update, alpha=-group["lr"] * 0.2 * max(parameter.shape) ** 0.5)

    def _direction(self, parameter: Parameter, momentum: float) -> Tensor:
        """Average the gradient with those before it."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        average: Tensor = state["momentum"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(average, momentum)  # Nesterov
