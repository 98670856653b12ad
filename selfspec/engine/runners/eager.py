"""The eager runner: one native call for a pass over few rows where our kernels run the model, else operation by operation.

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
from layerskip_models.draft_vocabulary import draft_logits, draft_outputs, with_own_tokens
from layerskip_models.draft_weights import drafter_of
from layerskip_models.kernels.native_forward import STEP_ROWS
from layerskip_models.kernels.native_linear import only_operators
from layerskip_models.kv_cache import CacheRows
from layerskip_models.transfer import to_device
from selfspec.engine.draft import Draft
from selfspec.engine.runners.runner import Head, RunnerName

_DETAILS = get_args(Detail)


class EagerRunner:
    """See `selfspec.engine.runners.runner.Runner`. For one caller at a time."""

    def __init__(self, model: LayerSkipModel) -> None:
        self.model = model
        self._native = model.steps()  # None where our kernels don't run all of the model
        self._together = torch.empty(STEP_ROWS, model.hidden_size, dtype=model.dtype, device=model.device)
        # [layers, STEP_ROWS, hidden], of a native pass whose rows several policies observe.
        self._outputs = torch.empty(0)
        self._rounded: dict[int, EagerRunner] = {}

    def rounded(self, bits: int) -> EagerRunner:
        model = drafter_of(self.model, bits)
        found = self._rounded.get(bits)
        if found is None or found.model is not model:  # its weights are made anew after the model's have changed
            found = self._rounded[bits] = EagerRunner(model)
        return found

    def run(self, drafts: Sequence[Draft], start: int, stop: int, head: Head | None) -> None:
        native, rows = self._native, sum(draft.end - draft.first for draft in drafts)
        # A single native call takes few rows, and what begins at a token or ends with the full head.
        single = start < stop and (not start or (stop == self.model.num_layers and head == "full"))
        if native is None or rows > STEP_ROWS or not single or only_operators():
            self._run_layers(drafts, start, stop, head)
            return
        if head == "draft" and not self._takes_one_call(drafts, stop):
            self.run(drafts, start, stop, None)
            self._run_head(drafts, gathered(drafts), head)
            return
        few = head == "draft" and self.model.draft_vocabulary is not None  # then the head knows few tokens
        logits: Tensor | None = None  # of all rows, if tokens of some are sampled or processed
        if head is not None and not all(draft.sequence.greedy for draft in drafts):
            logits = torch.empty(rows, self.model.vocab_size, dtype=torch.float32, device="cpu")
        if start:
            x, where, record = gathered(drafts), _cache_rows(drafts), self._record(drafts)
            tokens, best = native.rows(x, where, start, stop, record=record, logits=logits)
            hand_out(drafts, [HeadOutput(*output) for output in zip(tokens, best)], logits)
            self._hand_out_states(drafts, start, stop)
        elif len(drafts) == 1:  # the hidden states go where they belong at once
            (draft,) = drafts
            sequence, first, end = draft.sequence, draft.first, draft.end
            draft.logits = logits
            draft.outputs = native.tokens(
                draft.rows[first:end],
                ((sequence.cache, end - first),),
                stop,
                sequence.hidden[first:end],
                head=head,
                detail=sequence.detail if head == "draft" else "token",
                record=None if draft.states is None else (draft.states.round, first),
                logits=logits,
            )
            if few:
                self._add_own_tokens(drafts, draft.outputs, sequence.hidden[first:end])
        else:
            x, where, record = self._together[:rows], _cache_rows(drafts), self._record(drafts)
            tokens = [token for draft in drafts for token in draft.rows[draft.first : draft.end]]
            detail = max_detail(drafts) if head == "draft" else "token"
            outputs = native.tokens(tokens, where, stop, x, head=head, detail=detail, record=record, logits=logits)
            _scatter(drafts, x)
            self._hand_out_states(drafts, 0, stop)
            if few:
                self._add_own_tokens(drafts, outputs, x)
            elif head is not None:
                hand_out(drafts, outputs, logits)

    def _takes_one_call(self, drafts: Sequence[Draft], stop: int) -> bool:
        """Return whether layers and draft head can be a single call: not with a bias for each text (a steered exit).

        With a draft vocabulary the call knows the head's rows for it. Adapted states are not at hand after the call.
        """
        if self.model.draft_vocabulary is None:
            return not self.model.is_steered(stop)
        return stop not in self.model.adapters and all(
            draft.vocabulary is not None and draft.sequence.greedy for draft in drafts
        )

    def _add_own_tokens(self, drafts: Sequence[Draft], outputs: Sequence[HeadOutput], hidden: Tensor) -> None:
        texts = [draft.vocabulary for draft in drafts if draft.vocabulary is not None]
        hand_out(drafts, with_own_tokens(self.model, outputs, hidden, texts, max_detail(drafts)))

    def _run_layers(self, drafts: Sequence[Draft], start: int, stop: int, head: Head | None) -> None:
        model = self.model
        if start:
            x = gathered(drafts)
        else:
            found = [token for draft in drafts for token in draft.rows[draft.first : draft.end]]
            x = model.embed(to_device(torch.tensor(found, dtype=torch.long, device="cpu"), model.device))
        if start < stop:
            x = model.run_layers(x, start, stop, _cache_rows(drafts), _observer(drafts, start, stop))
            if head != "full":
                _scatter(drafts, x)
        if head is not None:
            self._run_head(drafts, x, head)

    def _run_head(self, drafts: Sequence[Draft], x: Tensor, head: Head) -> None:
        """x: [rows, hidden] of all drafts."""
        model, drafting = self.model, head == "draft"
        parts = list(x.split([draft.end - draft.first for draft in drafts]))
        if drafting:
            parts = [model.at_exit(part, draft.exit_layer, draft.steering) for draft, part in zip(drafts, parts)]
        kinds = [(draft.sequence.greedy, drafting and draft.vocabulary is not None) for draft in drafts]
        for kind in sorted(set(kinds)):
            chosen = [index for index, own in enumerate(kinds) if own == kind]
            part_of = [drafts[index] for index in chosen]
            hidden = parts[chosen[0]] if len(chosen) == 1 else torch.cat([parts[index] for index in chosen])
            texts = [draft.vocabulary for draft in part_of if draft.vocabulary is not None]
            if drafting and kind[0]:
                hand_out(part_of, draft_outputs(model, hidden, texts, max_detail(part_of)))
            elif kind[0]:
                hand_out(part_of, model.choices(hidden).outputs())
            else:
                logits = draft_logits(model, hidden, texts) if drafting else model.logits(hidden)
                for draft, begin, end in _places(part_of):
                    draft.outputs, draft.logits = (), logits[begin:end]

    def _record(self, drafts: Sequence[Draft]) -> tuple[Tensor, int] | None:
        """Return where a native pass puts every layer's output, if somebody observes: at its place, or to be handed out."""
        if len(drafts) == 1:
            states = drafts[0].states
            return None if states is None else (states.round, drafts[0].first)
        if all(draft.states is None for draft in drafts):
            return None
        if not self._outputs.numel():
            shape = self.model.num_layers, STEP_ROWS, self.model.hidden_size
            self._outputs = torch.empty(shape, dtype=self.model.dtype, device=self.model.device)
        return self._outputs, 0

    def _hand_out_states(self, drafts: Sequence[Draft], start: int, stop: int) -> None:
        """Give each sequence that observes the outputs of its own rows."""
        for draft, begin, end in _places(drafts) if len(drafts) > 1 else ():
            if draft.states is not None:
                draft.states.take(draft.first, start, self._outputs[start:stop, begin:end])


def make_runner(model: LayerSkipModel, name: RunnerName) -> EagerRunner:
    """Make the runner of this name. That of graphs imports Triton, which only CUDA builds of PyTorch bring."""
    if name == "eager":
        return EagerRunner(model)
    from selfspec.engine.runners.graphs import GraphRunner

    return GraphRunner(model)


def _places(drafts: Sequence[Draft]) -> Iterator[tuple[Draft, int, int]]:
    """Return where each draft's rows begin and end in a pass."""
    begin = 0
    for draft in drafts:
        end = begin + draft.end - draft.first
        yield draft, begin, end
        begin = end


def _cache_rows(drafts: Sequence[Draft]) -> CacheRows:
    return [(draft.sequence.cache, draft.end - draft.first) for draft in drafts]


def gathered(drafts: Sequence[Draft]) -> Tensor:
    """Gather the hidden states of all rows, [rows, hidden]."""
    parts = [draft.sequence.hidden[draft.first : draft.end] for draft in drafts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _scatter(drafts: Sequence[Draft], x: Tensor) -> None:
    for draft, begin, end in _places(drafts):
        draft.sequence.hidden[draft.first : draft.end] = x[begin:end]


def hand_out(drafts: Sequence[Draft], outputs: Sequence[HeadOutput], logits: Tensor | None = None) -> None:
    """Give each sequence what the head said of its rows, and their logits if it asks for them."""
    for draft, begin, end in _places(drafts):
        draft.outputs = outputs[begin:end]
        if logits is not None and not draft.sequence.greedy:
            draft.logits = logits[begin:end]


def max_detail(drafts: Sequence[Draft]) -> Detail:
    """Find the detail that is enough for all of these."""
    if len(drafts) == 1:
        return drafts[0].sequence.detail
    return max((draft.sequence.detail for draft in drafts), key=_DETAILS.index)


def _observer(drafts: Sequence[Draft], start: int, stop: int) -> Callable[[int, Tensor], None] | None:
    """Show the output of each layer to every sequence that observes any of these layers: its own rows."""
    observing = [
        (draft.states, draft.first, begin, end)
        for draft, begin, end in _places(drafts)
        if draft.states is not None and draft.states.watches(start, stop)
    ]
    if not observing:
        return None

    def observe(layers_done: int, hidden: Tensor) -> None:
        for states, first, begin, end in observing:
            states.capture(first, layers_done, hidden[begin:end])

    return observe
