"""The plots of a report, as matplotlib figures: speed-ups, a sweep's heat map, speed over the context.

Colours are Okabe and Ito's, which colour-blind readers can tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.record import PLAIN, Line
from bench.report.context_tables import ROLES, seconds_per_token
from bench.report.summary import Samples, Spread
from bench.report.sweep_tables import Sweep

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
_OURS, _PEERS, _REFERENCE = _COLOURS[0], _COLOURS[7], "#000000"
_WIDTH = 5.2  # inches: so narrow that its text can be read on a phone
_ROW = 0.28  # inches per bar
_FONT = 9  # points


def figures(lines: Sequence[Line]) -> dict[str, Figure]:
    """The figures of a record, by title. None for a command that has none."""
    with rc_context({"font.size": _FONT}):
        if lines[0]["command"] == "context":
            return {"Speed over the length of the context": context_curves(lines)}
        if lines[0]["command"] == "sweep":
            sweep = Sweep.of(lines)
            return {"Speed-up of every setting": heat_map(sweep)} if len(sweep.axes) == 2 else {}
        samples = Samples(lines)
        return {"Speed-up over plain decoding": speedup_bars(samples)} if PLAIN in samples.engines else {}


def write_plots(lines: Sequence[Line], name: str, folder: Path) -> dict[str, str]:
    """Write a record's figures as SVG to folder/plots; returns their paths from the folder, by title."""
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    paths: dict[str, str] = {}
    # Text as text, so that it scales and can be searched; nothing random or dated.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "selfspec", "font.family": "sans-serif"}):
        for title, figure in figures(lines).items():
            paths[title] = f"plots/{name}-{title.lower().replace(' ', '-').replace(chr(39), '')}.svg"
            about = {"Date": None, "Creator": None}
            figure.savefig(folder / paths[title], format="svg", bbox_inches="tight", metadata=about)
    return paths


def speedup_bars(samples: Samples) -> Figure:
    """A bar per engine, fastest first, with a line from the lowest to the highest repeat."""
    spreads = {name: samples.speedup(name, PLAIN) for name in samples.engines}
    names = sorted(spreads, key=lambda name: spreads[name].value)
    values = [spreads[name].value for name in names]
    whiskers = _whiskers([spreads[name] for name in names])
    figure, axes = _bars(len(names))
    colours = [_OURS if name.startswith("selfspec") else _PEERS for name in names]
    axes.barh([samples.labels[name] for name in names], values, color=colours, height=0.7)
    axes.errorbar(values, range(len(names)), xerr=whiskers, fmt="none", ecolor="#444444", capsize=2, linewidth=1)
    for row, name in enumerate(names):
        _beside(axes, spreads[name].high, row, f"{values[row]:.2f}")
    axes.axvline(1, color=_REFERENCE, linewidth=0.8)
    axes.set_xlim(0, 1.12 * max(spread.high for spread in spreads.values()))
    axes.set_xlabel("tokens/s relative to plain decoding; thin lines: range of the repeats", fontsize=9)
    return figure


def heat_map(sweep: Sweep) -> Figure:
    """A sweep's speed-ups over two axes; bold what was measured, the rest predicted."""
    (down, rows), (across, columns) = sweep.axes.items()
    values = np.array([[sweep.speedup((row, column)) for column in columns] for row in rows])
    figure = Figure(figsize=(_WIDTH, 0.42 * len(rows) + 1.1))
    axes = figure.add_subplot()
    for row, first in enumerate(rows):
        for column, second in enumerate(columns):
            weight = "bold" if (first, second) in sweep.measured else "normal"
            axes.text(column, row, f"{values[row, column]:.2f}", ha="center", va="center", fontsize=8, weight=weight)
    image = axes.imshow(values, cmap="YlGn", aspect="auto")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel(f"{across} (bold: measured, the rest predicted)")
    axes.set_ylabel(down)
    figure.colorbar(image, ax=axes)
    return figure


def context_curves(lines: Sequence[Line]) -> Figure:
    """tokens/s after the first token over the context, a line per way of decoding."""
    figure, axes = _curves("tokens of context", "tokens/s")
    contexts = list(dict.fromkeys(line["context"] for line in lines if line["kind"] == "prefill"))
    for colour, role in zip(_COLOURS, ROLES):
        speeds = [1 / seconds_per_token(lines, context, role) for context in contexts]
        axes.plot(contexts, speeds, marker="o", color=colour, label=role)
    theirs = [line for line in lines if line["kind"] == "transformers"]
    if theirs:
        speeds = [line["tokens"] / line["seconds"] for line in theirs]
        axes.plot([line["context"] for line in theirs], speeds, marker="o", color=_PEERS, label="transformers")
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [str(context) for context in contexts])
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    return figure


def _curves(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    """An empty picture for lines over an axis."""
    figure = Figure(figsize=(_WIDTH, 2.8))
    axes = figure.add_subplot()
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    _bare(axes)
    return figure, axes


def _bars(count: int, extra: float = 0.0) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, _ROW * count + 0.8 + extra))
    axes = figure.add_subplot()
    axes.tick_params(axis="y", length=0, labelsize=9)
    _bare(axes)
    return figure, axes


def _whiskers(spreads: Sequence[Spread]) -> np.ndarray:
    """[2, values]: how far the lowest and the highest repeat are from each value."""
    return np.array([[max(s.value - s.low, 0), max(s.high - s.value, 0)] for s in spreads]).T


def _beside(axes: Axes, value: float, row: int, text: str) -> None:
    """Text to the right of a bar's end. Spaces would not do: a browser drops them."""
    axes.annotate(text, (value, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)


def _bare(axes: Axes) -> None:
    """Without a frame above and to the right."""
    axes.spines[["top", "right"]].set_visible(False)
