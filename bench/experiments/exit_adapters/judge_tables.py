"""The tables of `judge-exits`."""

from __future__ import annotations

from collections.abc import Sequence

from bench.record import Line, matching
from bench.report.table import UNKNOWN, Table, number, subject


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
    costs = {line["exits"]: line for line in matching(lines, "cost")}
    layer_seconds = next(iter(costs.values()))["layer_seconds"][0]
    last = [*costs][-1]
    rows = []
    for size, head in heads.items():
        found = matching(lines, "exit", rows=size, exits=last)
        best = max(found, key=lambda line: line["gain"])
        needed = [line["agreement_needed"] for line in found if line["agreement_needed"] is not None]
        rows.append(
            {
                "rows of the draft head": f"{size:,}",
                "answer tokens among them": f"{head['coverage']:.3f}",
                "ms": f"{1e3 * head['seconds']:.2f}",
                "in layers": f"{head['seconds'] / layer_seconds:.1f}",
                "best exit": str(best["exit_layer"]),
                "agreement": f"{best['agreement']:.2f}",
                "tokens per measured cost": f"{best['gain']:.2f}",
                "lowest agreement needed for 1.1": f"{min(needed):.2f}" if needed else UNKNOWN,
            }
        )
    tables.append(Table.of("judged_heads", "Draft heads over the likeliest tokens, counted", rows))
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
