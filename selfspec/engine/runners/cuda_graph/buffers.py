"""Buffers of captured passes, and the pieces of work over them that are captured.

All that changes from pass to pass is in tensors that stay where they are. A piece of work depends only on what selects its
capture: layers, how many rows, how many positions attention looks at.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.choices import Detail, HeadOutput, choices_of
from layerskip_models.kv_cache import KVCache
from selfspec.engine.hidden_states import HiddenStates
from selfspec.engine.runners.cuda_graph.capture import Body, Captures
from selfspec.engine.runners.cuda_graph.forward import StaticForward
from selfspec.engine.runners.cuda_graph.streams import Streams
from selfspec.engine.runners.runner import Head

BLOCK = 8
"""Layers are captured in blocks of this size: every exit layer and plain steps share all but the block they end in."""
NUMBERS: dict[Detail, int] = {"token": 2, "confidence": 3, "all": 5}
"""How many numbers the host reads of a row: the first ones of a `HeadOutput`."""


class StaticPass:
    """Buffers of passes over up to `max_rows` rows of a round on one KV cache, and the captured work on them.

    tokens: int64 [max_rows + 1], of the round's rows. base: int64 [1], the position of row 0. first, last: int64 [1], the
        rows that a pass runs, both included.
    hidden: [max_rows, hidden], each row's output of the layers that it has passed.
    logits: float32 [max_rows, vocab] of the rows that the head ran on last, from index 0 on. outputs: float64 [5, max_rows],
        their `HeadOutput`s, which the host reads.
    """

    def __init__(self, model: LayerSkipModel, cache: KVCache, max_rows: int, streams: Streams) -> None:
        device = model.device
        self.max_rows = max_rows
        self._model = model
        self._forward = StaticForward(model, cache)
        self._state = torch.zeros(max_rows + 4, dtype=torch.long, device=device)
        self.base, self.first, self.last, self.tokens = self._state.split([1, 1, 1, max_rows + 1])
        self.hidden = torch.zeros(max_rows, model.hidden_size, dtype=model.dtype, device=device)
        self.logits = torch.zeros(max_rows, model.vocab_size, dtype=torch.float32, device=device)
        self.outputs = torch.zeros(NUMBERS["all"], max_rows, dtype=torch.float64, device=device)
        self._index = torch.arange(max_rows, dtype=torch.long, device=device)
        self.captures = Captures(device, (self._state, self.hidden), streams)

    @property
    def paged(self) -> bool:
        """Whether attention takes the length from the device. Every span is None then. Rows that a capture has beyond the
        last one get positions of their own after it, for which the cache must have room."""
        return self._forward.paged

    def place(self, first: int, end: int, base: int) -> None:
        """Let passes run rows [first, end) of a round whose row 0 is at position `base`."""
        self.base.fill_(base)
        self.first.fill_(first)
        self.last.fill_(end - 1)

    def layers(
        self, start: int, stop: int, rows: int, span: int | None, states: HiddenStates | None, ahead: bool = False
    ) -> None:
        """Run layers [start, stop) for rows first .. last, of which there are at most `rows`; from layer 0 on their tokens
        are embedded. ahead: only capture."""
        assert rows <= self.max_rows
        while start < stop:
            end = min(stop, (start // BLOCK + 1) * BLOCK)
            watching = states if states is not None and states.watches(start, end) else None
            key = ("layers", start, end, rows, span, None if watching is None else watching.layers)
            self._run(key, self._layers_body(start, end, rows, span, watching), ahead)
            start = end

    def head(self, kind: Head, rows: int, exit_layer: int, detail: Detail, ahead: bool = False) -> None:
        """Run the head on rows first .. last, of which there are at most `rows`: `logits`, `outputs`, and the token after the
        last row. exit_layer: whose adapter the rows pass before the draft head."""
        adapted = exit_layer if kind == "draft" and exit_layer in self._model.adapters else None

        def body() -> None:
            model, hidden = self._model, self.hidden.index_select(0, self._rows(rows))
            seen = hidden if adapted is None else model.at_exit(hidden, adapted)
            logits = self.logits[:rows]
            logits.copy_(model.draft_logits(seen) if kind == "draft" else model.logits(seen))
            choices = choices_of(logits, detail)
            self.outputs[0, :rows].copy_(choices.tokens)
            self.outputs[1 : 1 + choices.numbers.shape[0], :rows].copy_(choices.numbers)
            self.tokens.index_copy_(0, self.last + 1, choices.tokens[-1:])

        self._run(("head", kind, rows, adapted, detail), body, ahead)

    def _rows(self, rows: int) -> Tensor:
        """Numbers of the rows of a pass, int64 [rows]; those beyond the last repeat it."""
        return torch.minimum(self.first + self._index[:rows], self.last)

    def _layers_body(self, start: int, stop: int, rows: int, span: int | None, states: HiddenStates | None) -> Body:
        def body() -> None:
            sources = places = self._rows(rows)
            if span is None:
                # Rows beyond the last begin as it did and go on at positions of their own, which the next rows overwrite
                # before anybody attends to them. What an earlier round left in their places might grow round by round.
                places = self.first + self._index[:rows]
            # Else rows beyond the last repeat it: they compute and write the same once more, and nothing of their own.
            if start == 0:
                hidden = self._model.embed(self.tokens.index_select(0, sources))
            else:
                hidden = self.hidden.index_select(0, sources)
            capture = None if states is None else (lambda layer, state: states.capture_at(places, layer, state))
            out = self._forward.run(hidden, start, stop, self.base + places, span, capture)
            self.hidden.index_copy_(0, places, out)

        return body

    def _run(self, key: Hashable, body: Body, ahead: bool) -> None:
        (self.captures.ensure if ahead else self.captures.run)(key, body)


def head_outputs(numbers: Sequence[float], rows: int) -> list[HeadOutput]:
    """From `StaticPass.outputs` as the host has read it: one kind of number after the other, `rows` of each."""
    tokens, *kinds = (numbers[at : at + rows] for at in range(0, len(numbers), rows))
    return [HeadOutput(int(token), *row) for token, *row in zip(tokens, *kinds)]
