"""What ranks send each other, as two operators of PyTorch's: whoever records or captures operators sees them as one each.

Made of torch.distributed's own: gloo between processors, NCCL between GPUs. The group is that of all processes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

_gather_on_device: Callable[[Tensor, Tensor], object] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""The second name is the older one."""
_library = torch.library.Library("selfspec", "FRAGMENT")
_library.define("gather(Tensor part) -> Tensor")
_library.define("sum(Tensor(a!) part) -> ()")


def gather(part: Tensor) -> Tensor:
    """All ranks' tensors of one shape, contiguous: [ranks, *shape]."""
    found: Tensor = torch.ops.selfspec.gather(part)
    return found


def sum_in_place(part: Tensor) -> None:
    """The sum over ranks in place of each one's part, contiguous; the same bits on every rank."""
    torch.ops.selfspec.sum(part)


def _exchange(part: Tensor) -> Tensor:
    """Everybody's part to everybody: between a few processors half the time of gloo's own gathering, measured."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = part.new_empty(size, *part.shape)
    others = [(rank + step) % size for step in range(1, size)]
    sending = [dist.isend(part, other) for other in others]
    found[rank] = part
    for other in reversed(others):
        dist.recv(found[other], other)
    for work in sending:
        if work is not None:
            work.wait()
    return found


def _gather_on_gpus(part: Tensor) -> Tensor:
    found = part.new_empty(dist.get_world_size(), *part.shape)
    _gather_on_device(found.view(-1), part.view(-1))
    return found


def _sum(part: Tensor) -> None:
    dist.all_reduce(part)


_library.impl("gather", _exchange, "CPU")
_library.impl("gather", _gather_on_gpus, "CUDA")
_library.impl("sum", _sum, "CPU")
_library.impl("sum", _sum, "CUDA")
