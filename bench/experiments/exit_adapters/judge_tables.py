"""The tables of `judge-exits`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from bench.experiments.exit_adapters.draft_rows import agreement_needed, gain_at, with_draft_head
from bench.experiments.exit_adapters.judged_exits import WANTED
from bench.record import Line, matching
from bench.report.table import Table, number, subject
from policies import MeasuredCost

SUPPOSED = 0.4
"""An agreement that adapters of SmolLM2 reach at best."""
_TIMES = {item.name for item in fields(MeasuredCost)}


def judged_headline(lines: Sequence[Line]) -> str:
    """The best exit with the whole head, in a sentence."""
    whole = max(line["rows"] for line in matching(lines, "head"))
    best = max(matching(lines, "exit", rows=whole), key=lambda line: line["gain"])
    return (
        f"{subject(lines)}. Best exit: {best['exit_layer']} ({best['exits']}), {best['num_speculations']} drafts a round, "
        f"{best['gain']:.2f} times plain decoding's tokens per measured cost."
    )


def judged_tables(lines: Sequence[Line]) -> list[Table]:
    """Exits with the whole head, draft heads, and what was measured."""
    heads = {line["rows"]: line for line in matching(lines, "head")}
    whole = max(heads)
    tables = [
        Table.of(
            "judged_exits",
            "Exits on the model's own answers",
            [
                {
                    "exit": str(line["exit_layer"]),
                    "adapter": "yes" if line["exits"] == "adapted" else "no",
                    "agreement": f"{line['agreement']:.2f}",
                    "drafts a round": str(line["num_speculations"]),
                    "accepted of them": f"{line['accepted']:.2f}",
                    "tokens per layer": f"{line['gain_by_layers']:.2f}",
                    "tokens per measured cost": f"{line['gain']:.2f}",
                    "agreement needed for 1.1": number(line["agreement_needed"], "{:.2f}"),
                }
                for line in matching(lines, "exit", rows=whole)
            ],
        )
    ]
    cost = MeasuredCost.from_dict(
        {name: value for name, value in matching(lines, "cost")[-1].items() if name in _TIMES}
    )
    prices = {size: with_draft_head(cost, heads[whole]["seconds"], head["seconds"]) for size, head in heads.items()}
    layers = sorted({line["exit_layer"] for line in matching(lines, "exit")})
    names = {size: f"{size:,} rows" if size < whole else f"all {size:,} rows" for size in heads}
    shares = [
        {
            "draft head": names[size],
            "tokens of other answers among them": f"{head['coverage']:.3f}",
            "price in layers": f"{(cost.head_seconds[0] + prices[size].draft_seconds) / cost.layer_seconds[0]:.1f}",
        }
        for size, head in heads.items()
    ]
    needed = [
        {"exit": str(layer)}
        | {names[size]: number(agreement_needed(layer, price, WANTED), "{:.2f}") for size, price in prices.items()}
        for layer in layers
    ]
    supposed = [
        {"exit": str(layer)} | {names[size]: f"{gain_at(SUPPOSED, layer, price):.2f}" for size, price in prices.items()}
        for layer in layers
    ]
    tables += [
        Table.of("judged_heads", "Draft heads over the likeliest tokens", shares),
        Table.of("judged_needed", f"Agreement at which an exit gains {WANTED}, by draft head", needed),
        Table.of("judged_supposed", f"Tokens per measured cost at an agreement of {SUPPOSED}, by draft head", supposed),
    ]
    speeds = matching(lines, "speed")
    if speeds:
        auto = {line["exits"]: line for line in matching(lines, "auto")}
        tables.append(
            Table.of(
                "judged_speed",
                "Measured, the runs taking turns",
                [
                    {
                        "policy": line["policy"],
                        "adapters": "yes" if line["exits"] == "adapted" else "no",
                        "tokens/s": f"{line['tokens_per_second']:.0f}",
                        "over plain": f"{line['over_plain']:.2f}",
                        "tokens per layer": number(
                            auto[line["exits"]]["gain"] if line["policy"] == "auto:copy=off" else None, "{:.2f}"
                        ),
                    }
                    for line in speeds
                ],
            )
        )
    return tables
