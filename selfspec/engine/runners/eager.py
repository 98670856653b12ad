"""The eager runner: every operation is called from Python, over the rows of all sequences at hand.

A pass takes rows of several sequences, each at its own position in a cache of its own, so nothing is padded or copied when
they differ in what they accept. Matrices see all rows at once, and their weights are read once.

On our own kernels a row's numbers do not depend on the other rows of a pass, so a sequence in a batch gives the same bits as
the sequence alone. There, a pass over few rows is a single native call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import get_args

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.choices import Detail, HeadOutput
from layerskip_models.draft_weights import drafter_of
from layerskip_models.kernels.native_forward import STEP_ROWS, NativeForward
from layerskip_models.kernels.native_linear import only_operators
from layerskip_models.kv_cache import CacheRows
from layerskip_models.transfer import to_device
from selfspec.engine.runners.runner import Head, RowBuffers, SequenceRows

_DETAILS = get_args(Detail)


class EagerRunner:
    """See `selfspec.engine.runners.runner.Runner`. For one caller at a time."""

    def __init__(self, model: LayerSkipModel) -> None:
        self.model = model
        self._native = model.steps()  # None where our kernels don't run all of the model
        self._buffers: list[RowBuffers] = []
        self._together = torch.empty(STEP_ROWS, model.hidden_size, dtype=model.dtype, device=model.device)
        # [layers, STEP_ROWS, hidden], of a native pass whose rows several policies observe.
        self._outputs = torch.empty(0)
        self._rounded: dict[int, EagerRunner] = {}

    def buffers(self, index: int, rows: int) -> RowBuffers:
        model = self.model
        while len(self._buffers) <= index:
            self._buffers.append(RowBuffers(model, torch.empty(0)))
        found = self._buffers[index]
        if found.hidden.shape[0] < rows:
            found.hidden = torch.empty(rows, model.hidden_size, dtype=model.dtype, device=model.device)
        return found

    def rounded(self, bits: int) -> EagerRunner:
        model = drafter_of(self.model, bits)
        found = self._rounded.get(bits)
        if found is None or found.model is not model:  # its weights are made anew after the model's have changed
            found = self._rounded[bits] = EagerRunner(model)
        return found

    def run(self, groups: Sequence[SequenceRows], start: int, stop: int, head: Head | None) -> None:
        native = self._native_for(groups)
        if native is None or start == stop or (start and (stop < self.model.num_layers or head != "full")):
            self._run_layers(groups, start, stop, head)
            return
        if head == "draft" and self.model.is_steered(stop):  # a bias for each text, which the single call does not take
            self.run(groups, start, stop, None)
            self._run_head(groups, _gathered(groups), head)
            return
        logits = self._room_for_logits(groups) if head is not None else None
        if start:
            x, where, record = _gathered(groups), _cache_rows(groups), self._record(groups)
            tokens, best = native.rows(x, where, start, stop, record=record, logits=logits)
            _hand_out(groups, [HeadOutput(*output) for output in zip(tokens, best)], logits)
            self._hand_out_states(groups, start, stop)
        elif len(groups) == 1:  # the hidden states go where they belong at once
            (rows,) = groups
            first, end, states = rows.first, rows.end, rows.seq_round.states
            outputs = native.tokens(
                rows.tokens[first:end],
                ((rows.seq_round.cache, end - first),),
                stop,
                rows.hidden[first:end],
                head=head,
                detail=rows.detail if head == "draft" else "token",
                record=None if states is None else (states.round, first),
                logits=logits,
            )
            rows.outputs, rows.logits = outputs, logits
        else:
            tokens = [token for rows in groups for token in rows.tokens[rows.first : rows.end]]
            x, where, record = self._together[: len(tokens)], _cache_rows(groups), self._record(groups)
            detail = _max_detail(groups) if head == "draft" else "token"
            outputs = native.tokens(tokens, where, stop, x, head=head, detail=detail, record=record, logits=logits)
            _scatter(groups, x)
            self._hand_out_states(groups, 0, stop)
            if head is not None:
                _hand_out(groups, outputs, logits)

    def _native_for(self, groups: Sequence[SequenceRows]) -> NativeForward | None:
        """Return what runs this pass in a single call, if something does: few rows."""
        if self._native is None or only_operators():
            return None
        total = sum(rows.end - rows.first for rows in groups)
        return self._native if total <= STEP_ROWS else None

    def _run_layers(self, groups: Sequence[SequenceRows], start: int, stop: int, head: Head | None) -> None:
        """Layer by layer."""
        model = self.model
        if start:
            x = _gathered(groups)
        else:
            found = [token for rows in groups for token in rows.tokens[rows.first : rows.end]]
            x = model.embed(to_device(torch.tensor(found, dtype=torch.long, device="cpu"), model.device))
        if start < stop:
            x = model.run_layers(x, start, stop, _cache_rows(groups), _observer(groups, start, stop))
            if head != "full":
                _scatter(groups, x)
        if head is not None:
            self._run_head(groups, x, head)

    def _run_head(self, groups: Sequence[SequenceRows], x: Tensor, head: Head) -> None:
        """x: [rows, hidden] of all groups."""
        model, drafts = self.model, head == "draft"
        parts = list(x.split([rows.end - rows.first for rows in groups]))
        if drafts:
            parts = [model.at_exit(part, rows.exit_layer, rows.seq_round.steering) for rows, part in zip(groups, parts)]
        for greedy in (True, False):
            chosen = [(rows, part) for rows, part in zip(groups, parts) if rows.greedy == greedy]
            if not chosen:
                continue
            part_of = [rows for rows, _ in chosen]
            hidden = chosen[0][1] if len(chosen) == 1 else torch.cat([part for _, part in chosen])
            if greedy:
                detail = _max_detail(part_of) if drafts else "token"
                choices = model.draft_choices(hidden, detail) if drafts else model.choices(hidden)
                _hand_out(part_of, choices.outputs())
            else:
                logits = model.draft_logits(hidden) if drafts else model.logits(hidden)
                for rows, own in zip(part_of, logits.split([rows.end - rows.first for rows in part_of])):
                    rows.outputs, rows.logits = (), own

    def _room_for_logits(self, groups: Sequence[SequenceRows]) -> Tensor | None:
        """Where a pass puts the logits of all rows, if tokens of some are sampled or processed: [rows, vocab]."""
        if all(rows.greedy for rows in groups):
            return None
        count = sum(rows.end - rows.first for rows in groups)
        return torch.empty(count, self.model.vocab_size, dtype=torch.float32, device="cpu")

    def _record(self, groups: Sequence[SequenceRows]) -> tuple[Tensor, int] | None:
        """Where a native pass puts every layer's output, if somebody observes: at its place, or to be handed out."""
        if len(groups) == 1:
            states = groups[0].seq_round.states
            return None if states is None else (states.round, groups[0].first)
        if all(rows.seq_round.states is None for rows in groups):
            return None
        if not self._outputs.numel():
            shape = self.model.num_layers, STEP_ROWS, self.model.hidden_size
            self._outputs = torch.empty(shape, dtype=self.model.dtype, device=self.model.device)
        return self._outputs, 0

    def _hand_out_states(self, groups: Sequence[SequenceRows], start: int, stop: int) -> None:
        """Give each sequence that observes the outputs of its own rows."""
        for rows, begin, end in _places(groups) if len(groups) > 1 else ():
            if rows.seq_round.states is not None:
                rows.seq_round.states.take(rows.first, start, self._outputs[start:stop, begin:end])


def _places(groups: Sequence[SequenceRows]) -> Iterator[tuple[SequenceRows, int, int]]:
    """Where each group's rows begin and end in a pass."""
    begin = 0
    for rows in groups:
        end = begin + rows.end - rows.first
        yield rows, begin, end
        begin = end


def _cache_rows(groups: Sequence[SequenceRows]) -> CacheRows:
    return [(rows.seq_round.cache, rows.end - rows.first) for rows in groups]


def _gathered(groups: Sequence[SequenceRows]) -> Tensor:
    """Gather the hidden states of all rows, [rows, hidden]."""
    parts = [rows.hidden[rows.first : rows.end] for rows in groups]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _scatter(groups: Sequence[SequenceRows], x: Tensor) -> None:
    for rows, begin, end in _places(groups):
        rows.hidden[rows.first : rows.end] = x[begin:end]


def _hand_out(groups: Sequence[SequenceRows], outputs: Sequence[HeadOutput], logits: Tensor | None = None) -> None:
    """Give each sequence what the head said of its rows, and their logits if it asks for them."""
    for rows, begin, end in _places(groups):
        rows.outputs = outputs[begin:end]
        if logits is not None and not rows.greedy:
            rows.logits = logits[begin:end]


def _max_detail(groups: Sequence[SequenceRows]) -> Detail:
    """Find the detail that is enough for all of these."""
    return groups[0].detail if len(groups) == 1 else max((rows.detail for rows in groups), key=_DETAILS.index)


def _observer(groups: Sequence[SequenceRows], start: int, stop: int) -> Callable[[int, Tensor], None] | None:
    """Show the output of each layer to every sequence that observes any of these layers: its own rows."""
    observing = [
        (rows.seq_round.states, rows.first, begin, end)
        for rows, begin, end in _places(groups)
        if rows.seq_round.states is not None and rows.seq_round.states.watches(start, stop)
    ]
    if not observing:
        return None

    def observe(layers_done: int, hidden: Tensor) -> None:
        for states, first, begin, end in observing:
            states.capture(first, layers_done, hidden[begin:end])

    return observe
