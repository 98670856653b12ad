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


class Exchange:
    """Room for a part of every rank, [ranks, ..], between processors: each fills its own and gets the others'.

    What is awaited when it is sent comes in one message: announce it as early as you can. Between a few processors this takes
    half the time of gloo's own gathering (measured). parts: all of them. own: to be filled.
    """

    def __init__(self, parts: Tensor) -> None:
        group = dist.group.WORLD  # its own methods: `isend` and `irecv` take some microseconds more to come to the same
        assert group is not None
        self.parts, rank = parts, group.rank()
        self.own = parts[rank]
        self._group, self._sent = group, [self.own]
        self._others = [(other, [part]) for other, part in enumerate(parts.unbind()) if other != rank]
        self._arriving: list[dist.Work] = []

    def announce(self) -> None:
        """Begin to receive: nobody reads the others' parts any more."""
        self._arriving = [self._group.recv(part, other, 0) for other, part in self._others]

    def complete(self) -> None:
        """Send the own part, and wait for the others'."""
        sending = [self._group.send(self._sent, other, 0) for other, _ in self._others]
        for (other, _), arriving, sent in zip(self._others, self._arriving, sending):
            try:
                arriving.wait()
                sent.wait()
            except RuntimeError as error:
                raise RuntimeError(f"rank {other}: {error}") from error


def _exchange(part: Tensor) -> Tensor:
    exchange = Exchange(part.new_empty(dist.get_world_size(), *part.shape))
    exchange.announce()
    exchange.own.copy_(part)
    exchange.complete()
    return exchange.parts


def _gather_on_gpus(part: Tensor) -> Tensor:
    found = part.new_empty(dist.get_world_size(), *part.shape)
    _gather_on_device(found.view(-1), part.view(-1))
    return found


def _sum_in_order(part: Tensor) -> None:
    """A rank adds up a share of the numbers, in the order of ranks: so a sum does not depend on what is summed with it."""
    size = dist.get_world_size()
    share = -(-part.numel() // size)
    parts = part.new_zeros(size * share)
    parts[: part.numel()] = part.view(-1)
    of_all = torch.empty_like(parts)
    dist.all_to_all_single(of_all, parts)
    found = of_all.view(size, share)
    for more in found[1:]:
        found[0] += more
    _gather_on_device(parts, found[0])
    part.view(-1).copy_(parts[: part.numel()])


def _sum_on_gpus(part: Tensor) -> None:
    dist.all_reduce(part)


_library.impl("gather", _exchange, "CPU")
_library.impl("gather", _gather_on_gpus, "CUDA")
_library.impl("sum", _sum_in_order, "CPU")
_library.impl("sum", _sum_on_gpus, "CUDA")
