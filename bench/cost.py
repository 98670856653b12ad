"""What a layer and the head cost on this machine for 1, 2, ... rows, and what a replayed setting would take.

eTPL counts layers only. Where the head is large beside a layer (small models, large vocabularies), short drafts from
deeper layers win; timing both ranks the cells of a sweep well enough to choose which to run for real.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch

from bench.engines import synchronize
from bench.replay import Replay
from layerskip_models import LayerSkipModel
from selfspec.kv_cache import KVCache

_REPEATS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCosts:
    """Seconds by row count: entry r-1 is for r rows. layer: one layer on average; head: norm and head."""

    layer: tuple[float, ...]
    head: tuple[float, ...]
    num_layers: int

    def seconds(self, replay: Replay) -> float:
        """Time of the replayed rounds, without the engine's own overhead.

        A round with k drafts: k draft steps (E layers and the head on one row), E layers on the last row, L - E layers
        and the head on k + 1 rows.
        """
        early, late = replay.exit_layer, self.num_layers - replay.exit_layer
        total = 0.0
        for drafted in replay.drafted:
            draft_step = early * self.layer[0] + self.head[0]
            total += drafted * draft_step + early * self.layer[0] + late * self.layer[drafted] + self.head[drafted]
        return total

    def autoregressive_seconds(self, num_tokens: int) -> float:
        """Time of as many plain steps."""
        return num_tokens * (self.num_layers * self.layer[0] + self.head[0])


def measure_row_costs(model: LayerSkipModel, max_rows: int, position: int) -> RowCosts:
    """Time all layers and the head for 1 .. max_rows rows behind `position` others."""
    with torch.inference_mode():
        cache = KVCache(model, position + max_rows)
        tokens = torch.arange(position + max_rows, device=model.device) % model.vocab_size
        if position:
            model.run_layers(model.embed(tokens[:position]), 0, model.num_layers, cache, 0)
        calls = []
        for rows in range(1, max_rows + 1):
            embedded = model.embed(tokens[position : position + rows])
            hidden = model.run_layers(embedded, 0, model.num_layers, cache, position)
            calls.append(partial(model.run_layers, embedded, 0, model.num_layers, cache, position))
            calls.append(partial(model.logits, hidden))
        times = _least_seconds(model, calls)
    return RowCosts(
        layer=tuple(seconds / model.num_layers for seconds in times[::2]),
        head=tuple(times[1::2]),
        num_layers=model.num_layers,
    )


def _least_seconds(model: LayerSkipModel, calls: Sequence[Callable[[], object]]) -> list[float]:
    """The least time of each call over rounds through all of them: others' work on the machine only ever adds."""
    least = [float("inf")] * len(calls)
    for _ in range(_REPEATS):
        for index, call in enumerate(calls):
            synchronize(model.device)
            start = perf_counter()
            call()
            synchronize(model.device)
            least[index] = min(least[index], perf_counter() - start)
    return least
