"""The tables of steered exits: what is accepted, tokens per layer, and both over those of unsteered adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from bench.record import Line, matching
from bench.report.table import UNKNOWN, Table, counted, subject

_FORMS = {"none": "no adapter", "low_rank": "low rank", "steered": "steered", "steered_wide": "steered, wide"}
_BASE = "low_rank"


def steered_headline(lines: Sequence[Line]) -> str:
    """What was run, in a sentence."""
    seeds = len({line["seed"] for line in matching(lines, "rounds")})
    return f"{subject(lines)}. Fixed drafts, run by the engine; medians of {seeds} seeds, in brackets their range."


def steered_tables(lines: Sequence[Line]) -> list[Table]:
    """One table for each temperature, and one of the places in a draft."""
    found = matching(lines, "rounds")
    heats = sorted({line["temperature"] for line in found})
    tables = [_table(found, heat, lines[0]["configuration"]["num_layers"]) for heat in heats]
    longest = max(line["num_speculations"] for line in found)
    if longest > 1:
        tables.append(_places([line for line in found if line["num_speculations"] == longest], longest))
    return tables


def _table(lines: Sequence[Line], heat: float, num_layers: int) -> Table:
    def per_layer(line: Line) -> float:
        return float(line["tokens"] / (line["layers"] + line["drafted"] * line["adapter_layers"]) * num_layers)

    rows = []
    for layer, length, form in _keys(lines):
        of_form = _of(lines, layer, length, form, heat)
        rows.append(
            {
                "exit, drafts": f"exit {layer}, {counted(length, 'draft')}",
                "adapter": _FORMS[form],
                "accepted": _spread(of_form, lambda line: line["accepted"] / line["drafted"]),
                "tokens per round": _spread(of_form, lambda line: line["tokens"] / line["rounds"]),
                "tokens per layer": _spread(of_form, per_layer),
                "over low rank": _over(of_form, _of(lines, layer, length, _BASE, heat), per_layer),
            }
        )
    name = "steered_greedy" if heat == 0 else f"steered_sampled_{heat:g}"
    how = "greedily" if heat == 0 else f"at temperature {heat:g}"
    return Table.of(name, f"Fixed drafts, {how}; tokens per layer over plain decoding's", rows)


def _places(lines: Sequence[Line], length: int) -> Table:
    rows = []
    for heat in sorted({line["temperature"] for line in lines}):
        for layer, _, form in _keys(lines):
            own = _of(lines, layer, length, form, heat)
            how = "greedy" if heat == 0 else f"temperature {heat:g}"
            row = {"exit": f"exit {layer}, {how}", "adapter": _FORMS[form]}
            for place in range(length):
                reached = [line for line in own if line["reached"][place]]
                row[f"draft {place + 1}"] = _text([line["held"][place] / line["reached"][place] for line in reached])
            rows.append(row)
    return Table.of(
        "steered_places", "Accepted by place in the draft, of those whose earlier drafts were accepted", rows
    )


def _keys(lines: Sequence[Line]) -> list[tuple[int, int, str]]:
    """Exit, drafts and form of each row, forms as they were run."""
    forms = [form for form in _FORMS if any(line["form"] == form for line in lines)]
    settings = sorted({(line["exit_layer"], line["num_speculations"]) for line in lines})
    return [(*setting, form) for setting in settings for form in forms]


def _of(lines: Sequence[Line], layer: int, length: int, form: str, heat: float) -> list[Line]:
    return [
        line
        for line in lines
        if (line["exit_layer"], line["num_speculations"], line["form"], line["temperature"])
        == (layer, length, form, heat)
    ]


def _spread(lines: Sequence[Line], value: Callable[[Line], float]) -> str:
    return _text([value(line) for line in lines])


def _over(lines: Sequence[Line], base: Sequence[Line], value: Callable[[Line], float]) -> str:
    """Divide by the base arm's value, seed by seed, for the seeds that both have."""
    by_seed = {line["seed"]: value(line) for line in base}
    return _text([value(line) / by_seed[line["seed"]] for line in lines if line["seed"] in by_seed])


def _text(values: Sequence[float]) -> str:
    if not values:
        return UNKNOWN
    middle = f"{median(values):.3f}"
    return middle if len({*values}) == 1 else f"{middle} ({min(values):.3f} to {max(values):.3f})"
