"""The pictures of a report, as matplotlib figures: speed-ups, phases, agreement per layer, rounds, a sweep's heat map.

Colours are Okabe and Ito's, which colour-blind readers can tell apart.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bench.grid import grid_lines, mean_agreement
from bench.record import Line
from bench.run_tables import PLAIN
from bench.summary import Samples

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
_OURS, _PEERS, _REFERENCE = _COLOURS[0], _COLOURS[7], "#000000"
_WIDTH = 5.2  # inches; the page scales it: so narrow that its text can be read on a phone
_ROW = 0.36  # inches per bar


def figures(lines: Sequence[Line]) -> dict[str, Figure]:
    """Title -> figure, for all that the record has lines for."""
    made: dict[str, Figure] = {}
    if lines[0]["command"] == "sweep":
        made["Speed-up over plain decoding of every setting"] = heat_map(lines)
    samples = Samples(lines)
    if PLAIN in samples.engines:
        made["Speed-up over plain decoding"] = speedup_bars(samples)
    timed = [name for name in samples.engines if samples.phase_shares(name) is not None]
    if timed:
        made["Where the time goes"] = phase_bars(samples, timed)
    agreement = _agreement(lines)
    if agreement:
        made["Agreement of early layers with the last"] = agreement_curve(agreement)
    drafting = [name for name in timed if name != PLAIN and not name.startswith("selfspec:ls:")]  # those that choose
    if drafting:
        made["Exit layers"] = histograms(samples, drafting, "rounds_by_exit_layer", "exit layer (0: no drafts)")
        made["Drafts per round"] = histograms(samples, drafting, "rounds_by_length", "tokens drafted in a round")
    return made


def svg(figure: Figure) -> str:
    """The figure as an <svg> element, its text as text, so that it scales and can be searched."""
    stream = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "selfspec", "font.family": "sans-serif"}):
        figure.savefig(stream, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def speedup_bars(samples: Samples) -> Figure:
    """A bar per engine with the lowest and highest repeat, fastest first."""
    spreads = {name: samples.speedup(name, PLAIN) for name in samples.engines}
    names = sorted(spreads, key=lambda name: spreads[name].value)
    values = [spreads[name].value for name in names]
    whiskers = [[max(s.value - s.low, 0), max(s.high - s.value, 0)] for s in (spreads[name] for name in names)]
    figure, axes = _bars(len(names))
    colours = [_OURS if name.startswith("selfspec") else _PEERS for name in names]
    axes.barh([samples.labels[name] for name in names], values, color=colours, height=0.7)
    axes.errorbar(
        values, range(len(names)), xerr=np.array(whiskers).T, fmt="none", ecolor="#444444", capsize=2, linewidth=1
    )
    for row, name in enumerate(names):
        axes.text(spreads[name].high, row, f"  {values[row]:.2f}", va="center", fontsize=9)
    axes.axvline(1, color=_REFERENCE, linewidth=0.8)
    axes.set_xlim(0, 1.12 * max(spread.high for spread in spreads.values()))
    axes.set_xlabel("tokens/s over plain decoding's; lines: all repeats", fontsize=9)
    return figure


def phase_bars(samples: Samples, engines: Sequence[str]) -> Figure:
    """Each engine's time by phase, in shares of its own."""
    figure, axes = _bars(len(engines), extra=0.5)
    left = np.zeros(len(engines))
    labels = [samples.labels[name] for name in engines][::-1]
    shares = [samples.phase_shares(name) or {} for name in engines][::-1]
    for colour, phase in zip(_COLOURS, samples.phases()):
        widths = np.array([100 * share[phase] for share in shares])
        axes.barh(labels, widths, left=left, color=colour, height=0.7, label=phase)
        left += widths
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the time of all runs")
    axes.legend(
        ncols=len(samples.phases()),
        loc="lower center",
        bbox_to_anchor=(0.35, 1.0),
        frameon=False,
        fontsize=8,
        columnspacing=0.8,
        handlelength=1,
    )
    return figure


def agreement_curve(agreement: Sequence[float | None]) -> Figure:
    """Share of positions where a layer's argmax is the last layer's, over layers."""
    figure = Figure(figsize=(_WIDTH, 2.8))
    axes = figure.add_subplot()
    layers = range(1, len(agreement) + 1)
    axes.plot(layers, [np.nan if value is None else value for value in agreement], marker="o", color=_OURS)
    axes.set_xlim(0.5, len(agreement) + 0.5)
    axes.set_ylim(0, 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("exit layer")
    axes.set_ylabel("agrees with the last layer")
    axes.grid(axis="y", alpha=0.3)
    _bare(axes)
    return figure


def histograms(samples: Samples, engines: Sequence[str], counts: str, label: str) -> Figure:
    """Shares of rounds per engine, small panels with one scale; `counts` is the statistics' field."""
    columns = 2
    rows = -(-len(engines) // columns)
    figure = Figure(figsize=(_WIDTH, 1.5 * rows + 0.4))
    every = [_rounds(samples, name, counts) for name in engines]
    last = max(int(key) for count in every for key in count)
    for number, (name, count) in enumerate(zip(engines, every)):
        axes = figure.add_subplot(rows, columns, number + 1)
        total = sum(count.values())
        axes.bar(range(last + 1), [100 * count.get(str(key), 0) / total for key in range(last + 1)], color=_OURS)
        axes.set_title(samples.labels[name].removeprefix("selfspec, "), fontsize=9)
        axes.set_ylabel("% of rounds", fontsize=8)
        axes.set_xlim(-0.6, last + 0.6)
        axes.tick_params(labelsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if number >= len(engines) - columns:
            axes.set_xlabel(label, fontsize=8)
        _bare(axes)
    figure.tight_layout()
    return figure


def heat_map(lines: Sequence[Line]) -> Figure:
    """A sweep's speed-ups over exit layer and length; bold what was measured, the rest predicted."""
    cells = {(line["exit_layer"], line["num_speculations"]): line for line in lines if line["kind"] == "cell"}
    layers, lengths = (sorted({key[axis] for key in cells}) for axis in (0, 1))
    samples = Samples(lines)
    values = np.zeros((len(layers), len(lengths)))
    figure = Figure(figsize=(_WIDTH, 0.42 * len(layers) + 1.1))
    axes = figure.add_subplot()
    for row, layer in enumerate(layers):
        for column, length in enumerate(lengths):
            line = cells[layer, length]
            engine = f"selfspec:{line['policy']}"
            measured = engine in samples.engines
            values[row, column] = samples.speedup(engine, PLAIN).value if measured else line["predicted_speedup"]
            weight = "bold" if measured else "normal"
            axes.text(column, row, f"{values[row, column]:.2f}", ha="center", va="center", fontsize=8, weight=weight)
    image = axes.imshow(values, cmap="YlGn", aspect="auto")
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    axes.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    axes.set_xlabel("drafts a round (bold: measured, the rest predicted)")
    axes.set_ylabel("exit layer")
    figure.colorbar(image, ax=axes)
    return figure


def _bars(count: int, extra: float = 0.0) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, _ROW * count + 0.8 + extra))
    axes = figure.add_subplot()
    axes.tick_params(axis="y", length=0, labelsize=9)
    _bare(axes)
    return figure, axes


def _bare(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _rounds(samples: Samples, engine: str, counts: str) -> Counter[str]:
    """Rounds of an engine's first repeat over all prompts, by exit layer or length."""
    total: Counter[str] = Counter()
    for line in samples.samples:
        if line["engine"] == engine and line["repeat"] == 0:
            total.update(line["stats"].get(counts, {}))
    return total


def _agreement(lines: Sequence[Line]) -> list[float | None]:
    grid = grid_lines(lines)
    if grid:
        return mean_agreement(grid)
    return next((line["by_layer"] for line in lines if line["kind"] == "agreement"), [])
