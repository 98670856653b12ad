"""The runner of captured passes: layers and heads are replayed as CUDA graphs, for one sequence on its own KV cache.

The host reads one small tensor for each drafted row. While it reads a greedy draft's row, the device already runs the next
row through the first layers, on the token that it has chosen itself. The engine asks for that very row if drafting goes on,
and also if it ends with the token kept, because verification needs the row. Only if the token is dropped has the row been run
for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch

from layerskip_models import LayerSkipModel
from layerskip_models.choices import Detail
from layerskip_models.kv_cache import KVCache
from selfspec.engine.hidden_states import HiddenStates
from selfspec.engine.runners.cuda_graph import first_rounds
from selfspec.engine.runners.cuda_graph.buffers import NUMBERS, StaticPass, head_outputs
from selfspec.engine.runners.cuda_graph.paged_attention import whole_pages
from selfspec.engine.runners.cuda_graph.streams import HostRead, streams_for
from selfspec.engine.runners.runner import Head, RowBuffers, Runner, SequenceRows

SMALLEST_SPAN = 256
"""Attention with masks looks at this many positions, or a power of two times as many, or the whole cache: these sizes are
captured. Where attention takes the length from the device there are no such sizes."""
SMALLEST_CACHE = 4096
"""Positions of the smallest KV cache, unless the model has fewer: a longer one makes all captures anew."""
_FEW_ROWS = 16


def captured_length(needed: int, max_positions: int, paged: bool = False) -> int:
    """Positions of the cache for a text of `needed`: a power of two, so that growing texts seldom outgrow it, or all that the
    model has. paged: rounded up to whole pages."""
    length = min(max(_power_of_two(needed), SMALLEST_CACHE), max(max_positions, needed))
    return whole_pages(length) if paged else length


def _power_of_two(least: int) -> int:
    return 1 << max(least - 1, 0).bit_length()


@dataclass(slots=True, eq=False)
class _Ahead:
    """A draft's row that was run through [0, stop) before it was asked for. token: chosen by the device; read later."""

    stop: int
    row: int
    length: int
    states: HiddenStates | None
    token: int = -1


class CudaGraphRunner:
    """Runs one sequence's rows from captures on its KV cache; see `Runner`. It lasts as long as its cache.

    cache: must hold finite numbers everywhere, so it is cleared, unless `cleared` says that it does.
    """

    copies = False

    def __init__(self, model: LayerSkipModel, cache: KVCache, *, cleared: bool = False) -> None:
        self.model, self.cache = model, cache
        self._states: dict[tuple[int, ...], HiddenStates] = {}
        self._earlier = (0, 0.0)  # captures and their seconds of buffers that were outgrown
        self._streams = streams_for(model.device)
        self._ahead: _Ahead | None = None
        self._make_buffers(_FEW_ROWS)
        if not cleared:
            self.clear(0)

    def _make_buffers(self, rows: int) -> None:
        self._pass = StaticPass(self.model, self.cache, rows, self._streams)
        self._buffers = RowBuffers(self.model, self._pass.hidden)
        self._read = HostRead(NUMBERS["all"] * rows, self._streams)
        self._states.clear()
        self._ahead = None

    @property
    def num_captures(self) -> int:
        return self._earlier[0] + self._pass.captures.num_captures

    @property
    def capture_seconds(self) -> float:
        return self._earlier[1] + self._pass.captures.seconds

    def begin(self) -> None:
        """Rely on nothing that was launched ahead: a sequence begins, leaves for the eager runner or comes back."""
        self._ahead = None
        self._streams.resume()

    def clear(self, start: int) -> None:
        """Zero what is masked: it is still multiplied by 0, which gives 0 only for numbers."""
        self.begin()
        with torch.inference_mode():
            self.cache.keys[..., start:].zero_()
            self.cache.values[:, :, start:].zero_()
            self._pass.hidden.zero_()

    def rounded(self, bits: int) -> Runner:
        raise ValueError('captured rounds do not draft in fewer bits: take runner="eager"')

    def buffers(self, index: int, rows: int) -> RowBuffers:
        assert index == 0
        self.reserve(rows)
        return self._buffers

    def states(self, states: HiddenStates, rows: int) -> HiddenStates:
        """Buffers whose place captures know."""
        self.reserve(rows)
        return self._states_of(states.layers)

    def _states_of(self, layers: tuple[int, ...]) -> HiddenStates:
        if layers not in self._states:
            self._states[layers] = HiddenStates(self.model, layers, max_rows=self._pass.max_rows)
        return self._states[layers]

    def reserve(self, rows: int) -> None:
        """Make buffers for this many rows; new ones mean new captures."""
        if rows <= self._pass.max_rows:
            return
        self._earlier = (self.num_captures, self.capture_seconds)
        over = self._streams.event()
        over.record()
        over.synchronize()  # a graph that is given up must not be running
        self._make_buffers(_power_of_two(rows))

    def run(self, groups: Sequence[SequenceRows], start: int, stop: int, head: Head | None) -> None:
        """See `Runner.run`. Raises CaptureError if graphs fail, or give other numbers than the eager passes."""
        (rows,) = groups
        captured, seq_round, base = self._pass, rows.seq_round, rows.seq_round.length - 1
        self._streams.resume()
        if not self._was_ahead(rows, start, stop):
            captured.place(rows.first, rows.end, base)
            if start == 0:
                for row in range(rows.first, rows.end):
                    captured.tokens[row].fill_(rows.tokens[row])
            self._layers(rows, start, stop)
        if head is None:
            return
        count = rows.end - rows.first
        rows.logits, rows.outputs = None, ()
        detail = rows.detail if head == "draft" and rows.greedy else "token"
        captured.head(head, _power_of_two(count), rows.exit_layer, detail)
        if rows.greedy:
            self._read.start(captured.outputs[: NUMBERS[detail], :count].flatten())
            if head == "draft" and rows.end < seq_round.max_rows:
                self._run_ahead(rows, stop)
            rows.outputs = head_outputs(self._read.wait(), count)
            if self._ahead is not None:
                self._ahead.token = rows.outputs[-1].token
        else:
            rows.logits = captured.logits[:count]
        if head == "full" and start < stop:
            self._compare(rows, "plain step" if start == 0 else "speculative round")
            self.cache.declare(base + rows.end)

    def _layers(self, rows: SequenceRows, start: int, stop: int) -> None:
        base, count = rows.seq_round.length - 1, rows.end - rows.first
        span = self._span(base + rows.end)
        self._pass.layers(start, stop, self._rows_run(count, base + rows.first), span, rows.seq_round.states)

    def _run_ahead(self, rows: SequenceRows, stop: int) -> None:
        """Run the row after this one, whose token is on the device."""
        seq_round, row = rows.seq_round, rows.end
        self._pass.place(row, row + 1, seq_round.length - 1)
        self._pass.layers(0, stop, 1, self._span(seq_round.length + row), seq_round.states)
        self._ahead = _Ahead(stop, row, seq_round.length, seq_round.states)

    def _was_ahead(self, rows: SequenceRows, start: int, stop: int) -> bool:
        """Whether these rows were run ahead already."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return False
        seq_round = rows.seq_round
        asked = rows.first, rows.end, rows.tokens[rows.first :], seq_round.length, seq_round.states
        known = ahead.row, ahead.row + 1, [ahead.token], ahead.length, ahead.states
        if start == 0 and stop == ahead.stop and asked == known:
            return True
        rows.num_discarded += 1
        return False

    def _compare(self, rows: SequenceRows, kind: str) -> None:
        """Compare the first rounds of each kind with the eager passes."""
        if not first_rounds.due(self.model, kind):
            return
        compared = 1
        if (
            rows.end > 1
        ):  # a drafted row that is NaN may spoil the rows before it; the round is then done again without it
            is_sound = ~self._pass.logits[: rows.end].isnan().any(dim=-1)
            compared = int(is_sound.long().cumprod(0).sum())
        if compared:
            tokens = torch.tensor(rows.tokens[:compared], dtype=torch.long, device="cpu").to(self.model.device)
            chosen = [output.token for output in rows.outputs[:compared]]
            position, logits = rows.seq_round.length - 1, self._pass.logits[:compared]
            first_rounds.check(self.model, self.cache, kind, tokens, position, logits, chosen)

    def warm_up(
        self, exit_layers: tuple[int, ...], max_rows: int, max_length: int, layers_to_learn: tuple[int, ...]
    ) -> None:
        """Capture what rounds of up to `max_rows` rows at these exit layers, and plain steps, may need in texts of up to
        `max_length` tokens, with and without learning from some layers."""
        self.begin()
        self.reserve(max_rows)
        captured, num_layers = self._pass, self.model.num_layers
        watching = [None, self._states_of(layers_to_learn)] if layers_to_learn else [None]
        buckets = sorted({_power_of_two(rows) for rows in range(1, max_rows + 1)})
        captured.place(0, 1, 0)  # bodies run while they are captured: at places that exist
        limit = self.cache.max_length
        spans: list[int | None] = [None] if captured.paged else [*_spans(min(max_length, limit), limit)]
        for span in spans:
            for states in watching:
                for stop in (*exit_layers, num_layers):
                    captured.layers(0, stop, 1, span, states, ahead=True)
                for exit_layer in exit_layers:
                    for rows in buckets if span is not None else [rows for rows in buckets if rows <= limit]:
                        captured.layers(exit_layer, num_layers, rows, span, states, ahead=True)
        for exit_layer in exit_layers:
            for detail in get_args(Detail):
                captured.head("draft", 1, exit_layer, detail, ahead=True)
        for rows in buckets:
            captured.head("full", rows, 0, "token", ahead=True)

    def _rows_run(self, rows: int, position: int) -> int:
        """Rows of the capture that serves this many from this position on: no more than the cache has room for."""
        bucket = _power_of_two(rows)
        # In a cache that is almost full, exactly these rows are captured. Behind masks, added rows need no room.
        return rows if self._pass.paged and position + bucket > self.cache.max_length else bucket

    def _span(self, length: int) -> int | None:
        """How many positions attention looks at to see `length` of them; None where the device says how many there are."""
        if self._pass.paged:
            return None
        return min(max(_power_of_two(length), SMALLEST_SPAN), self.cache.max_length)


def _spans(max_length: int, limit: int) -> list[int]:
    """List the spans that texts of up to `max_length` tokens go through."""
    spans = [min(SMALLEST_SPAN, limit)]
    while spans[-1] < max_length:
        spans.append(min(2 * spans[-1], limit))
    return spans
