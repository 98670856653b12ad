"""How sure a table of policies is: 95 % intervals over prompts.

A paired bootstrap: prompts are drawn again with replacement, within each task, 2,000 times; every row sees the same draws.
So an interval of a ratio says what other prompts of these tasks might have given, and nothing of other models or machines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from statistics import median

import numpy as np
from numpy.typing import NDArray

from bench.grid import ALL, LAYERS, GridCell, fixed_in_hindsight, grid_lines
from bench.record import PLAIN, Line, by_value
from bench.report.summary import Samples
from bench.report.table import Table

DRAWS = 2000
FEWEST = 6
"""Prompts; an interval of fewer would look narrower than it is."""
_SEED = 1
_ENDS = (2.5, 97.5)
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRow:
    """One policy's prompts: tokens committed in rounds, layers loaded in them, tokens per second. [prompts] each; a replayed
    setting has the first two.
    """

    tokens: Floats
    layers: Floats
    speeds: Floats | None = None


def interval_tables(lines: Sequence[Line], runs: Mapping[str, Sequence[Line]]) -> list[Table]:
    """Intervals of each policy. runs: by engine, a prompt each.

    No table for a record of fewer than `FEWEST` prompts, without plain decoding, or without layers counted.
    """
    samples = Samples(lines)
    if PLAIN not in runs or len(samples.prompts) < FEWEST:
        return []
    if any(len(own) < len(samples.prompts) for own in runs.values()):
        return []
    if any("loaded_layers" not in line["stats"] for own in runs.values() for line in own):
        return []
    rows = {
        f"`{engine.removeprefix('selfspec:')}`": policy_row(samples, engine, own)
        for engine, own in runs.items()
        if engine != PLAIN
    }
    rows = dict(sorted(rows.items(), key=lambda item: -item[1].tokens.sum() / item[1].layers.sum()))
    fixed = _best_fixed(grid_lines(lines), samples.prompts)
    plain = policy_row(samples, PLAIN, runs[PLAIN])
    return _intervals(samples, rows, plain, fixed)


def interval(values: Callable[[Floats], Floats], draws: Floats) -> str:
    """Write a figure of all prompts, and in brackets its interval.

    values: of several weightings of the prompts, [weightings, prompts], of which `draws` are such; returns [weightings].
    """
    (whole,) = values(np.ones((1, draws.shape[1])))
    low, high = np.percentile(values(draws), _ENDS)
    return f"{whole:.3f} ({low:.3f}–{high:.3f})"


def rate(row: PolicyRow, weights: Floats) -> Floats:
    """Tokens per loaded layer, the prompts pooled. weights: [.., prompts]; returns [..]."""
    return np.asarray(weights @ row.tokens / (weights @ row.layers))


def speed(row: PolicyRow, weights: Floats) -> Floats:
    """Sum the tokens per second over prompts. weights: [.., prompts]; returns [..]."""
    assert row.speeds is not None
    return np.asarray(weights @ row.speeds)


def drawn(tasks: Sequence[str], draws: int = DRAWS) -> Floats:
    """How often each prompt is drawn, [draws, prompts], read only: as many of each task as there are."""
    return _drawn(tuple(tasks), draws)


@cache  # many records have the same prompts
def _drawn(tasks: tuple[str, ...], draws: int) -> Floats:
    random = Random(_SEED)
    places = [[place for place, task in enumerate(tasks) if task == one] for one in dict.fromkeys(tasks)]
    counts = np.zeros((draws, len(tasks)))
    for row in counts:
        for own in places:
            for place in random.choices(own, k=len(own)):
                row[place] += 1
    counts.flags.writeable = False
    return counts


def policy_row(samples: Samples, engine: str, own: Sequence[Line]) -> PolicyRow:
    """Return what one engine's runs give. own: its first run on each prompt."""
    by_prompt = {line["prompt"]: line for line in own}
    timed_runs = by_value(samples.of_engine(engine), "prompt")
    timed = [timed_runs[prompt] for prompt in samples.prompts]
    stats = [by_prompt[prompt]["stats"] for prompt in samples.prompts]
    return PolicyRow(
        tokens=np.array([by_prompt[prompt]["num_new_tokens"] - 1.0 for prompt in samples.prompts]),
        layers=np.array([float(each["loaded_layers"] + each["preverifier_layers"]) for each in stats]),
        speeds=np.array([median(line["num_new_tokens"] / line["seconds"] for line in group) for group in timed]),
    )


def _best_fixed(grid: Sequence[Line], prompts: Sequence[str]) -> tuple[str, PolicyRow] | None:
    if not grid:
        return None
    setting = fixed_in_hindsight(grid, LAYERS)[ALL]
    cells = {line["prompt"]: GridCell(*line["cells"][setting]) for line in grid}
    found = [cells[prompt] for prompt in prompts]
    return setting, PolicyRow(
        tokens=np.array([cell.tokens for cell in found]), layers=np.array([cell.layers for cell in found])
    )


def _intervals(
    samples: Samples, rows: Mapping[str, PolicyRow], plain: PolicyRow, fixed: tuple[str, PolicyRow] | None
) -> list[Table]:
    draws = drawn([samples.tasks[prompt] for prompt in samples.prompts])

    made = []
    for name, row in rows.items():
        cells = {"policy": name, "eTPL over plain's": interval(lambda w, row=row: rate(row, w) / rate(plain, w), draws)}  # type: ignore[misc]
        if fixed is not None:
            best = fixed[1]
            cells[f"over the best fixed setting's, `{fixed[0]}`"] = interval(
                lambda w, row=row, best=best: rate(row, w) / rate(best, w),  # type: ignore[misc]
                draws,
            )
        cells["tokens/s over plain's"] = interval(lambda w, row=row: speed(row, w) / speed(plain, w), draws)  # type: ignore[misc]
        made.append(cells)
    count = len(samples.prompts)
    title = (
        f"95 % intervals over {count} prompts, paired: each policy divided by plain decoding, and by one fixed setting"
    )
    return [Table.of("intervals", title, made)] if made else []
