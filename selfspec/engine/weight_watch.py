"""Notices that a transformers model's weights are no longer the ones that were copied.

PyTorch has no signal for this: a parameter's version counter does not change when it is written through `.data` or by a fused
optimiser. So every call compares:

- which parameters there are, their addresses and version counters, and whatever else affects what the model computes (hooks,
  scalars, its configuration: `BeyondWeights`);
- a sample of the numbers in every tensor, spread over its rows and columns, bit for bit;
- checksums of a few blocks of all weights, in turn, within `_SHARE` of the time that calls have taken.

The first two find every change of a noticeable part of a tensor at the next call: an optimiser's step, a loaded checkpoint, a
merged adapter. The third finds the rest (one row, one number) some calls later.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, cycle
from operator import attrgetter
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from layerskip_models.checkpoints.as_built import BeyondWeights
from selfspec.engine.torch_mode import engine_mode

_SAMPLES = 32  # numbers of each tensor that every call compares
_SHARE = 0.003  # of the time that calls take, for checksums
_BLOCK = 1 << 19  # words of 8 bytes that one checksum step reads: 4 MB
_SEGMENT = 128  # words that share one sum: 1 kB, so that rows that swap places are noticed
_version_of = attrgetter("_version")
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightWatch:
    """Remembers the state of a model's weights, and says whether it has changed.

    model: its parameters have one dtype and one device. All weights are read once. The sums take 0.8 % of their size. Not for
    several threads at once.
    """

    def __init__(self, model: nn.Module) -> None:
        # Every module's parameters and children, by name. Comparing these takes a tenth of the time of walking the model.
        self._tables: list[dict[str, Any]] = [
            table for module in model.modules() for table in (module._parameters, module._modules)
        ]
        # Kept alive, so that nothing else gets their ids.
        self._held = [value for table in self._tables for value in table.values()]
        parameters = list(model.parameters())  # a tensor shared by several modules counts once
        self._device = parameters[0].device
        self._parameters = parameters
        self._versioned = [p for p in parameters if not p.is_inference()]
        self._identity = self._identify()
        self._beyond = BeyondWeights(model)
        flat = [_numbers(parameter) for parameter in parameters]
        self._places = [_sampled(numbers) for numbers in flat]
        with engine_mode(self._device):
            self._sample = torch.cat(self._places)
            started = perf_counter()
            self._blocks = [(block, _sums(block)) for numbers in flat for block in _blocks(numbers)]
            self._seconds = (perf_counter() - started) / len(self._blocks)  # of one block, as a first guess
        self._next = cycle(self._blocks)
        self._credit = 0.0  # seconds that checksums may take

    def changed(self) -> bool:
        if self._identify() != self._identity or self._beyond.changed():
            return True
        with engine_mode(self._device):
            return not torch.equal(torch.cat(self._places), self._sample) or self._block_changed()

    def moved(self) -> bool:
        """Whether anything but the numbers in the parameters has changed, so that shared weights are not enough."""
        return self._identify()[:2] != self._identity[:2] or self._beyond.changed()

    def _identify(self) -> tuple[list[int], list[int], list[int]]:
        """Ids of the objects in the modules; addresses and version counters of the parameters."""
        objects = chain.from_iterable(map(dict.values, self._tables))
        places = map(Tensor.data_ptr, self._parameters)
        return list(map(id, objects)), list(places), list(map(_version_of, self._versioned))

    def called(self, seconds: float) -> None:
        """Report how long a call took: the next `changed` may spend a small share of that."""
        most = self._seconds * len(self._blocks)  # more than one pass over the weights finds nothing more
        self._credit = min(self._credit + _SHARE * seconds, max(most, self._seconds))

    def _block_changed(self) -> bool:
        while self._credit >= self._seconds:
            started = perf_counter()
            block, sums = next(self._next)
            if not torch.equal(_sums(block), sums):
                return True
            spent = perf_counter() - started
            self._credit -= spent
            self._seconds += 0.2 * (spent - self._seconds)
        return False


def _numbers(parameter: Tensor) -> Tensor:
    """A parameter's memory as integers of the same width, [numbers]; all of its storage if it is not contiguous."""
    values = parameter.detach()
    if values.is_contiguous():
        return values.view(-1).view(_INTEGERS[values.element_size()])
    size = values.untyped_storage().nbytes() // values.element_size()
    return values.as_strided((size,), (1,), 0).view(_INTEGERS[values.element_size()])


def _sampled(numbers: Tensor) -> Tensor:
    """A view of some numbers. The step is odd, so that it covers all columns of a matrix with a power of two of them."""
    return numbers[:: numbers.numel() // _SAMPLES | 1][:_SAMPLES]


def _blocks(numbers: Tensor) -> Iterator[Tensor]:
    """The numbers in blocks, as words of 8 bytes if they are aligned."""
    width = 8 // numbers.element_size()
    if numbers.numel() % width == 0 and numbers.data_ptr() % 8 == 0:
        numbers = numbers.view(torch.int64)
    yield from numbers.split(_BLOCK)


def _sums(block: Tensor) -> Tensor:
    """Sums of the segments, int64, which may overflow."""
    whole = block.numel() // _SEGMENT * _SEGMENT
    parts = block[:whole].view(-1, _SEGMENT).sum(1, dtype=torch.int64)
    return torch.cat([parts, block[whole:].sum(0, keepdim=True, dtype=torch.int64)])
