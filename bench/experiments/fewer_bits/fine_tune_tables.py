"""The table of `fine-tune`."""

from __future__ import annotations

from collections.abc import Sequence

from bench.record import Line, matching
from bench.report.table import Table, subject


def fine_tune_headline(lines: Sequence[Line]) -> str:
    """What was trained, in a sentence."""
    losses = [line["loss"] for line in matching(lines, "step")]
    tenth = max(len(losses) // 10, 1)
    first, last = (sum(some) / tenth for some in (losses[:tenth], losses[-tenth:]))
    (run,) = matching(lines, "run")
    return (
        f"{subject(lines)}, {len(losses)} steps of {run['configuration']['length']} tokens: the loss went from "
        f"{first:.2f} to {last:.2f} (means of the first and last tenth of the steps)."
    )


def fine_tune_tables(lines: Sequence[Line]) -> list[Table]:
    """Acceptance by weights, copies and bits."""
    found = matching(lines, "acceptance")
    rows = []
    for weights, copy in dict.fromkeys((line["weights"], line["copy"]) for line in found):
        row = {"the model": f"{weights} training", "drafts are made with copies of": copy}
        for line in found:
            if (line["weights"], line["copy"]) == (weights, copy):
                row[f"accepted in {line['bits']} bits"] = f"{line['accepted'] / line['drafted']:.3f}"
        rows.append(row)
    return [Table.of("fine_tune", "Drafts that are accepted", rows)]
