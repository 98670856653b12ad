"""Eager passes: every operation is called from Python when its turn comes, over the rows of all texts at hand.

A pass takes rows of several texts, each at its own place in a cache of its own, so nothing is padded and nothing is copied
when texts differ in what they accept. Matrices see all rows at once and their weights are read once. Where texts exit at
different layers, a row runs as far as its own text wants: it leaves a draft's pass at its exit layer, and joins the
verification there.

On our own kernels a row's numbers do not depend on the other rows of a pass, so a text in a batch is the text alone, bit for
bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import get_args

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.choices import Choices, Detail, HeadOutput, choices_of
from layerskip_models.kernels.native_forward import STEP_ROWS, NativeForward
from layerskip_models.kernels.native_linear import only_operators
from layerskip_models.kv_cache import CacheRows
from layerskip_models.transfer import sent
from selfspec.engine.draft import NOTHING, Draft
from selfspec.engine.hidden_states import HiddenStates
from selfspec.engine.results import RoundResult
from selfspec.engine.runners.runner import SequenceRound
from selfspec.engine.verification import Verification, judge_choices, judge_greedy, judge_sampled

_AS_IT_IS = nullcontext()
_DETAILS = get_args(Detail)


@dataclass(slots=True, eq=False)
class _Room:
    """Buffers of one turn, which later rounds use again, so that the loop allocates no large tensor."""

    hidden: Tensor  # [rows, hidden]
    q: Tensor  # float32 [rows, vocab]


@dataclass(slots=True, eq=False)  # not frozen: that makes them cost four times as much to make
class _RowGroup:
    """Rows of one text on their way through the layers.

    first_row: the first one's number in the round. hidden: [rows, hidden]; None before layer 0, where the rows are those of
    the draft's next tokens.
    """

    draft: Draft
    first_row: int
    hidden: Tensor | None = None

    @property
    def rows(self) -> int:
        """How many."""
        return self.draft.num_next if self.hidden is None else self.hidden.shape[0]

    @property
    def states(self) -> HiddenStates | None:
        """What wants to see these rows."""
        return self.draft.seq_round.states


@dataclass(slots=True, eq=False)
class _Scores:
    """What verification gives a turn: logits [k+1, vocab], or each row's argmax and its logit where that is enough."""

    tokens: list[int]
    values: list[float]
    logits: Tensor | None = None


class EagerRunner:
    """See `selfspec.engine.runners.runner.Runner`. For one caller at a time."""

    copies = True

    def __init__(self, model: LayerSkipModel) -> None:
        self._model = model
        self._steps = model.steps()  # None where our kernels don't run all of the model
        self._rooms: list[_Room] = []
        self._drafts: list[Draft] = []  # one for each turn
        self._sound: list[Draft] = []  # those of them whose policy raised nothing: the others are not verified
        self._fast: NativeForward | None = None  # the steps, if this round can be run with them
        self._scores: list[_Scores] = []
        self._last = torch.empty(STEP_ROWS, model.hidden_size, dtype=model.dtype, device=model.device)
        self._outputs = torch.empty(0)  # [layers, STEP_ROWS, hidden], of a step whose rows several texts watch

    def draft(self, seq_rounds: Sequence[SequenceRound]) -> None:
        """Step j runs one row of every text that still drafts; the first one also the rows of what was copied."""
        self._drafts = [self._draft_of(seq_round, index) for index, seq_round in enumerate(seq_rounds)]
        # Whole passes in single calls, if nobody needs logits.
        fast = self._steps is not None and all(seq_round.greedy for seq_round in seq_rounds) and not only_operators()
        self._fast = self._steps if fast else None
        going = [draft for draft in self._drafts if draft.seq_round.exit_layer is not None and draft.error is None]
        while going:
            found = self._look(going)
            going = [draft for draft, (looks, logits) in zip(going, found) if self._grow(draft, looks, logits)]
        self._sound = [draft for draft in self._drafts if draft.error is None]

    @property
    def drafts(self) -> Sequence[Draft]:
        """One for each turn of the last `draft`."""
        return self._drafts

    def _grow(self, draft: Draft, looks: Sequence[HeadOutput], logits: Tensor | None) -> bool:
        """Whether the draft goes on. An error of its policy ends its text, and is no other text's business."""
        try:
            return draft.grow(looks, logits)
        except Exception as error:
            draft.error = error
            return False

    def verify(self, seq_rounds: Sequence[SequenceRound]) -> None:
        """All rows of all texts through the layers they lack, and the full head.

        A last token that no draft step ran goes through its text's exit layer first; from there all rows of the text go on.
        What was copied without an exit layer starts here.
        """
        if not self._sound:
            return
        last = self._model.num_layers
        steps = self._steps_for(sum(len(draft.tokens) + 1 for draft in self._sound))
        if steps is not None and all(draft.seq_round.exit_layer is None for draft in self._sound):
            looks = self._token_step(self._sound, last, "full", steps)
            tokens, values = [look.token for look in looks], [look.logit for look in looks]
            self._scores = _cut(tokens, values, [draft.num_next for draft in self._sound])
            return
        common = _common_exit(self._sound)
        if steps is not None and common:
            lacking = [draft for draft in self._sound if draft.num_next]
            if lacking:
                self._token_step(lacking, common, None, steps, keep=True)
            groups = [_RowGroup(draft, 0, draft.exit_hidden[: len(draft.tokens) + 1]) for draft in self._sound]
            self._scores = self._final_step(groups, common, steps)
            return
        groups = [_RowGroup(draft, draft.num_rows) for draft in self._sound if draft.num_next]
        joins = sorted({draft.seq_round.exit_layer or 0 for draft in self._sound})
        layer = 0 if groups else joins[0]
        for upto in [*(join for join in joins if join > layer), last]:
            if groups:
                groups = self._leave(groups, layer)
            groups += [
                _RowGroup(draft, 0, draft.exit_hidden[: len(draft.tokens) + 1])
                for draft in self._sound
                if draft.seq_round.exit_layer == layer
            ]
            if upto == last and layer and steps is not None:
                self._scores = self._final_step(groups, layer, steps)
                return
            groups, layer = self._run(groups, layer, upto, steps), upto
        self._scores = self._judgeable(groups)

    def accept(self, seq_rounds: Sequence[SequenceRound]) -> list[RoundResult]:
        """Judge each text's rows on the host."""
        scores = dict(zip(self._sound, self._scores))
        outcomes = [self._judged(draft, scores.get(draft)) for draft in self._drafts]
        self.forget()
        return outcomes

    def _judged(self, draft: Draft, scores: _Scores | None) -> RoundResult:
        """What holds of a draft. An error of its policy, or of a processor in judging it, is its text's alone."""
        if draft.error is None and scores is not None:
            try:
                return self._outcome(draft, scores)
            except Exception as error:
                draft.error = error
        return RoundResult.broken(draft.error)

    def forget(self) -> None:
        """Let go of the texts of the last round, whose caches may be large."""
        self._drafts, self._sound, self._scores = [], [], []

    def learning(self) -> AbstractContextManager[None]:
        return _AS_IT_IS

    def states(self, states: HiddenStates, rows: int) -> HiddenStates:
        states.reserve(rows)
        return states

    def clear(self) -> None:
        pass  # nothing is read before it is written

    def _draft_of(self, seq_round: SequenceRound, index: int) -> Draft:
        """An empty draft in the turn's own buffers."""
        model, rows = self._model, seq_round.most_rows
        while len(self._rooms) <= index:
            empty = torch.empty(0, dtype=model.dtype, device=model.device)
            self._rooms.append(_Room(empty, empty.float()))
        room = self._rooms[index]
        if seq_round.exit_layer is not None and room.hidden.shape[0] < rows:
            room.hidden = torch.empty(rows, model.hidden_size, dtype=model.dtype, device=model.device)
        failed: Exception | None = None
        if rows > 1 and seq_round.sampler.do_sample and room.q.shape[0] < rows:
            try:
                room.q = torch.empty(rows, model.vocab_size, dtype=torch.float32, device=model.device)
            except (RuntimeError, MemoryError) as error:  # a large vocabulary; the other texts go on
                failed = error
        draft = Draft(seq_round, room.hidden, room.q)
        draft.error = failed
        return draft

    def _steps_for(self, rows: int) -> NativeForward | None:
        """The kernels that run a pass over this many rows in a single call, or None."""
        return self._fast if rows <= STEP_ROWS else None

    def _look(self, drafts: Sequence[Draft]) -> list[tuple[Sequence[HeadOutput], Tensor | None]]:
        """Run each draft's next rows through its exit layer, and look at them with the draft head."""
        sizes = [draft.num_next for draft in drafts]
        steps, common = self._steps_for(sum(sizes)), _common_exit(drafts)
        if steps is not None and common:
            looks = self._token_step(drafts, common, "draft", steps, keep=True)
            return [(part, None) for part in ([looks] if len(drafts) == 1 else _parts(looks, sizes))]
        groups, start = [_RowGroup(draft, draft.num_rows) for draft in drafts], 0
        for stop in sorted({draft.exit_layer for draft in drafts}):
            groups, start = self._leave(self._run(groups, start, stop, steps), stop), stop
        found: dict[Draft, tuple[Sequence[HeadOutput], Tensor | None]] = {}
        choosing = [draft for draft in drafts if draft.seq_round.greedy]
        if choosing:
            looks = _looks_of(self._model.draft_choices(self._at_exit(choosing), _most_detail(drafts)))
            found |= zip(choosing, ((part, None) for part in _parts(looks, [draft.num_next for draft in choosing])))
        processed = [draft for draft in drafts if not draft.seq_round.greedy]
        if processed:
            logits = self._model.draft_logits(self._at_exit(processed))
            for draft, rows in zip(processed, logits.split([draft.num_next for draft in processed])):
                nothing = draft.detail == "token" and draft.num_next == 1
                found[draft] = (NOTHING,) if nothing else _looks_of(choices_of(rows, draft.detail)), rows
        return [found[draft] for draft in drafts]

    def _at_exit(self, drafts: Sequence[Draft]) -> Tensor:
        """What the head sees of the rows that were run last, [rows, hidden]."""
        found = [
            self._model.at_exit(draft.exit_hidden[draft.num_rows : draft.num_rows + draft.num_next], draft.exit_layer)
            for draft in drafts
        ]
        return torch.cat(found)

    def _leave(self, groups: Sequence[_RowGroup], layer: int) -> list[_RowGroup]:
        """Rows whose text exits here stay with its draft. The strands that go on."""
        for group in groups:
            if group.draft.seq_round.exit_layer == layer:
                assert group.hidden is not None
                group.draft.exit_hidden[group.first_row : group.first_row + group.rows] = group.hidden
        return [group for group in groups if group.draft.seq_round.exit_layer != layer]

    def _judgeable(self, groups: Sequence[_RowGroup]) -> list[_Scores]:
        """What the full head says of all rows: choices where they are enough, else logits."""
        found: list[tuple[_RowGroup, _Scores]] = []
        for greedy in (True, False):
            group = [group for group in groups if group.draft.seq_round.greedy == greedy]
            if not group:
                continue
            hidden, sizes = _together(group), [group.rows for group in group]
            if greedy:
                choices = self._model.choices(hidden)
                chosen, (values, *_) = choices.read()
                scores = _cut(chosen, values, sizes)
            else:
                scores = [_Scores([], [], logits) for logits in self._model.logits(hidden).split(sizes)]
            found += zip(group, scores)
        return self._in_order(found)

    def _outcome(self, draft: Draft, scores: _Scores) -> RoundResult:
        seq_round, sampler = draft.seq_round, draft.seq_round.sampler
        drafts = draft.tokens
        if scores.logits is None:
            verdict = judge_choices(scores.tokens, scores.values, seq_round.length, drafts)
        elif sampler.do_sample:
            q = draft.q[: len(drafts)] if drafts else scores.logits[:0]
            for row, token in enumerate(drafts[: draft.num_copied]):  # a copied token was the only one possible
                q[row].zero_()
                q[row, token] = 1.0
            verdict = judge_sampled(sampler, scores.logits, seq_round.tokens, seq_round.length, drafts, q)
        else:
            verdict = judge_greedy(sampler, scores.logits, seq_round.tokens, seq_round.length, drafts)
        if drafts and not sampler.do_sample and _spoilt(verdict, scores):
            # A row that overflows may spoil earlier rows, which mask it: 0 times NaN is NaN. Only the draft needs it.
            return self._plainly(seq_round)
        return RoundResult(
            draft_tokens=tuple(drafts),
            num_accepted=verdict.num_accepted,
            block=verdict.block,
            target_tokens=_targets(seq_round, verdict),
            p=verdict.p,
            stop_cause=draft.stop_cause,
            confidences=draft.confidences,
            acceptance_probabilities=None if seq_round.most_rows == 1 else verdict.acceptance,
            failure=verdict.failure,
            dropped_token=draft.dropped_token,
            num_copied=draft.num_copied,
            num_discarded=len(seq_round.copied) - draft.num_copied,
        )

    def _plainly(self, seq_round: SequenceRound) -> RoundResult:
        """The round once more, without drafts."""
        seq_round.cache.roll_back(seq_round.length - 1)
        alone = EagerRunner(self._model)
        plain = [replace(seq_round, exit_layer=None, max_speculations=0, copied=())]
        alone.draft(plain)
        alone.verify(plain)
        return alone.accept(plain)[0]

    # Rows through layers

    def _run(self, groups: Sequence[_RowGroup], start: int, stop: int, steps: NativeForward | None) -> list[_RowGroup]:
        """Layers [start, stop) over the rows of all strands."""
        if start == 0 and steps is not None:
            sizes = [group.rows for group in groups]
            self._token_step([group.draft for group in groups], stop, None, steps)
            parts = self._last[: sum(sizes)].split(sizes)
            return [_RowGroup(group.draft, group.first_row, part) for group, part in zip(groups, parts)]
        if start == 0:
            found = [token for group in groups for token in group.draft.next_tokens]
            tokens = torch.tensor(found, dtype=torch.long, device="cpu")
            x = self._model.embed(sent(tokens, self._model.device))
        else:
            x = _together(groups)
        x = self._model.run_layers(x, start, stop, _cache_rows(groups), _watch(groups, start, stop))
        parts = x.split([group.rows for group in groups])
        return [_RowGroup(group.draft, group.first_row, part) for group, part in zip(groups, parts)]

    def _token_step(
        self, drafts: Sequence[Draft], stop: int, head: str | None, steps: NativeForward, *, keep: bool = False
    ) -> list[HeadOutput]:
        """Each draft's next tokens through layers [0, stop), and the head, in a single call.

        keep: these are the exit layers, so drafts keep the rows; else they are in `_last`.
        """
        detail = _most_detail(drafts) if head == "draft" else "token"
        if len(drafts) == 1:  # the state goes where it belongs at once
            (draft,) = drafts
            states, row, tokens = draft.seq_round.states, draft.num_rows, draft.next_tokens
            place = draft.exit_hidden[row : row + len(tokens)] if keep else self._last[: len(tokens)]
            record = None if states is None else (states.round, row)
            rows = ((draft.seq_round.cache, len(tokens)),)
            return steps.tokens(tokens, rows, stop, place, head=head, detail=detail, record=record)
        groups = [_RowGroup(draft, draft.num_rows) for draft in drafts]
        tokens = [token for draft in drafts for token in draft.next_tokens]
        last, record = self._last[: len(tokens)], self._record(groups)
        looks = steps.tokens(tokens, _cache_rows(groups), stop, last, head=head, detail=detail, record=record)
        self._hand_out(groups, 0, stop)
        if keep:
            for draft, rows in zip(drafts, last.split([draft.num_next for draft in drafts])):
                draft.exit_hidden[draft.num_rows : draft.num_rows + len(rows)] = rows
        return looks

    def _final_step(self, groups: Sequence[_RowGroup], layer: int, steps: NativeForward) -> list[_Scores]:
        """The last layers and the full head over all rows, in a single call."""
        rows, record = _cache_rows(groups), self._record(groups)
        tokens, values = steps.rows(_together(groups), rows, layer, self._model.num_layers, record=record)
        self._hand_out(groups, layer, self._model.num_layers)
        scores = _cut(tokens, values, [group.rows for group in groups])
        return self._in_order(zip(groups, scores))

    def _in_order(self, found: Iterable[tuple[_RowGroup, _Scores]]) -> list[_Scores]:
        """The scores of each draft, in the order of the turns."""
        scores = {group.draft: score for group, score in found}
        return [scores[draft] for draft in self._sound]

    def _record(self, groups: Sequence[_RowGroup]) -> tuple[Tensor, int] | None:
        """Where a step puts every layer's output, if a text watches: at its place, or to be handed out."""
        if len(groups) == 1:
            states = groups[0].states
            return None if states is None else (states.round, groups[0].first_row)
        if all(group.states is None for group in groups):
            return None
        if not self._outputs.numel():
            shape = self._model.num_layers, STEP_ROWS, self._model.hidden_size
            self._outputs = torch.empty(shape, dtype=self._model.dtype, device=self._model.device)
        return self._outputs, 0

    def _hand_out(self, groups: Sequence[_RowGroup], start: int, stop: int) -> None:
        """Give each text that watches the outputs of its own rows."""
        first = 0
        for group in groups if len(groups) > 1 else ():
            if group.states is not None:
                group.states.take(group.first_row, start, self._outputs[start:stop, first : first + group.rows])
            first += group.rows


def _cache_rows(groups: Sequence[_RowGroup]) -> CacheRows:
    return [(group.draft.seq_round.cache, group.rows) for group in groups]


def _together(groups: Sequence[_RowGroup]) -> Tensor:
    """All rows, [rows, hidden]."""
    parts = [group.hidden for group in groups if group.hidden is not None]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _watch(groups: Sequence[_RowGroup], start: int, stop: int) -> Callable[[int, Tensor], None] | None:
    """What sees the outputs of a pass: every text that wants to see any of these layers, its own rows."""
    watching, first = [], 0
    for group in groups:
        if group.states is not None and group.states.watches(start, stop):
            watching.append((group.states, group.first_row, first, first + group.rows))
        first += group.rows
    if not watching:
        return None

    def watch(layers_done: int, hidden: Tensor) -> None:
        for states, row, begin, end in watching:
            states.capture(row, layers_done, hidden[begin:end])

    return watch


def _parts(looks: Sequence[HeadOutput], sizes: Sequence[int]) -> list[Sequence[HeadOutput]]:
    """Each draft's looks."""
    ends = list(accumulate(sizes))
    return [looks[end - size : end] for end, size in zip(ends, sizes)]


def _cut(tokens: list[int], values: list[float], sizes: Sequence[int]) -> list[_Scores]:
    """Each text's part of what the head says of all rows."""
    ends = list(accumulate(sizes))
    return [_Scores(tokens[end - size : end], values[end - size : end]) for end, size in zip(ends, sizes)]


def _most_detail(drafts: Sequence[Draft]) -> Detail:
    """The detail that is enough for all of these drafts."""
    return drafts[0].detail if len(drafts) == 1 else max((draft.detail for draft in drafts), key=_DETAILS.index)


def _looks_of(choices: Choices) -> list[HeadOutput]:
    """Row by row."""
    tokens, numbers = choices.read()
    return [HeadOutput(*row) for row in zip(tokens, *numbers)]


def _targets(seq_round: SequenceRound, verdict: Verification) -> Tensor | None:
    """The full model's choices for the rows 0..m, if somebody learns from them."""
    if not seq_round.learns:
        return None
    if verdict.p is not None:
        return verdict.p.argmax(dim=-1)
    return sent(torch.tensor(verdict.target_tokens, dtype=torch.long, device="cpu"), seq_round.tokens.device)


def _spoilt(verdict: Verification, scores: _Scores) -> bool:
    """Whether the round failed, and the model's own numbers are why."""
    if verdict.failure is None:
        return False
    return scores.logits is None or bool(scores.logits[verdict.num_accepted].isnan().any())


def _common_exit(drafts: Sequence[Draft]) -> int:
    """The exit layer that all of these drafts share; 0 if they differ."""
    exit_layer = drafts[0].exit_layer
    return exit_layer if all(draft.exit_layer == exit_layer for draft in drafts) else 0
