"""What was seen of a text's hidden states between the layers, and how those of candidate layers become shadow tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.choices import Choices, choices_of
from policies import Shadow, ShadowTokens
from policies.records import read_matches

AtExit = Callable[[Tensor, int], Tensor]
"""at_exit(hidden, layer): the states that the head sees, as `LayerSkipModel.at_exit` gives them."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefixHiddenStates:
    """What a finished text leaves of its rows' hidden states: at these layers, [layers, max_length, hidden]."""

    layers: tuple[int, ...]
    rows: Tensor


class HiddenStates:
    """The rows of one round at every layer, and the rows of the whole text at the layers that a policy looks back at.

    shadow_layers: candidate exit layers, whose states are learned from. context_layers: those kept for the whole text of at
    most `max_length` rows (`policies.ContextStates`). max_rows: of a round, until `reserve` makes room for more. kept_layers:
    others whose rows of a round are wanted.
    """

    def __init__(
        self,
        model: LayerSkipModel,
        shadow_layers: tuple[int, ...],
        context_layers: tuple[int, ...] = (),
        *,
        max_rows: int = 8,
        max_length: int = 0,
        kept_layers: tuple[int, ...] = (),
    ) -> None:
        self._model = model
        self.layers = shadow_layers
        self.max_length = max_length
        self._slot = {layer: slot for slot, layer in enumerate(context_layers)}
        self._watched = {*shadow_layers, *context_layers, *kept_layers}
        self._candidates = torch.tensor(shadow_layers, dtype=torch.long, device=model.device) - 1
        self._context = self._empty(len(context_layers), max_length)
        self.round = self._empty(model.num_layers, max_rows)
        """[layers, rows, hidden]: what layer l puts out for a round's rows is at [l]. Passes may write to it themselves."""

    def _empty(self, *shape: int) -> Tensor:
        model = self._model
        return torch.empty(*shape, model.hidden_size, dtype=model.dtype, device=model.device)

    def __deepcopy__(self, memo: dict[int, object]) -> HiddenStates:
        """Itself: a policy that is copied for another text drops what it knew of this one."""
        return self

    def reserve(self, rows: int) -> None:
        """Make room for rounds of `rows` rows. If the buffer grows, what was seen of this round is lost."""
        if self.round.shape[1] < rows:
            self.round = self._empty(self._model.num_layers, rows)

    def watches(self, start: int, stop: int) -> bool:
        """Return whether running layers [start, stop) yields anything to keep."""
        return any(start < layer <= stop for layer in self._watched)

    def capture(self, first_row: int, layers_done: int, hidden: Tensor) -> None:
        """Keep the output of one layer for rows first_row .. of this round."""
        if layers_done in self._watched:
            self.round[layers_done - 1, first_row : first_row + hidden.shape[0]] = hidden

    def take(self, first_row: int, start: int, outputs: Tensor) -> None:
        """Like `capture`, for all layers of a pass at once: outputs [layers, rows, hidden], from layer `start` on."""
        count, rows, _ = outputs.shape
        self.round[start : start + count, first_row : first_row + rows] = outputs

    def capture_prompt(self, learned: int, first: int, layers_done: int, hidden: Tensor) -> None:
        """While a prompt is read: rows from position `first` on. The last `learned` of them become the round's rows."""
        slot = self._slot.get(layers_done)
        if slot is not None:
            self._context[slot, first : first + hidden.shape[0]] = hidden
        if learned and layers_done in self._watched:
            last = hidden[-learned:]
            self.round[layers_done - 1, : last.shape[0]] = last

    def commit(self, position: int, rows: int) -> None:
        """So many of the round's first rows stay, from this position of the text on."""
        for layer, slot in self._slot.items():
            self._context[slot, position : position + rows] = self.round[layer - 1, :rows]

    @property
    def kept(self) -> PrefixHiddenStates | None:
        """What a later text with the same beginning may go on from; None if nothing was kept for the whole text."""
        return PrefixHiddenStates((*self._slot,), self._context) if self._slot else None

    def adopt(self, kept: PrefixHiddenStates | None, rows: int) -> bool:
        """Take over the first rows of an earlier text that began alike. False if a layer of them is missing."""
        if kept is None or not {*self._slot} <= {*kept.layers}:
            return not self._slot
        for layer, slot in self._slot.items():
            self._context[slot, :rows] = kept.rows[kept.layers.index(layer), :rows]
        return True

    def rows(self, exit_layer: int, start: int, stop: int) -> Tensor:
        """[stop - start, hidden] of the rows at these positions; see `policies.ContextStates`."""
        return self._context[self._slot[exit_layer], start:stop]

    def shadow_tokens(
        self,
        num_rows: int,
        target_tokens: Tensor,
        overlap: Callable[[Tensor], Tensor] | None = None,
        at_exit: AtExit | None = None,
        first: int = 0,
    ) -> Shadow:
        """Norm + head over `num_rows` rows of the round at the candidate layers, in pieces that need little memory.

        target_tokens: int64 [num_rows]. overlap: when sampling, the chance of a draft from each row of logits
        [num_rows, vocab], which then exist for one layer at a time. Without it, on a CPU, a layer is computed when somebody
        asks for it. at_exit: None for the model's own. first: the first of the rows. Behind row 0, where few are asked for,
        that is so on any device.
        """
        model, at_exit = self._model, at_exit or self._model.at_exit
        hidden = self.round[self._candidates, first : first + num_rows]  # a copy: the next round writes there
        if overlap is not None:
            found, chances = [], []
            for rows, layer in zip(hidden, self.layers):
                logits = model.draft_logits(at_exit(rows, layer))
                found.append(choices_of(logits, "confidence"))
                chances.append(overlap(logits))
            return ShadowTokens(
                layers=self.layers,
                tokens=torch.stack([choices.tokens for choices in found]),
                confidences=torch.stack([choices.confidences for choices in found]),
                target_tokens=target_tokens,
                acceptance_probabilities=torch.stack(chances),
            )
        if model.device.type == "cpu" or first:
            return DeferredShadow(model, self.layers, hidden, target_tokens, at_exit)
        shape = len(self.layers), num_rows
        if model.adapters:
            hidden = torch.stack([at_exit(rows, layer) for rows, layer in zip(hidden, self.layers)])
        choices = model.draft_choices(hidden.view(-1, model.hidden_size), "confidence")
        tokens, confidences = choices.tokens.view(shape), choices.confidences.view(shape)
        return ShadowTokens(layers=self.layers, tokens=tokens, confidences=confidences, target_tokens=target_tokens)


class DeferredShadow:
    """Hidden states, [layers, rows, hidden], that become shadow tokens when these are asked for. See `policies.Shadow`."""

    acceptance_probabilities = None

    def __init__(
        self, model: LayerSkipModel, layers: tuple[int, ...], hidden: Tensor, target_tokens: Tensor, at_exit: AtExit
    ) -> None:
        self._model, self._at_exit = model, at_exit
        self._hidden: Tensor | None = hidden
        self._known: dict[int, Choices] = {}
        self.layers, self.target_tokens, self.num_rows = layers, target_tokens, target_tokens.shape[0]

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
        _fill([(one, layer) for one in (self, *others) if isinstance(one, DeferredShadow)])

    def compute_all(self) -> None:
        """Every layer that is still missing; the hidden states are then let go."""
        _fill([(self, layer) for layer in self.layers])
        self._hidden = None


def _fill(wanted: Sequence[tuple[DeferredShadow, int]]) -> None:
    """Compute what is missing of these in one pass through norm and head."""
    missing, parts = [(shadow, layer) for shadow, layer in wanted if layer not in shadow._known], []
    if not missing:
        return
    for shadow, layer in missing:
        assert shadow._hidden is not None
        parts.append(shadow._at_exit(shadow._hidden[shadow.layers.index(layer)], layer))
    with torch.inference_mode():
        choices = missing[0][0]._model.draft_choices(parts[0] if len(parts) == 1 else torch.cat(parts), "confidence")
    first = 0
    for shadow, layer in missing:
        last = first + shadow.num_rows
        shadow._known[layer] = Choices(choices.tokens[first:last], choices.numbers[:, first:last])
        first = last
