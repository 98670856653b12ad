"""How sure a table of policies is: 95 % intervals over prompts.

A paired bootstrap: prompts are drawn again with replacement, within each task, 2,000 times; every row sees the same draws.
So an interval of a ratio says what other prompts of these tasks might have given, and nothing of other models or machines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from random import Random
from statistics import median

import numpy as np
from numpy.typing import NDArray

from bench.record import PLAIN, Line, by_value
from bench.report.summary import Samples
from bench.report.table import Table

DRAWS = 2000
FEWEST = 6
"""Prompts; an interval of fewer would look narrower than it is."""
_SEED = 1
_ENDS = (2.5, 97.5)
Floats = NDArray[np.float64]
Rate = tuple[Floats, Floats]
"""By prompt: an amount, and what it is divided by once both are summed up."""


def interval_tables(samples: Samples, runs: Mapping[str, Sequence[Line]]) -> list[Table]:
    """Divide each policy by plain decoding, and by the best fixed setting of the run. runs: by engine, a prompt each.

    No table for a record of fewer than `FEWEST` prompts, or without plain decoding.
    """
    count = len(samples.prompts)
    if len(runs) < 2 or PLAIN not in runs or count < FEWEST or any(len(own) < count for own in runs.values()):
        return []
    tasks = [samples.tasks[prompt] for prompt in samples.prompts]
    layers = {engine: _tokens_per_layer(samples, own) for engine, own in runs.items()}
    speeds = {engine: _speed(samples, engine) for engine in runs}
    best_first = sorted(runs, key=lambda engine: -layers[engine][0].sum() / layers[engine][1].sum())
    fixed = next((engine for engine in best_first if engine.startswith("selfspec:ls:")), None)
    rows = []
    for engine in best_first:
        if engine != PLAIN:
            cells = {"policy": f"`{engine.removeprefix('selfspec:')}`"}
            cells["eTPL over plain's"] = interval(layers[engine], layers[PLAIN], tasks)
            if fixed is not None:
                name = f"over the best fixed setting's, `{fixed.removeprefix('selfspec:')}`"
                cells[name] = interval(layers[engine], layers[fixed], tasks)
            cells["tokens/s over plain's"] = interval(speeds[engine], speeds[PLAIN], tasks)
            rows.append(cells)
    title = (
        f"95 % intervals over {count} prompts, paired: each policy divided by plain decoding, and by one fixed setting"
    )
    return [Table.of("intervals", title, rows)]


def interval(ours: Rate, theirs: Rate, tasks: Sequence[str]) -> str:
    """Write how many times theirs our rate is over all prompts, and in brackets its interval."""

    def times(weights: Floats) -> Floats:
        (ours_is, ours_per), (theirs_is, theirs_per) = ours, theirs
        return np.asarray((weights @ ours_is) / (weights @ ours_per) / ((weights @ theirs_is) / (weights @ theirs_per)))

    low, high = np.percentile(times(drawn(tuple(tasks))), _ENDS)
    return f"{times(np.ones(len(tasks))):.3f} ({low:.3f}–{high:.3f})"


@cache  # many rows have the same prompts
def drawn(tasks: tuple[str, ...]) -> Floats:
    """Return how often each prompt is drawn, [draws, prompts], read only: as many of each task as there are."""
    random = Random(_SEED)
    places = [[place for place, task in enumerate(tasks) if task == one] for one in dict.fromkeys(tasks)]
    counts = np.zeros((DRAWS, len(tasks)))
    for row in counts:
        for own in places:
            for place in random.choices(own, k=len(own)):
                row[place] += 1
    counts.flags.writeable = False
    return counts


def _tokens_per_layer(samples: Samples, own: Sequence[Line]) -> Rate:
    """Return tokens committed in rounds, and layers loaded in them, of an engine's first run on each prompt."""
    by_prompt = {line["prompt"]: line for line in own}
    lines = [by_prompt[prompt] for prompt in samples.prompts]
    layers = [line["stats"]["loaded_layers"] + line["stats"]["preverifier_layers"] for line in lines]
    return np.array([line["num_new_tokens"] - 1.0 for line in lines]), np.array(layers, dtype=np.float64)


def _speed(samples: Samples, engine: str) -> Rate:
    """Return tokens per second, which are averaged over prompts."""
    runs = by_value(samples.of_engine(engine), "prompt")
    speeds = [median(line["num_new_tokens"] / line["seconds"] for line in runs[prompt]) for prompt in samples.prompts]
    return np.array(speeds), np.ones(len(speeds))
