"""The tables of a sweep: eTPL, speed-ups predicted and measured, agreement of the layers; a heat map where two axes vary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.record import Line
from bench.report.summary import Samples, Spread
from bench.report.table import UNKNOWN, Table, heat_table, number, times


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A record's cells by their values on the axes that vary. axes: name -> values in the order of the grid.

    measured: of a cell that was timed, its speed-up over plain decoding.
    """

    axes: dict[str, list[str]]
    cells: dict[tuple[str, ...], Line]
    measured: dict[tuple[str, ...], Spread]

    @classmethod
    def of(cls, lines: Sequence[Line]) -> Sweep:
        """From a sweep's lines."""
        samples = Samples(lines)
        cells = [line for line in lines if line["kind"] == "cell"]
        grid = {name: values for name, values in lines[0]["configuration"]["axes"].items() if len(values) > 1}
        by_place = {tuple(line["values"][name] for name in grid): line for line in cells}
        measured = {
            place: samples.speedup(f"selfspec:{line['policy']}", "selfspec:ar")
            for place, line in by_place.items()
            if f"selfspec:{line['policy']}" in samples.engines
        }
        return cls(axes=grid, cells=by_place, measured=measured)

    def speedup(self, place: tuple[str, ...]) -> float:
        """Measured where it was, else predicted."""
        spread = self.measured.get(place)
        return float(self.cells[place]["predicted_speedup"]) if spread is None else spread.value


def sweep_headline(lines: Sequence[Line]) -> str:
    """The best measured setting, and whether the timed runs had the rounds that were predicted."""
    model = lines[0]["configuration"]["model"]
    best = next(line for line in lines if line["kind"] == "best")
    spread = times(Spread(value=best["speedup"], low=best["low"], high=best["high"]))
    replayed = next(line for line in lines if line["kind"] == "replay")
    source = "the replay" if replayed["replayed"] else "the first one"
    pairs = f"{replayed['compared'] - len(replayed['differing'])} of {replayed['compared']}"
    return (
        f"Best measured setting for {model}: `{best['policy']}`, {spread} its own autoregressive mode. "
        f"The timed runs had exactly the rounds of {source} for {pairs} pairs of setting and prompt."
    )


def sweep_tables(lines: Sequence[Line]) -> list[Table]:
    """All of them."""
    sweep = Sweep.of(lines)
    two = len(sweep.axes) == 2
    grids = [_etpl_table(lines, sweep), _speedup_table(sweep)] if two else [_cell_table(lines, sweep)]
    return [*grids, *_agreement_table(lines)]


def _axes_text(sweep: Sweep) -> str:
    down, across = sweep.axes
    return f"rows: {down}, columns: {across}"


def _how(lines: Sequence[Line]) -> str:
    return "by replay" if all(line["replayed"] for line in lines if line["kind"] == "cell") else "of one run"


def _etpl_table(lines: Sequence[Line], sweep: Sweep) -> Table:
    num_layers = lines[0]["configuration"]["num_layers"]
    values = {place: line["etpl"] for place, line in sweep.cells.items()}
    return heat_table(
        "etpl",
        f"eTPL {_how(lines)} (autoregressive: {1 / num_layers:.4f}); {_axes_text(sweep)}",
        sweep.axes,
        {place: f"{value:.3f}" for place, value in values.items()},
        values,
    )


def _speedup_table(sweep: Sweep) -> Table:
    values = {place: sweep.speedup(place) for place in sweep.cells}
    return heat_table(
        "speedup",
        f"Speed-up over autoregressive; {_axes_text(sweep)}; bold is measured (prefill included), the rest predicted "
        "(decoding only) from rounds and timed layers",
        sweep.axes,
        {place: f"**{value:.2f}**" if place in sweep.measured else f"{value:.2f}" for place, value in values.items()},
        values,
    )


def _cell_table(lines: Sequence[Line], sweep: Sweep) -> Table:
    """A row per cell, where not just two axes vary: in the grid's order for one, else the best prediction first."""
    places = list(sweep.cells)
    if len(sweep.axes) == 1:
        order = next(iter(sweep.axes.values()))
        places.sort(key=lambda place: order.index(place[0]))
    rows = []
    for place in places:
        line = sweep.cells[place]
        spread = sweep.measured.get(place)
        rows.append(
            (
                f"`{line['policy']}`",
                number(line["acceptance_rate"], "{:.3f}"),
                number(line["tokens_per_round"], "{:.2f}"),
                number(line["etpl"], "{:.4f}"),
                f"{line['predicted_speedup']:.2f}",
                UNKNOWN if spread is None else times(spread),
            )
        )
    return Table(
        name="cells",
        title=f"The grid over {', '.join(sweep.axes) or 'one setting'}: rounds {_how(lines)}, speed-up over autoregressive "
        "predicted (decoding only) and measured (prefill included)",
        columns=("policy", "acceptance rate", "tokens/round", "eTPL", "predicted", "measured"),
        rows=tuple(rows),
    )


def _agreement_table(lines: Sequence[Line]) -> list[Table]:
    agreement = next((line["by_layer"] for line in lines if line["kind"] == "agreement"), None)
    if agreement is None:
        return []
    table = Table(
        name="agreement",
        title="Agreement of each exit layer with the last, along the model's own greedy text",
        columns=("after", *(str(layer) for layer in range(1, len(agreement) + 1))),
        rows=(("agrees", *(number(value, "{:.2f}").removeprefix("0") for value in agreement)),),
    )
    return [table]
