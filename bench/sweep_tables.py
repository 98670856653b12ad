"""The tables of a sweep: eTPL by replay, speed-ups predicted and measured, agreement of the layers."""

from __future__ import annotations

from collections.abc import Sequence

from bench.record import Line
from bench.summary import Samples
from bench.table import Table, heat_table, number


def sweep_tables(lines: Sequence[Line]) -> list[Table]:
    """All of them."""
    return [_etpl_table(lines), _speedup_table(lines), _agreement_table(lines)]


def _grid(lines: Sequence[Line]) -> tuple[list[int], list[int], dict[tuple[int, int], Line]]:
    cells = {(line["exit_layer"], line["num_speculations"]): line for line in lines if line["kind"] == "cell"}
    return sorted({key[0] for key in cells}), sorted({key[1] for key in cells}), cells


def _etpl_table(lines: Sequence[Line]) -> Table:
    layers, lengths, cells = _grid(lines)
    num_layers = lines[0]["configuration"]["num_layers"]
    values = {key: line["etpl"] for key, line in cells.items()}
    return heat_table(
        "etpl",
        f"eTPL by replay (autoregressive: {1 / num_layers:.4f}); rows: exit layer, columns: drafts a round",
        layers,
        lengths,
        {key: f"{value:.3f}" for key, value in values.items()},
        values,
    )


def _speedup_table(lines: Sequence[Line]) -> Table:
    layers, lengths, cells = _grid(lines)
    samples = Samples(lines)
    texts, values = {}, {}
    for key, line in cells.items():
        engine = f"selfspec:{line['policy']}"
        if engine in samples.engines:
            values[key] = samples.speedup(engine, "selfspec:ar").value
            texts[key] = f"**{values[key]:.2f}**"
        else:
            values[key] = line["predicted_speedup"]
            texts[key] = f"{values[key]:.2f}"
    return heat_table(
        "speedup",
        "Speed-up over autoregressive; rows: exit layer, columns: drafts a round; bold is measured (prefill included), the "
        "rest predicted (decoding only) from replayed rounds and timed layers",
        layers,
        lengths,
        texts,
        values,
    )


def _agreement_table(lines: Sequence[Line]) -> Table:
    by_layer = next(line["by_layer"] for line in lines if line["kind"] == "agreement")
    return Table(
        name="agreement",
        title="Agreement of each exit layer with the last, along the model's own greedy text",
        columns=("after", *(str(layer) for layer in range(1, len(by_layer) + 1))),
        rows=(("agrees", *(number(value, "{:.2f}").removeprefix("0") for value in by_layer)),),
    )
