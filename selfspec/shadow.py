"""Step 6 of a round: hidden states of candidate layers become shadow tokens, in one pass through norm and head."""

from __future__ import annotations

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from policies import ShadowTokens


class ShadowRecorder:
    """Keeps the hidden states that a policy wants to learn from while rows pass through the layers.

    layers: the candidate exit layers. max_rows: most rows in one round. The buffer is allocated once.
    every_layer: keep room for all layers, so that a pass may write its outputs to `memory` as they come.
    """

    def __init__(
        self, model: LayerSkipModel, layers: tuple[int, ...], max_rows: int, *, every_layer: bool = False
    ) -> None:
        self._model = model
        self._slot = {layer: layer - 1 if every_layer else slot for slot, layer in enumerate(layers)}
        self.layers = layers
        self.every_layer = every_layer
        self.max_rows = max_rows
        self._hidden = torch.empty(
            model.num_layers if every_layer else len(layers),
            max_rows,
            model.hidden_size,
            dtype=model.dtype,
            device=model.device,
        )  # [layers, rows, hidden]

    @property
    def memory(self) -> Tensor:
        """[layers, rows, hidden]: with `every_layer`, what layer l puts out for a round's rows belongs at [l]."""
        return self._hidden

    def watches(self, start: int, stop: int) -> bool:
        """Whether running layers [start, stop) yields anything to keep."""
        return any(start < layer <= stop for layer in self.layers)

    def capture(self, first_row: int, layers_done: int, hidden: Tensor) -> None:
        """Store the output of one layer for rows first_row .. of this round, if that layer is a candidate."""
        slot = self._slot.get(layers_done)
        if slot is not None:
            self._hidden[slot, first_row : first_row + hidden.shape[0]] = hidden

    def capture_at(self, rows: Tensor, layers_done: int, hidden: Tensor) -> None:
        """The same for rows that only the device knows, int64 [rows]; equal ones bring equal states."""
        slot = self._slot.get(layers_done)
        if slot is not None:
            self._hidden[slot].index_copy_(0, rows, hidden)

    def capture_last(self, layers_done: int, hidden: Tensor) -> None:
        """During prefill: store the last `max_rows` rows (or as many as there are)."""
        self.capture(0, layers_done, hidden[-self.max_rows :])

    def shadow_tokens(self, num_rows: int, target_tokens: Tensor, p: Tensor | None = None) -> ShadowTokens:
        """Norm + head over rows 0 .. num_rows-1 of all candidate layers; no more logits at a time than a few rows have.

        target_tokens: int64 [num_rows]. p: processed target distributions [num_rows, vocab] when sampling.
        """
        shape = len(self.layers), num_rows
        hidden = self._hidden[[*self._slot.values()], :num_rows].reshape(-1, self._model.hidden_size)
        choices = self._model.draft_choices(hidden, "confidence")
        tokens = choices.tokens.view(shape)
        probabilities = None
        if p is not None:
            probabilities = p.unsqueeze(0).expand(len(self.layers), -1, -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return ShadowTokens(
            layers=self.layers,
            tokens=tokens,
            confidences=choices.confidences.view(shape),
            target_tokens=target_tokens,
            target_probabilities=probabilities,
        )
