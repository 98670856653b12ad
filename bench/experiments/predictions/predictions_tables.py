"""Published rows beside what one acceptance rate foretells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from bench.record import Line, matching
from bench.report.table import Table

Ratio = Callable[[Line], float]


def predictions_headline(lines: Sequence[Line]) -> str:
    """How far finite state's rows are from what is foretold, in a sentence."""
    found = [line["finite_state"] / line["finite_state_foretold"] for line in matching(lines, "prediction")]
    return (
        f"Published rows of finite state are {min(found):.2f} to {max(found):.2f} times what the acceptance rate of fixed"
        f" drafts foretells, {median(found):.2f} in the middle."
    )


def predictions_tables(lines: Sequence[Line]) -> list[Table]:
    """A row for each model, its tasks' middle and range."""
    found = matching(lines, "prediction")
    names = list(dict.fromkeys(line["model"] for line in found))
    rows = []
    for name in [*names, "all"]:
        own = [line for line in found if name in (line["model"], "all")]
        rows.append(
            {
                "model": name,
                "acceptance rate": _spread(own, lambda line: line["acceptance"]),
                "FS, measured over foretold": _spread(
                    own, lambda line: line["finite_state"] / line["finite_state_foretold"]
                ),
                "DV over the best fixed length": _spread(
                    own, lambda line: line["draft_verify"] / line["best_fixed_length"]
                ),
                "DEL over the best fixed length": _spread(own, lambda line: line["del"] / line["best_fixed_length"]),
                "DEL over oracle lengths": _spread(own, lambda line: line["del"] / line["oracle_length"]),
            }
        )
    return [
        Table.of(
            "predictions", "DEL's table 1 beside one acceptance rate, fitted to each of its rows of fixed drafts", rows
        )
    ]


def _spread(lines: Sequence[Line], ratio: Ratio) -> str:
    values = [ratio(line) for line in lines]
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
