"""What two stages tell each other through their connection.

Numbers travel as NumPy arrays in the host's memory, whatever devices the stages are on: a tensor would go through shared
memory, which takes longer to set up than a few rows take to copy.
"""

from __future__ import annotations

import pickle
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LogitsProcessorList

OVER = "over"
"""The answer to End: everything of the text before it has then arrived."""


class DrafterError(RuntimeError):
    """The process that drafts has ended, has fallen silent, or failed. The message says what to do."""


@dataclass(slots=True, kw_only=True, eq=False)
class Begin:
    """A text. prompt: ids. max_length: with all new tokens. processors: their tensors on the CPU.

    seed: of the drafts' random numbers, None when greedy.
    """

    prompt: list[int]
    max_length: int
    processors: LogitsProcessorList
    seed: int | None


@dataclass(slots=True, eq=False)
class Verified:
    """What became of the oldest drafts: `count` were accepted; `token` follows them, None if nothing was rejected.

    ahead: most drafts that wait from now on.
    """

    count: int
    token: int | None
    ahead: int


class End:
    """The text is complete, or the second stage has no use for it any more. May also be said between two texts."""


@dataclass(slots=True, eq=False)
class DraftedRow:
    """rejections: that the drafter had heard of. hidden: exit state, [hidden], of the row that `token` was drafted from.

    q: float32 [vocab], what it was drawn from when sampling. seconds: of the step before, with its sending; 0 for none.
    """

    rejections: int
    hidden: NDArray[Any]
    token: int
    q: NDArray[np.float32] | None
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class Failed:
    """The drafter could not go on with a text, or with loading its layers."""

    error: Exception

    @classmethod
    def because(cls, error: Exception) -> Failed:
        """error: is sent as it is if it can be."""
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return cls(DrafterError(f"the process that drafts failed with {type(error).__name__}: {error}"))
        return cls(error)


def as_array(values: Tensor) -> NDArray[Any]:
    """For the way. NumPy has no bfloat16: such numbers travel as what they are in memory, int16."""
    values = values.cpu()
    return (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy()


def as_tensor(array: NDArray[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """What `as_array` was given, in the dtype and on the device of the stage that receives it."""
    values = torch.from_numpy(array)
    if values.dtype == torch.int16:
        values = values.view(torch.bfloat16)
    return values.to(device, dtype)


def processors_on(processors: LogitsProcessorList, device: torch.device) -> LogitsProcessorList:
    """The same processors with their tensors there."""
    moved = LogitsProcessorList()
    for processor in processors:
        tensors = {
            name: value.to(device)
            for name, value in getattr(processor, "__dict__", {}).items()
            if isinstance(value, Tensor)
        }
        if tensors:
            processor = copy(processor)
            vars(processor).update(tensors)
        moved.append(processor)
    return moved
