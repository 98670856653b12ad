"""Between the host's memory and a device, with as few waits as can be.

On CUDA a copy from ordinary memory waits for all that was launched before it, and so does every copy to the host.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Send the numbers to a device. tensor: in the host's memory; the host does not wait until they are there."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def read_rows(integers: Tensor, numbers: Tensor) -> tuple[list[int], list[list[float]]]:
    """Integers below 2^53, [rows], and some numbers of each, [kinds, rows]: on the host, in one copy from a device."""
    if integers.is_cpu:
        return integers.tolist(), numbers.tolist()
    found, *kinds = torch.cat([integers.double().unsqueeze(0), numbers.double()]).tolist()
    return [int(value) for value in found], kinds
