"""The picture of a busy machine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from bench.experiments.busy.busy_tables import busy_levels, busy_share
from bench.record import Line
from bench.report.figures import COLOURS, REFERENCE, curves


def busy_curves(lines: Sequence[Line]) -> Figure:
    """The share of its quiet speed that each engine keeps, over busy processes per core, and a fair share."""
    figure, axes = curves("busy processes per core", "share of the quiet speed")
    levels = busy_levels(lines)
    for colour, (name, label) in zip(COLOURS, lines[0]["engines"].items()):
        shares = [busy_share(lines, name, level) for level in levels]
        axes.plot(levels, [np.nan if share is None else share for share in shares], "o-", color=colour, label=label)
    axes.plot(levels, [1 / (level + 1) for level in levels], "--", color=REFERENCE, linewidth=0.8, label="fair share")
    axes.set_xticks(levels)
    axes.set_ylim(0, 1.05)
    axes.legend(frameon=False, fontsize=8)
    return figure
