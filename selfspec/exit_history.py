"""The exit hidden states of a whole text, kept for a policy that looks back at all of it (Pacer)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel


class ExitHistory:
    """Every row's hidden state at some exit layers, by position; rows of rejected drafts are overwritten by later ones.

    A committed row passes all layers, in its draft or in verification, so each of these layers has seen it.
    """

    def __init__(self, model: LayerSkipModel, layers: tuple[int, ...], max_length: int) -> None:
        self._slot = {layer: slot for slot, layer in enumerate(layers)}
        self._hidden = torch.empty(
            len(layers), max_length, model.hidden_size, dtype=model.dtype, device=model.device
        )  # [layers, positions, hidden]
        self.max_length = max_length

    def __deepcopy__(self, memo: dict[int, object]) -> ExitHistory:
        """Itself: a policy that is copied for another text drops what it knew of this one."""
        return self

    def recording(self, position: int) -> Callable[[int, int, Tensor], None]:
        """capture(first_row, layers_done, hidden) for rows counted from this position."""

        def capture(first_row: int, layers_done: int, hidden: Tensor) -> None:
            slot = self._slot.get(layers_done)
            if slot is not None:
                first = position + first_row
                self._hidden[slot, first : first + hidden.shape[0]] = hidden

        return capture

    def take(self, outputs: Tensor, position: int, rows: int) -> None:
        """Rows from this position on, of every layer's outputs [layers, rows or more, hidden]."""
        for layer, slot in self._slot.items():
            self._hidden[slot, position : position + rows] = outputs[layer - 1, :rows]

    def rows(self, exit_layer: int, start: int, stop: int) -> Tensor:
        """[stop - start, hidden] of the rows at these positions."""
        return self._hidden[self._slot[exit_layer], start:stop]
