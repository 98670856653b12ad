"""A round's state on the device, and the pieces of work over it that can be captured.

All that changes from row to row and from round to round is in tensors that stay where they are; the pieces take only what
selects one of them (layers, row counts, the span of attention). The next token, its position and its row are set by the
pieces themselves, so that the host can launch one after the other without knowing what came out.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.kv_cache import KVCache
from selfspec.engine.accept import accept_greedy_on_device
from selfspec.engine.hidden_states import HiddenStates
from selfspec.engine.runners.cuda_graph.capture import Body, Captures
from selfspec.engine.runners.cuda_graph.forward import StaticForward
from selfspec.engine.runners.cuda_graph.streams import Streams
from selfspec.engine.sampling import confidences, entropies

CONFIDENCE, ENTROPY, TOKEN, TOTAL = range(4)
"""Columns of `StaticRound.looks`, which the host reads as `DraftRead`s."""


@dataclass(frozen=True, slots=True)
class DraftRead:
    """What was seen of one drafted row. total: sum of the weights that the token was drawn from; 0 when greedy."""

    confidence: float
    entropy: float
    token: int
    total: float

    @classmethod
    def decode(cls, numbers: Sequence[float]) -> list[DraftRead]:
        """From the rows of `StaticRound.looks`, one behind the other."""
        rows = (numbers[at : at + 4] for at in range(0, len(numbers), 4))
        return [cls(confidence, entropy, int(token), total) for confidence, entropy, token, total in rows]


@dataclass(frozen=True, slots=True)
class GreedyOutcome:
    """What verification chose. num_accepted: as the device counted; targets, logits: of every verified row, its argmax and
    that token's logit."""

    num_accepted: int
    targets: list[int]
    logits: list[float]

    @classmethod
    def decode(cls, numbers: Sequence[float], num_rows: int) -> GreedyOutcome:
        """From the first `num_rows` rows of a verdict, which may hold more: (num_accepted, targets, logits)."""
        size = (len(numbers) - 1) // 2
        targets, logits = numbers[1 : 1 + size], numbers[1 + size :]
        return cls(int(numbers[0]), list(map(int, targets[:num_rows])), list(logits[:num_rows]))


@dataclass(frozen=True, slots=True)
class SampledOutcome:
    """What verification drew. total: sum of the weights that the token was drawn from; rates: each draft's chance of
    acceptance."""

    num_accepted: int
    token: int
    total: float
    rates: list[float]

    @classmethod
    def decode(cls, numbers: Sequence[float]) -> SampledOutcome:
        """From (num_accepted, token, total, *rates)."""
        num_accepted, token, total, *rates = numbers
        return cls(int(num_accepted), int(token), total, rates)


class StaticRound:
    """Buffers of one round of up to `max_rows` rows on one KV cache, and the captured work on them.

    token, position, row: int64 [1] each, of the next row to run; base: position of row 0; last: the last row to verify.
    hidden: [max_rows, hidden], each row's state after the layers that it went through.
    drafts: int64 [max_rows], the token drafted from each row. looks: float64 [max_rows, 4], what was seen of each row:
        confidence, entropy, token, sum of the weights it was drawn from (0 where not asked for).
    row_logits: float32 [1, vocab] of the row looked at; logits: float32 [max_rows, vocab] of the verified rows.
    targets: int64 [max_rows], the verified rows' argmax. verdict: float64 [1 + 2 * max_rows], see `GreedyOutcome`.
    """

    def __init__(self, model: LayerSkipModel, cache: KVCache, max_rows: int, block: int, streams: Streams) -> None:
        device = model.device
        self.max_rows = max_rows
        self._model = model
        self._block = block  # layers are captured in blocks of so many, which all exit layers share
        self._forward = StaticForward(model, cache)
        self._state = torch.zeros(5, dtype=torch.long, device=device)
        self.token, self.position, self.row, self.base, self.last = self._state.split(1)
        self.hidden = torch.zeros(max_rows, model.hidden_size, dtype=model.dtype, device=device)
        self.drafts = torch.zeros(max_rows, dtype=torch.long, device=device)
        self.looks = torch.zeros(max_rows, 4, dtype=torch.float64, device=device)
        self.row_logits = torch.zeros(1, model.vocab_size, dtype=torch.float32, device=device)
        self.logits = torch.zeros(max_rows, model.vocab_size, dtype=torch.float32, device=device)
        self.targets = torch.zeros(max_rows, dtype=torch.long, device=device)
        self.verdict = torch.zeros(1 + 2 * max_rows, dtype=torch.float64, device=device)
        self._index = torch.arange(max_rows, dtype=torch.long, device=device)
        self._nothing = torch.zeros(1, 1, dtype=torch.float64, device=device)
        self.captures = Captures(
            device, (self._state, self.hidden), streams, num_ranks=model.num_ranks, all_agree=model.all_agree
        )

    @property
    def paged(self) -> bool:
        """Whether attention takes the length from the device: every span is None then, and rows beyond the last have
        positions of their own, behind it, for which the cache must have room."""
        return self._forward.paged

    def start(self, token: int, position: int) -> None:
        """Begin a round with its pending token."""
        self.token.fill_(token)
        self.position.fill_(position)
        self.base.fill_(position)
        self.row.zero_()

    def one_row(
        self, start: int, stop: int, span: int | None, states: HiddenStates | None, ahead: bool = False
    ) -> None:
        """Run layers [start, stop) for the next row; from layer 0 on its token is embedded. ahead: capture only."""
        self._layers(start, stop, None, span, states, ahead)

    def all_rows(
        self, start: int, stop: int, rows: int, span: int | None, states: HiddenStates | None, ahead: bool = False
    ) -> None:
        """Run layers [start, stop) for rows 0 .. last, of which there are at most `rows`; start is at least 1."""
        self._layers(start, stop, rows, span, states, ahead)

    def look(self, exit_layer: int, *, confidence: bool, entropy: bool, choose: bool, ahead: bool = False) -> None:
        """The exit's adapter, norm and head on the next row: `row_logits` and `looks`; then the row after it is the next.

        choose: its argmax is the draft and the next row's token; else the caller sees to that.
        """
        adapted = exit_layer if exit_layer in self._model.adapters else None  # exits without one share a capture
        self._run(
            ("look", adapted, confidence, entropy, choose),
            lambda: self._look(exit_layer, confidence, entropy, choose),
            ahead,
        )

    def judge(self, rows: int, *, choose: bool, ahead: bool = False) -> None:
        """Norm and head on rows 0 .. last, of which there are at most `rows`: `logits`.

        choose: also `targets` and `verdict` of a greedy round, and the next round's start.
        """
        self._run(("judge", rows, choose), lambda: self._judge(rows, choose), ahead)

    def settle(self, num_accepted: Tensor, token: Tensor) -> None:
        """Begin the next round behind so many accepted drafts, with the token that follows; int64 [1] each."""
        self.token.copy_(token)
        self.base.add_(num_accepted + 1)
        self.position.copy_(self.base)
        self.row.zero_()

    def _run(self, key: Hashable, body: Body, ahead: bool) -> None:
        (self.captures.ensure if ahead else self.captures.run)(key, body)

    def _layers(
        self, start: int, stop: int, rows: int | None, span: int | None, states: HiddenStates | None, ahead: bool
    ) -> None:
        assert rows is None or rows <= self.max_rows
        while start < stop:
            end = min(stop, (start // self._block + 1) * self._block)
            watching = states if states is not None and states.watches(start, end) else None
            key = ("layers", start, end, rows, span, None if watching is None else watching.layers)
            self._run(key, self._layers_body(start, end, rows, span, watching), ahead)
            start = end

    def _layers_body(
        self, start: int, stop: int, rows: int | None, span: int | None, states: HiddenStates | None
    ) -> Body:
        def body() -> None:
            if rows is None:
                sources = places = self.row
                positions = self.position
            else:
                sources = places = torch.minimum(self._index[:rows], self.last)
                if span is None:
                    # Rows beyond the last begin as it did and go on at positions of their own, which the next rows overwrite
                    # before anybody attends to them. What an earlier round left in their places might grow round by round.
                    places = self._index[:rows]
                # Else rows beyond the last repeat it: they compute and write the same once more, and nothing of their own.
                positions = self.base + places
            hidden = self._model.embed(self.token) if start == 0 else self.hidden.index_select(0, sources)
            capture = None if states is None else (lambda layer, state: states.capture_at(places, layer, state))
            self.hidden.index_copy_(0, places, self._forward.run(hidden, start, stop, positions, span, capture))

        return body

    def _look(self, exit_layer: int, confidence: bool, entropy: bool, choose: bool) -> None:
        seen = self._model.at_exit(self.hidden.index_select(0, self.row), exit_layer)
        self.row_logits.copy_(self._model.logits(seen))
        logits = self.row_logits
        columns = [
            confidences(logits).double().view(1, 1) if confidence else self._nothing,
            entropies(logits).double().view(1, 1) if entropy else self._nothing,
            self._nothing,
            self._nothing,
        ]
        if choose:
            token = logits.argmax(dim=-1)
            self.token.copy_(token)
            self.drafts.index_copy_(0, self.row, token)
            columns[TOKEN] = token.double().view(1, 1)
        self.looks.index_copy_(0, self.row, torch.cat(columns, dim=1))
        self.position.add_(1)
        self.row.add_(1)

    def _judge(self, rows: int, choose: bool) -> None:
        assert rows <= self.max_rows
        places = torch.minimum(self._index[:rows], self.last)
        logits = self.logits[:rows]
        logits.copy_(self._model.logits(self.hidden.index_select(0, places)))
        if not choose:
            return
        best = logits.max(dim=-1)
        self.targets[:rows].copy_(best.indices)
        # A row beyond the last has no draft: -1 is nobody's choice.
        drafts = self.drafts[: rows - 1].masked_fill(self._index[: rows - 1] >= self.last, -1)
        num_accepted = accept_greedy_on_device(drafts, best.indices)
        self.verdict[:1].copy_(num_accepted)
        chosen, values = self.verdict[1:].view(2, self.max_rows)
        chosen[:rows].copy_(best.indices)
        values[:rows].copy_(best.values)
        self.settle(num_accepted, best.indices.index_select(0, num_accepted))
