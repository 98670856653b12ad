"""Notices that a transformers model's weights are no longer the ones that were copied.

PyTorch has no signal for this: a parameter's version counter does not change when it is written through `.data` or by a fused
optimiser. So every call compares:

- which parameters and modules there are, their classes, hooks and replaced forwards, by identity;
- the addresses and version counters of the parameters, and the rotary frequencies;
- a sample of the numbers in every parameter, spread over its rows and columns, bit for bit.

Together they find every change of a noticeable part of a tensor at the next call: an optimiser's step, a loaded checkpoint, a
merged adapter. A write through `.data` to a few numbers is not found.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from layerskip_models.checkpoints.as_built import rotary_angles
from selfspec.engine.torch_mode import engine_mode

_SAMPLES = 32  # numbers of each parameter that every call compares
_version_of, _class_of = attrgetter("_version"), attrgetter("__class__")
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightWatch:
    """Remembers the state of a model's weights, and says whether it has changed.

    model: its parameters have one dtype and one device. It is referred to weakly. Not for several threads at once.
    """

    def __init__(self, model: nn.Module) -> None:
        whole, *self._inner = model.modules()  # `model` may be a proxy
        self._root, self._class = ref(whole), whole.__class__
        # What each module refers to, by name. Comparing these takes a tenth of the time of walking the model.
        self._tables = [module.__dict__ for module in model.modules()]
        self._held = [*self._objects()]  # kept alive, so that nothing else gets their ids
        self._parameters = [*model.parameters()]  # a tensor shared by several modules counts once
        self._versioned = [parameter for parameter in self._parameters if not parameter.is_inference()]
        self._rotary: list[Any] = [module for module in self._inner if "inv_freq" in module._buffers]
        self._state = self._now()
        self._places = [_sampled(_numbers(parameter)) for parameter in self._parameters]
        with engine_mode(self._parameters[0].device):
            self._sample = torch.cat(self._places)

    def changed(self) -> bool:
        if self._now() != self._state:
            return True
        with engine_mode(self._sample.device):
            return not torch.equal(torch.cat(self._places), self._sample)

    def moved(self) -> bool:
        """Whether anything but the numbers in the parameters has changed, so that shared weights are not enough."""
        return self._now()[:-1] != self._state[:-1]

    def _now(self) -> tuple[Any, ...]:
        """Everything but numbers that is compared; the parameters' version counters come last."""
        root = self._root()  # None once it is freed, when nobody asks any more
        return (
            [*map(id, self._objects())],
            [*chain.from_iterable((*table["_forward_hooks"], *table["_forward_pre_hooks"]) for table in self._tables)],
            [*torch_modules._global_forward_hooks, *torch_modules._global_forward_pre_hooks],
            [*map(_class_of, self._inner), self._class if root is None else root.__class__],
            [(rotary.attention_scaling, rotary_angles(rotary).tolist()) for rotary in self._rotary],
            [*map(Tensor.data_ptr, self._parameters)],
            [*map(_version_of, self._versioned)],
        )

    def _objects(self) -> Iterator[Any]:
        """Parameters, modules and replaced forwards, in the modules' order."""
        return chain.from_iterable(
            (*table["_parameters"].values(), *table["_modules"].values(), table.get("forward"))
            for table in self._tables
        )


def _numbers(parameter: Tensor) -> Tensor:
    """View a parameter's memory as integers of the same width, [numbers]; all its storage if it is not contiguous."""
    values = parameter.detach()
    if values.is_contiguous():
        return values.view(-1).view(_INTEGERS[values.element_size()])
    size = values.untyped_storage().nbytes() // values.element_size()
    return values.as_strided((size,), (1,), 0).view(_INTEGERS[values.element_size()])


def _sampled(numbers: Tensor) -> Tensor:
    """View some numbers. The step is odd, so that it covers all columns of a matrix with a power of two of them."""
    return numbers[:: numbers.numel() // _SAMPLES | 1][:_SAMPLES]
