"""The tables of a sweep: eTPL, speed-ups predicted and measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.record import Line, matching
from bench.report.summary import Samples, Spread
from bench.report.table import UNKNOWN, Table, cross_table, names, number, times


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
        grid = {name: values for name, values in lines[0]["configuration"]["axes"].items() if len(values) > 1}
        by_place = {tuple(line["values"][name] for name in grid): line for line in matching(lines, "cell")}
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
    """Name the best measured setting."""
    model, best = lines[0]["configuration"]["model"], matching(lines, "best")[0]
    spread = times(Spread(value=best["speedup"], low=best["low"], high=best["high"]))
    return f"Best measured setting for {model}: `{best['policy']}`, {spread} its own autoregressive mode."


def sweep_tables(lines: Sequence[Line]) -> list[Table]:
    """All of them."""
    sweep = Sweep.of(lines)
    two = len(sweep.axes) == 2
    return [_etpl_table(lines, sweep), _speedup_table(sweep)] if two else [_cell_table(lines, sweep)]


def _how(lines: Sequence[Line]) -> str:
    return "by replay" if all(line["replayed"] for line in matching(lines, "cell")) else "of one run"


def _etpl_table(lines: Sequence[Line], sweep: Sweep) -> Table:
    title = f"eTPL {_how(lines)} (autoregressive: {1 / lines[0]['configuration']['num_layers']:.4f})"
    return _grid("etpl", title, sweep, lambda *place: f"{sweep.cells[place]['etpl']:.3f}")


def _speedup_table(sweep: Sweep) -> Table:
    def cell(*place: str) -> str:
        value = f"{sweep.speedup(place):.2f}"
        return f"**{value}**" if place in sweep.measured else value

    title = (
        "Speed-up over autoregressive; bold is measured (prefill included), the rest predicted (decoding only) from rounds "
        "and timed layers"
    )
    return _grid("speedup", title, sweep, cell)


def _grid(name: str, title: str, sweep: Sweep, cell: Callable[[str, str], str]) -> Table:
    (down, rows), (across, columns) = sweep.axes.items()
    return cross_table(name, f"{title}; rows: {down}, columns: {across}", down, names(rows), names(columns), cell)


def _cell_table(lines: Sequence[Line], sweep: Sweep) -> Table:
    """Make a row per cell, unless just two axes vary: in the grid's order for one, else the best prediction first."""
    places = list(sweep.cells)
    if len(sweep.axes) == 1:
        order = next(iter(sweep.axes.values()))
        places.sort(key=lambda place: order.index(place[0]))
    rows = (
        {
            "policy": f"`{line['policy']}`",
            "acceptance rate": number(line["acceptance_rate"], "{:.3f}"),
            "tokens/round": number(line["tokens_per_round"], "{:.2f}"),
            "eTPL": number(line["etpl"], "{:.4f}"),
            "predicted": f"{line['predicted_speedup']:.2f}",
            "measured": times(sweep.measured[place]) if place in sweep.measured else UNKNOWN,
        }
        for place, line in ((place, sweep.cells[place]) for place in places)
    )
    title = (
        f"The grid over {', '.join(sweep.axes) or 'one setting'}: rounds {_how(lines)}, speed-up over autoregressive "
        "predicted (decoding only) and measured (prefill included)"
    )
    return Table.of("cells", title, rows)
