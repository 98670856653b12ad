"""The gradient of a batch whose rows several processes share. Each of them holds the whole model."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import Tensor, nn


def sum_gradients(accelerator: Accelerator, model: nn.Module, totals: Tensor) -> Tensor:
    """Sum the gradients over the processes, in place, and return the sums of `totals` [n], such as losses.

    One message a step, after all of its backward passes: the losses of several exits go backwards through the head one by
    one, which DistributedDataParallel's hooks would each take for the last.
    """
    for parameter in model.parameters():  # none in a layer that all samples skipped; momentum still moves it
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if accelerator.num_processes == 1:
        return totals
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([*(gradient.flatten() for gradient in gradients), totals])
    pieces = accelerator.reduce(flat, reduction="sum").split([*(g.numel() for g in gradients), len(totals)])
    for gradient, piece in zip(gradients, pieces):
        gradient.copy_(piece.view_as(gradient))
    return pieces[-1]
