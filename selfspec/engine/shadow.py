"""Step 6 of a round: hidden states of candidate layers become shadow tokens, in one pass through norm and head."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.choices import Choices
from policies import RoundRecord, Shadow
from policies.records import read_matches

AtExit = Callable[[Tensor, int], Tensor]
"""at_exit(hidden, layer): the states that the head sees, as `LayerSkipModel.at_exit` gives them."""


class DeferredShadow:
    """Hidden states that become shadow tokens layer by layer, when they are asked for. See `policies.Shadow`.

    hidden: [layers, rows, hidden], which nobody else writes to.
    """

    target_probabilities = None

    def __init__(
        self,
        model: LayerSkipModel,
        layers: tuple[int, ...],
        hidden: Tensor,
        target_tokens: Tensor,
        at_exit: AtExit,
    ) -> None:
        self._at_exit = at_exit
        self._model, self._slots = model, {layer: slot for slot, layer in enumerate(layers)}
        self._hidden: Tensor | None = hidden
        self._known: dict[int, Choices] = {}
        self.layers = layers
        self.target_tokens = target_tokens
        self.num_rows = target_tokens.shape[0]

    def __deepcopy__(self, memo: dict[int, object]) -> DeferredShadow:
        """Itself, complete: nothing of it changes any more, so a copied policy may have it too."""
        self.compute_all()
        return self

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
        return read_matches(known.tokens, self.target_tokens, known.confidences)

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
        """[rows, hidden] of a layer that is still missing, as the head sees them."""
        assert self._hidden is not None
        return self._at_exit(self._hidden[self._slots[layer]], layer)


def compute_shadow(record: RoundRecord) -> None:
    """Compute all shadow tokens of a record that is kept, so that it no longer holds hidden states."""
    if isinstance(record.shadow, DeferredShadow):
        record.shadow.compute_all()


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
