"""Times the engine's hot calls on the running device and fills `policies.MeasuredCost`; once for model and machine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter
from weakref import WeakKeyDictionary

import numpy as np
import torch

from layerskip_models import LayerSkipModel
from layerskip_models.fork_safe import fork_safe
from layerskip_models.kernels.threads import num_threads
from layerskip_models.kv_cache import KVCache
from policies import FixedExit, MeasuredCost, NeverStop, ObservationSpec, Policy
from selfspec.engine.draft import Draft, make_drafts
from selfspec.engine.kept_costs import keep_cost, kept_cost
from selfspec.engine.request import plain_request
from selfspec.engine.runners.eager import make_runner
from selfspec.engine.runners.runner import Runner, RunnerName, engine_mode, resolve_runner
from selfspec.engine.sequence import Sequence

_CONTEXT = 512  # positions in the cache while timing: in a small model further rows of a pass pay most for attention
_ROWS = (1, 2, 3, 4, 5, 7, 9, 13)
_DRAFTS = 4
_SECONDS = 0.6  # for all timings together, once each has two
_REPEATS = 24

_measuring = fork_safe(threading.Lock())
_measured: WeakKeyDictionary[LayerSkipModel, dict[RunnerName, MeasuredCost]] = WeakKeyDictionary()


def measured_cost(model: LayerSkipModel, runner: RunnerName | None = None, *, fresh: bool = False) -> MeasuredCost:
    """Return the model's costs on its device: kept ones (`kept_costs`), or calibrated on the first call, and then kept.

    runner: of the passes; None for the one that a generator takes by default. fresh: calibrate in this process, whatever
    an earlier one has kept.
    """
    runner = resolve_runner("auto", model) if runner is None else runner
    with _measuring:  # two calibrations at once would time each other
        known = _measured.setdefault(model, {})
        if runner not in known:
            kept = None if fresh else kept_cost(model, runner)
            known[runner] = kept or calibrate(model, runner)
            if kept is None:
                keep_cost(model, runner, known[runner])
        return known[runner]


def use_cost(model: LayerSkipModel, cost: MeasuredCost) -> None:
    """Use this cost from now on, as it is, such as another process's, so that both decide alike."""
    fixed = replace(cost, fixed=True)
    with _measuring:
        _measured[model] = {"eager": fixed, "graphs": fixed}


def calibrate(model: LayerSkipModel, runner: RunnerName = "eager") -> MeasuredCost:
    """Time layers and head over several numbers of rows, and a draft step. All calls take turns; the lower quartile counts.

    Two rounds of timings at least, then more for up to 0.6 s: under a second for the demo checkpoint. Numbers of rows between
    the timed ones are interpolated, and no cost falls as rows grow. Allocates a KV cache of 512 positions while it runs.
    """
    context = min(_CONTEXT, model.max_positions)
    rows_timed = tuple(rows for rows in _ROWS if rows < context)
    cache = KVCache(model, context)
    with engine_mode(model.device), model.on_one_team():
        for stored in cache.memory:
            stored.fill_(0.5)  # not leftover memory: infinities there are slow on some processors
        *passes, draft = _timed(_calls(model.with_adapters({}), cache, rows_timed, runner), model)
        adapter_seconds = _adapter_seconds(model, cache, runner) if model.adapters else ()
    heads = passes[::-2]
    layers = [max(both - head, 0.1 * both) for both, head in zip(passes[-2::-2], heads)]
    layer_seconds = _every_row(rows_timed, [value / model.num_layers for value in layers])
    head_seconds = _every_row(rows_timed, heads)
    step = draft / _DRAFTS - layer_seconds[0] - head_seconds[0]
    dtype = str(model.dtype).removeprefix("torch.")
    return MeasuredCost(
        num_layers=model.num_layers,
        layer_seconds=layer_seconds,
        head_seconds=head_seconds,
        draft_seconds=max(step, -0.9 * head_seconds[0]),
        adapter_seconds=adapter_seconds,
        description=f"{model.device.type} {dtype}, {num_threads()} threads",
    )


def _adapter_seconds(model: LayerSkipModel, cache: KVCache, runner: RunnerName) -> tuple[tuple[int, float], ...]:
    """Measure what each exit's adapter adds to a draft step: the difference between a draft with it and one without."""
    exits, pair = sorted(model.adapters), [make_runner(one, runner) for one in (model, model.with_adapters({}))]
    seconds = _timed([_draft_call(one, cache, layer) for layer in exits for one in pair], model)
    added = [max(with_it - without, 0.0) / _DRAFTS for with_it, without in zip(seconds[::2], seconds[1::2])]
    return tuple(zip(exits, added))


class _Watching(NeverStop):
    observes = ObservationSpec(confidence=True)


def _text(model: LayerSkipModel, cache: KVCache, exit_layer: int = 1) -> Sequence:
    """Make a text that fills the cache but for a draft of `_DRAFTS` tokens, whose policy asks for each confidence."""
    policy = Policy(FixedExit(exit_layer, _DRAFTS, num_layers=model.num_layers), _Watching())
    prompt = torch.zeros(cache.max_length - _DRAFTS - 1, dtype=torch.long, device="cpu")
    text = Sequence(model, cache, plain_request(prompt, _DRAFTS + 1), policy)
    text.pending = 0
    return text


def _draft_call(running: Runner, cache: KVCache, exit_layer: int) -> Callable[[], object]:
    """Prepare a draft of `_DRAFTS` steps at the end of a text."""
    text = _text(running.model, cache, exit_layer)

    def draft() -> None:
        cache.declare(text.length - 1)
        make_drafts(running, [Draft(text, exit_layer, _DRAFTS)])

    return draft


def _calls(
    model: LayerSkipModel, cache: KVCache, rows_timed: tuple[int, ...], runner: RunnerName
) -> list[Callable[[], object]]:
    """For each number of rows, all layers with the head, then the head alone; last, a draft of `_DRAFTS` steps.

    From many rows to one, so that a pass over one comes soon after another pass, as in decoding, and finds in a cache what of
    the weights fits there. A head comes after layers: after another head its weights might still be in a cache.
    """
    running, text, last = make_runner(model, runner), _text(model, cache), model.num_layers
    text.reserve(rows_timed[-1])
    text.hidden.zero_()

    def run(draft: Draft, start: int) -> None:
        cache.declare(cache.max_length - draft.end)
        running.run([draft], start, last, "full")

    drafts = [Draft(text, copied=[0] * (rows - 1)) for rows in reversed(rows_timed)]
    passes = [partial(run, draft, start) for draft in drafts for start in (0, last)]
    return [*passes, _draft_call(running, cache, 1)]


def _timed(calls: list[Callable[[], object]], model: LayerSkipModel) -> list[float]:
    """Seconds of each call: the lower quartile, since a busy machine only ever adds. The calls take turns."""
    device = model.device
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


def synchronize(device: torch.device) -> None:
    """Wait for the work that is queued on the device, so that the clock sees it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # not the whole device: other threads may use it


def _every_row(rows_timed: tuple[int, ...], seconds: list[float]) -> tuple[float, ...]:
    """Seconds for 1, 2, ... rows, interpolated from those that were timed, and never less than for fewer rows."""
    every = range(rows_timed[0], rows_timed[-1] + 1)
    return tuple(np.interp(every, rows_timed, np.maximum.accumulate(seconds)).tolist())
