"""The processes of one `accelerate launch`: each takes its share of the prompts, the first one puts the results together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

Item = TypeVar("Item")


class Workers:
    """This process among those that share a run; alone unless it was started by `accelerate launch`.

    index: its number. count: how many there are. device: where it computes.
    """

    def __init__(self, device: torch.device) -> None:
        state = PartialState(cpu=device.type == "cpu")
        self._state = state
        self.index = state.process_index
        self.count = state.num_processes
        self.is_main = state.is_main_process
        self.device = state.device if self.count > 1 and device.type == "cuda" else device

    def share(self, items: Sequence[Item]) -> list[Item]:
        """This process's items: every count-th."""
        return list(items[self.index :: self.count])

    def gather(self, items: Sequence[Item]) -> list[Item]:
        """All processes' items, in every process."""
        if self.count == 1:
            return list(items)
        everything: list[Item] = gather_object(list(items))
        return everything

    def from_main(self, value: Any) -> Any:
        """The first process's value, in every process."""
        if self.count == 1:
            return value
        return broadcast_object_list([value])[0]

    def wait(self) -> None:
        self._state.wait_for_everyone()
