"""How sure a table of policies is: 95 % intervals over prompts.

A paired bootstrap: prompts are drawn again with replacement, within each task, 2,000 times; every row sees the same draws.
So an interval of a ratio says what other prompts of these tasks might have given, and nothing of other models or machines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from random import Random

import numpy as np
from numpy.typing import NDArray

from bench.record import PLAIN, Line
from bench.report.summary import Samples, answer_speed
from bench.report.table import Table

DRAWS = 2000
FEWEST = 6
"""Prompts; an interval of fewer would look narrower than it is."""
Floats = NDArray[np.float64]
Rate = tuple[Floats, Floats]
"""By prompt: an amount, and what it is divided by once both are summed up."""


def interval_tables(samples: Samples, runs: Mapping[str, Sequence[Line]]) -> list[Table]:
    """Divide each policy by plain decoding and the best fixed setting. No table for fewer than `FEWEST` prompts."""
    count = len(samples.prompts)
    if len(runs) < 2 or PLAIN not in runs or count < FEWEST or any(len(own) < count for own in runs.values()):
        return []
    tasks = [line["task"] for line in runs[PLAIN]]
    layers: dict[str, Rate] = {}
    speeds: dict[str, Rate] = {}
    for engine, own in runs.items():
        # A pre-verifier's passes count as layers.
        loaded = np.array([line["stats"]["loaded_layers"] + line["stats"]["preverifier_layers"] for line in own])
        layers[engine] = np.array([line["num_new_tokens"] - 1.0 for line in own]), loaded
        speeds[engine] = np.array(samples.per_prompt(engine, answer_speed)), np.ones(count)
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
    title = f"95 % intervals over {count} prompts, paired: each policy over plain decoding, and over one fixed setting"
    return [Table.of("intervals", title, rows)]


def interval(ours: Rate, theirs: Rate, tasks: Sequence[str]) -> str:
    """Write how many times theirs our rate is over all prompts, and in brackets its interval."""

    def times(weights: Floats) -> Floats:
        (ours_is, ours_per), (theirs_is, theirs_per) = ours, theirs
        return np.asarray((weights @ ours_is) / (weights @ ours_per) / ((weights @ theirs_is) / (weights @ theirs_per)))

    low, high = np.percentile(times(drawn(tuple(tasks))), (2.5, 97.5))
    return f"{times(np.ones(len(tasks))):.3f} ({low:.3f}–{high:.3f})"


@cache  # many rows have the same prompts
def drawn(tasks: tuple[str, ...]) -> Floats:
    """Return how often each prompt is drawn, [draws, prompts], read only: as many of each task as there are."""
    random = Random(1)
    places = [[place for place, task in enumerate(tasks) if task == one] for one in dict.fromkeys(tasks)]
    counts = np.zeros((DRAWS, len(tasks)))
    for row in counts:
        for own in places:
            for place in random.choices(own, k=len(own)):
                row[place] += 1
    counts.flags.writeable = False
    return counts
