"""Muon, the optimiser whose steps have equal singular values, for the matrices inside the layers.

torch.optim.Muon is the same (`adjust_lr_fn="match_rms_adamw"`), but always works in bfloat16. A processor without bfloat16
arithmetic emulates that: a step over 4 layers of the demo's shape takes 2.59 seconds of a core there, and 0.15 here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

# Coefficients of the quintic X <- aX + b(XX')X + c(XX')^2 X, whose repetition takes singular values towards 1.
_QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrix: Tensor, iterations: int = 5) -> Tensor:
    """Nearly U V' of matrix = U S V': singular values in about [0.7, 1.2], by Newton-Schulz iteration; same shape."""
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
    Every parameter must be a matrix. Sources: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural
    networks"; the factor from Liu et al. 2025, "Muon is Scalable for LLM Training".
    """

    def __init__(
        self, params: Iterable[Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step from the parameters' gradients. closure: not supported."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    average = state.setdefault("momentum", torch.zeros_like(parameter))
                    average.lerp_(parameter.grad, 1 - group["momentum"])
                    update = orthogonalise(parameter.grad.lerp(average, group["momentum"]))  # Nesterov's momentum
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update, alpha=-group["lr"] * 0.2 * max(parameter.shape) ** 0.5)
