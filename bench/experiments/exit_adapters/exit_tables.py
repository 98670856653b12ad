"""The tables of exit adapters: what each form makes of each exit, of auto, and of the clock."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from bench.record import Line
from bench.report.table import UNKNOWN, Table, number, subject

_FORMS = {
    "none": "no adapter",
    "low_rank": "low rank",
    "steered": "low rank, steered",
    "steered_wide": "low rank, steered wide",
    "layer": "light layer",
}


def exits_headline(lines: Sequence[Line]) -> str:
    """The best of `auto`, in a sentence."""
    gains = {form: _middle(lines, "auto", form, weighting) for form, weighting in _arms(lines)}
    bare = _middle(lines, "auto", "none", "")
    best = max((gain for form, gain in gains.items() if gain is not None and form != "none"), default=None)
    told = "" if best is None else f", with low-rank adapters {best:.2f}"
    return (
        f"{subject(lines)}. Tokens per layer of `auto` over plain decoding: bare exits {number(bare, '{:.2f}')}{told}."
    )


def exit_tables(lines: Sequence[Line]) -> list[Table]:
    """Tokens per layer of every form, agreement, and speeds."""
    layers = sorted({line["exit_layer"] for line in lines if line["kind"] == "exit"})
    columns = ("adapter", "weights of positions", "layers per draft", *(f"exit {layer}" for layer in layers))
    tables = []
    for name, key, title, last in (
        ("gain", "gain", "Tokens per layer over plain decoding, at each exit's best draft length", ("auto",)),
        ("agreement", "agreement", "Share of the model's own tokens that an exit foretells", ()),
    ):
        rows = []
        for form, weighting in _arms(lines):
            found = [_spread(lines, "exit", form, weighting, key, layer) for layer in layers]
            auto = [_spread(lines, "auto", form, weighting, key, None)] if last else []
            share = _middle(lines, "exit", form, weighting, "adapter_layers")
            rows.append((_FORMS[form], weighting or "-", number(share, "{:.3f}"), *found, *auto))
        tables.append(Table(name=f"exits_{name}", title=title, columns=(*columns, *last), rows=tuple(rows)))
    tables += _accepted_tables(lines, layers)
    speeds = [line for line in lines if line["kind"] == "speed"]
    if speeds:
        names = list(dict.fromkeys(line["name"] for line in speeds))
        by = {(line["exits"], line["name"]): line["over_plain"] for line in speeds}
        tables.append(
            Table(
                name="exits_speed",
                title="Tokens per second over plain decoding, measured; adapters of low rank",
                columns=("exits", *names),
                rows=tuple(
                    (which, *(number(by.get((which, name)), "{:.2f}") for name in names))
                    for which in ("bare", "adapted")
                ),
            )
        )
    return tables


def _accepted_tables(lines: Sequence[Line], layers: Sequence[int]) -> list[Table]:
    """Accepted tokens of long drafts against equal weights in the same seed; what foretells them. Newer records have them."""
    tables = []
    if any("accepted" in line for line in lines) and any(line.get("weighting") == "uniform" for line in lines):
        rows = []
        for form, weighting in _arms(lines):
            if form == "none":
                continue
            cells = [_accepted(lines, form, weighting, layer) for layer in layers]
            rows.append((_FORMS[form], weighting, *cells))
        columns = ("adapter", "weights of positions", *(f"exit {layer}" for layer in layers))
        title = "Accepted tokens of drafts of 8, from every row; other weights: the gain over equal weights"
        tables.append(Table(name="exits_accepted", title=title, columns=columns, rows=tuple(rows)))
    found = [line for line in lines if line["kind"] == "correlation"]
    if found:
        foretold = [
            {
                "exit layer": str(line["exit_layer"]),
                "sum of products": f"{line['products']:.2f}",
                "sum of confidences": f"{line['sums']:.2f}",
            }
            for line in found
        ]
        title = f"Rank correlation with the accepted tokens of {found[0]['drafts']} drafts"
        tables.append(Table.of("exits_foretold", title, foretold))
    return tables


def _accepted(lines: Sequence[Line], form: str, weighting: str, layer: int) -> str:
    if weighting == "uniform":
        return _spread(lines, "exit", form, weighting, "accepted", layer)
    ours, equal = (_values(lines, "exit", form, one, "accepted", layer) for one in (weighting, "uniform"))
    return _middle_and_range([left / right for left, right in zip(ours, equal)]) if all(equal) else UNKNOWN


def _arms(lines: Sequence[Line]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((line["form"], line["weighting"]) for line in lines if line["kind"] == "exit"))


def _values(lines: Sequence[Line], kind: str, form: str, weighting: str, key: str, layer: int | None) -> list[float]:
    """Of every seed, and of every exit if none is named."""
    return [
        line[key]
        for line in lines
        if line["kind"] == kind
        and (line["form"], line["weighting"]) == (form, weighting)
        and (layer is None or line["exit_layer"] == layer)
    ]


def _middle(lines: Sequence[Line], kind: str, form: str, weighting: str, key: str = "gain") -> float | None:
    found = _values(lines, kind, form, weighting, key, None)
    return median(found) if found else None


def _spread(lines: Sequence[Line], kind: str, form: str, weighting: str, key: str, layer: int | None) -> str:
    """The median of the seeds, and how far they spread."""
    found = _values(lines, kind, form, weighting, key, layer)
    return _middle_and_range(found) if found else "-"


def _middle_and_range(values: Sequence[float]) -> str:
    middle = f"{median(values):.3f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.3f} to {max(values):.3f})"
