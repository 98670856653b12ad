"""The tables of exit adapters: what each form makes of each exit, of auto, and of the clock."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from bench.record import Line
from bench.report.table import Table, number, subject

_FORMS = {"none": "no adapter", "low_rank": "low rank", "steered": "low rank, steered", "layer": "light layer"}


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
    if not found:
        return "-"
    middle = f"{median(found):.3f}"
    return middle if len(found) == 1 else f"{middle} ({min(found):.3f} to {max(found):.3f})"
