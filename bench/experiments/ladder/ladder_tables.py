"""The tables of the ladder: the checkpoints, the policies on each, the claims of papers on each, and how orders change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from bench.experiments.ladder.orders import Order, correlation, exchanged, looping_prompts, order_of
from bench.record import Line, matching
from bench.report.table import UNKNOWN, Table, counted, cross_table, names, number

_KEEPING = "DEL, as its text says"
CLAIMS = (
    ("DEL", "LayerSkip"), (_KEEPING, "LayerSkip"), (_KEEPING, "finite state"), (_KEEPING, "Draft & Verify"),
    (_KEEPING, "DEL"), ("finite state", "LayerSkip"), ("LayerSkip", "Draft & Verify"), ("SPIDE", "LayerSkip"),
    ("SPIDE", "SVIP"), ("SPIDE", "Draft & Verify"), ("ours", "SPIDE"),
)  # fmt: skip
"""Pairs of rules of which a paper puts the first ahead: DEL's table 1, SPIDE's table 5; and ours."""


def ladder_headline(lines: Sequence[Line]) -> str:
    """What was measured, in a sentence or two."""
    about, rungs = lines[0]["configuration"], _rung_lines(lines)
    where = lines[0]["provenance"]
    spread = f" ({rungs[0]['rung']} to {rungs[-1]['rung']})" if len(rungs) > 1 else ""
    return (
        f"{counted(len(rungs), 'checkpoint')}{spread} in {where['dtype']} on {where['cpu']}, greedy."
        f" {counted(rungs[0]['texts'], 'prompt')} scored on each; settings chosen for each on"
        f" {counted(len(about['tuning_prompts']), 'other')} by tokens per layer."
    )


def ladder_tables(lines: Sequence[Line]) -> list[Table]:
    """All tables; those of texts without loops where some checkpoint has enough of them."""
    rungs = [line["rung"] for line in _rung_lines(lines)]
    loops = {rung: looping_prompts(lines, rung) for rung in rungs}
    everything = {rung: order_of(lines, rung) for rung in rungs}
    free = {rung: order_of(lines, rung, loops[rung]) for rung in rungs}
    tables = [_rungs(lines), _settings(lines, rungs)]
    order = "Tokens per layer over plain decoding's; in brackets the place in this order"
    tables += _orders(everything, "", order, "")
    tables += _orders(free, "_free", order, " Texts that never loop")
    if len(rungs) > 1:
        tables.append(_changes(lines, loops))
    return tables


def _rung_lines(lines: Sequence[Line]) -> list[Line]:
    """In the order of the checkpoints; a record that was resumed may have another."""
    order = lines[0]["configuration"]["rungs"]
    return sorted(matching(lines, "rung"), key=lambda line: int(order.index(line["rung"])))


def _rungs(lines: Sequence[Line]) -> Table:
    rows = []
    for line in _rung_lines(lines):
        layers = line["num_layers"]
        exits = {"1": 1, "L/4": max(layers // 4, 1)}
        cells = {"checkpoint": line["rung"], "loss": number(line["loss"][-1] if line["loss"] else None, "{:.3f}")}
        for field, what in (
            ("agreement", "held-out text"),
            ("own_agreement", "own text"),
            ("own_agreement_free", "own text without loops"),
        ):
            for name, layer in exits.items():
                found = None if line[field] is None else line[field][layer - 1]
                cells[f"{what}, exit {name}"] = number(found, "{:.2f}")
        cells["texts that loop"] = number(line["looping"] / line["texts"], "{:.2f}")
        rows.append(cells)
    title = "The checkpoints: loss of the last layer on held-out text, and agreement of two exits with it"
    return Table.of("ladder_rungs", title, rows)


def _settings(lines: Sequence[Line], rungs: Sequence[str]) -> Table:
    chosen = {(line["rule"], line["rung"]): line["policy"] for line in matching(lines, "chosen")}
    rules = names(dict.fromkeys(rule for rule, _ in chosen))
    return cross_table(
        "ladder_settings",
        "The settings that were chosen on other prompts",
        "rule",
        rules,
        names(rungs),
        lambda rule, rung: f"`{chosen[rule, rung]}`",
    )


def _orders(orders: Mapping[str, Order | None], ending: str, title: str, of: str) -> list[Table]:
    """The policies, the best on the last checkpoint first, and the pairs of `CLAIMS`; dashes where there is no order."""
    known = {rung: order for rung, order in orders.items() if order is not None}
    if not known:
        return []
    rates = {rung: order.rates() for rung, order in known.items()}
    last = rates[list(known)[-1]]
    places = {rung: sorted(found, key=lambda rule: -found[rule]) for rung, found in rates.items()}
    columns = {
        rung: rung if order is None else f"{rung}: {counted(len(order.prompts), 'text')}"
        for rung, order in orders.items()
    }

    def value(rule: str, rung: str) -> str:
        return f"{rates[rung][rule]:.3f} ({places[rung].index(rule) + 1})" if rung in rates else UNKNOWN

    def claim(pair: tuple[str, str], rung: str) -> str:
        return known[rung].ratio(*pair) if rung in known else UNKNOWN

    pairs = {pair: f"{pair[0]} / {pair[1]}" for pair in CLAIMS if set(pair) <= last.keys()}
    ordered = names(sorted(last, key=lambda rule: -last[rule]))
    return [
        cross_table(f"ladder_order{ending}", f"{title}.{of}".rstrip("."), "rule", ordered, columns, value),
        cross_table(
            f"ladder_claims{ending}",
            f"One rule's tokens per layer over another's; in brackets 95 % intervals over prompts.{of}".rstrip("."),
            "rules",
            pairs,
            columns,
            claim,
        ),
    ]


def _changes(lines: Sequence[Line], loops: Mapping[str, set[str]]) -> Table:
    rows = []
    pairs = [*pairwise(loops)]
    if len(loops) > 2:
        pairs.append((next(iter(loops)), list(loops)[-1]))
    for first, second in pairs:
        cells = {"from": first, "to": second}
        for what, without in (
            ("all texts", frozenset[str]()),
            ("texts that loop on neither", loops[first] | loops[second]),
        ):
            both = order_of(lines, first, without), order_of(lines, second, without)
            one, other = both
            if one is None or other is None:
                cells |= {what: UNKNOWN, f"{what}: pairs exchanged": UNKNOWN}
                continue
            cells[what] = correlation(one, other)
            cells[f"{what}: pairs exchanged"] = "{} of {}".format(*exchanged(one, other))
        rows.append(cells)
    title = (
        "Rank correlation (Spearman) of the policies' tokens per layer on two checkpoints; in brackets 95 % intervals"
    )
    return Table.of("ladder_ranks", title, rows)
