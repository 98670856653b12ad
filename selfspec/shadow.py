"""Step 6 of a round: hidden states of candidate layers become shadow tokens, in one pass through norm and head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.choices import Choices
from policies import RoundRecord, Shadow, ShadowTokens


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

    def shadow_tokens(self, num_rows: int, target_tokens: Tensor, p: Tensor | None = None) -> Shadow:
        """Norm + head over rows 0 .. num_rows-1 of the candidate layers, in pieces that need little memory.

        target_tokens: int64 [num_rows]. p: processed target distributions [num_rows, vocab] when sampling. Without them, on a
        CPU, a layer is computed when somebody asks for it.
        """
        model = self._model
        hidden = self._hidden[:, :num_rows]
        if p is None and model.device.type == "cpu":
            return DeferredShadow(model, self._slot, hidden.clone(), target_tokens)
        shape = len(self.layers), num_rows
        hidden = hidden[[*self._slot.values()]].reshape(-1, model.hidden_size)
        choices = model.draft_choices(hidden, "confidence")
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


class DeferredShadow:
    """Hidden states that become shadow tokens layer by layer, when they are asked for. See `policies.Shadow`.

    slots: where a layer's states are in hidden, [slots, rows, hidden], which nobody else writes to.
    """

    target_probabilities = None

    def __init__(self, model: LayerSkipModel, slots: Mapping[int, int], hidden: Tensor, target_tokens: Tensor) -> None:
        self._model, self._slots = model, slots
        self._hidden: Tensor | None = hidden
        self._known: dict[int, Choices] = {}
        self.layers = tuple(slots)
        self.target_tokens = target_tokens
        self.num_rows = target_tokens.shape[0]

    @property
    def tokens(self) -> Tensor:
        """int64 [layers, rows]."""
        self.compute_all()
        return torch.stack([self._known[layer].tokens for layer in self.layers])

    @property
    def confidences(self) -> Tensor:
        """float32 [layers, rows]."""
        self.compute_all()
        return torch.stack([self._known[layer].confidences for layer in self.layers])

    def rows_of(self, layer: int) -> list[tuple[bool, float]]:
        """See `Shadow`."""
        self.compute(layer, ())
        known = self._known[layer]
        matches = (token == target for token, target in zip(known.tokens.tolist(), self.target_tokens.tolist()))
        return list(zip(matches, known.confidences.tolist()))

    def compute(self, layer: int, others: Sequence[Shadow]) -> None:
        """See `Shadow`."""
        missing = [one for one in (self, *others) if isinstance(one, DeferredShadow) and layer not in one._known]
        if missing:
            _fill([(one, layer) for one in missing])

    def compute_all(self) -> None:
        """Every layer that is still missing; the hidden states are then let go."""
        missing = [(self, layer) for layer in self.layers if layer not in self._known]
        if missing:
            _fill(missing)
        self._hidden = None

    def states(self, layer: int) -> Tensor:
        """[rows, hidden] of a layer that is still missing."""
        assert self._hidden is not None
        return self._hidden[self._slots[layer]]


def settle(record: RoundRecord) -> RoundRecord:
    """The record, which no longer holds hidden states: for those who keep it."""
    if isinstance(record.shadow, DeferredShadow):
        record.shadow.compute_all()
    return record


def _fill(missing: Sequence[tuple[DeferredShadow, int]]) -> None:
    """One pass through norm and head for all of these."""
    parts = [shadow.states(layer) for shadow, layer in missing]
    with torch.inference_mode():
        choices = missing[0][0]._model.draft_choices(parts[0] if len(parts) == 1 else torch.cat(parts), "confidence")
    first = 0
    for shadow, layer in missing:
        last = first + shadow.num_rows
        shadow._known[layer] = Choices(choices.tokens[first:last], choices.numbers[:, first:last])
        first = last
