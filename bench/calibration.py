"""Times the engine's hot calls on the running device, and fills `policies.MeasuredCost` with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter

import numpy as np
import torch

from bench.machine import synchronize
from bench.record import Record
from layerskip_models import LayerSkipModel
from layerskip_models.kernels.threads import num_threads
from layerskip_models.kv_cache import KVCache
from policies import MeasuredCost, autoregressive
from selfspec import SelfSpecGenerator
from selfspec.engine.draft import Draft
from selfspec.engine.expected_cost import CONTEXT, expected_cost
from selfspec.engine.request import plain_request
from selfspec.engine.runners.eager import make_runner
from selfspec.engine.runners.runner import RunnerName, engine_mode, resolve_runner
from selfspec.engine.sequence import Sequence

_ROWS = (1, 2, 3, 4, 5, 7, 9, 13)
_SECONDS = 0.6  # for all timings together, once each has two
_REPEATS = 24


def calibrated(generator: SelfSpecGenerator, record: Record) -> MeasuredCost:
    """Measure what layers and head cost, and write it; or take the costs that the record has."""
    line = record.once("costs", lambda: calibrate(generator.model, generator.runner).as_dict())
    return MeasuredCost.from_dict({name: value for name, value in line.items() if name != "kind"})


def calibrate(model: LayerSkipModel, runner: RunnerName | None = None) -> MeasuredCost:
    """Time layers and head over several numbers of rows. All calls take turns; the lower quartile counts.

    Two rounds of timings at least, then more for up to 0.6 s: under a second for the demo checkpoint. Numbers of rows between
    the timed ones are interpolated, and no cost falls as rows grow. What a draft step or an adapter costs besides is
    estimated (`expected_cost`). runner: of the passes; None for the one that a generator takes by default. Allocates a KV
    cache of 512 positions while it runs.
    """
    runner = resolve_runner("auto", model) if runner is None else runner
    context = min(CONTEXT, model.max_positions)
    rows_timed = tuple(rows for rows in _ROWS if rows < context)
    cache = KVCache(model, context)
    with engine_mode(model.device), model.on_one_team():
        for stored in cache.memory:
            stored.fill_(0.5)  # not leftover memory: infinities there are slow on some processors
        passes = _timed(_calls(model.with_adapters({}), cache, rows_timed, runner), model.device)
    heads = passes[::-2]
    layers = [max(both - head, 0.1 * both) / model.num_layers for both, head in zip(passes[-2::-2], heads)]
    layer_seconds, head_seconds = _every_row(rows_timed, layers), _every_row(rows_timed, heads)
    estimate = expected_cost(model, runner)
    scale = (model.num_layers * layer_seconds[0] + head_seconds[0]) / estimate.autoregressive()
    dtype = str(model.dtype).removeprefix("torch.")
    return replace(
        estimate,
        layer_seconds=layer_seconds,
        head_seconds=head_seconds,
        draft_seconds=max(scale * estimate.draft_seconds, -0.9 * head_seconds[0]),
        adapter_seconds=tuple((layer, scale * seconds) for layer, seconds in estimate.adapter_seconds),
        description=f"{model.device.type} {dtype}, {num_threads()} threads",
        rounded=(),
    )


def _calls(
    model: LayerSkipModel, cache: KVCache, rows_timed: tuple[int, ...], runner: RunnerName
) -> list[Callable[[], object]]:
    """For each number of rows, all layers with the head, then the head alone.

    From many rows to one, so that a pass over one comes soon after another pass, as in decoding, and finds in a cache what of
    the weights fits there. A head comes after layers: after another head its weights might still be in a cache.
    """
    running, last = make_runner(model, runner), model.num_layers
    prompt = torch.zeros(cache.max_length - rows_timed[-1], dtype=torch.long, device="cpu")
    text = Sequence(model, cache, plain_request(prompt, 1), autoregressive(last))
    text.pending = 0
    text.reserve(rows_timed[-1])
    text.hidden.zero_()

    def run(draft: Draft, start: int) -> None:
        cache.declare(cache.max_length - draft.end)
        running.run([draft], start, last, "full")

    drafts = [Draft(text, copied=[0] * (rows - 1)) for rows in reversed(rows_timed)]
    return [partial(run, draft, start) for draft in drafts for start in (0, last)]


def _timed(calls: list[Callable[[], object]], device: torch.device) -> list[float]:
    """Seconds of each call: the lower quartile, since a busy machine only ever adds. The calls take turns."""
    for call in calls:
        call()
    seconds: list[list[float]] = [[] for _ in calls]
    started = perf_counter()
    for repeat in range(_REPEATS):
        if repeat >= 2 and perf_counter() - started > _SECONDS:
            break
        for call, times in zip(calls, seconds):
            synchronize(device)
            start = perf_counter()
            call()
            synchronize(device)
            times.append(perf_counter() - start)
    return [sorted(times)[len(times) // 4] for times in seconds]


def _every_row(rows_timed: tuple[int, ...], seconds: list[float]) -> tuple[float, ...]:
    """Seconds for 1, 2, ... rows, interpolated from those that were timed, and never less than for fewer rows."""
    every = range(rows_timed[0], rows_timed[-1] + 1)
    return tuple(np.interp(every, rows_timed, np.maximum.accumulate(seconds)).tolist())
