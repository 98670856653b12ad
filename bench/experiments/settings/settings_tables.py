"""The table of published settings beside ours: tokens per layer over plain decoding's, with intervals over prompts."""

from __future__ import annotations

from collections.abc import Sequence

from bench.experiments.spide.spide_tables import interval
from bench.record import Line, matching
from bench.report.table import Table, counted, subject


def settings_headline(lines: Sequence[Line]) -> str:
    """How settings were chosen and scored, in a sentence or two."""
    about = lines[0]["configuration"]
    how = f"sampled at temperature {about['temperature']:g}" if about["temperature"] else "greedy"
    scored = {line["prompt"] for line in matching(lines, "score")}
    return (
        f"{subject(lines)}, {how}. {counted(len(scored), 'prompt')} scored; settings chosen on"
        f" {counted(len(about['tuning_prompts']), 'other')} by tokens per layer."
    )


def settings_tables(lines: Sequence[Line]) -> list[Table]:
    """All policies, the best first; and, where some texts end in a loop, the same on the others."""
    scores = matching(lines, "score")
    loops = {line["prompt"] for line in scores if line["looping"]}
    free = [line for line in scores if line["prompt"] not in loops]
    layers = lines[0]["configuration"]["num_layers"]
    prompts = len({line["prompt"] for line in scores})
    tables = [_table("settings", f"Tokens per layer over plain decoding's, {prompts} prompts", scores, layers)]
    if free and loops:
        rest = len({line["prompt"] for line in free})
        tables.append(
            _table("settings_free", f"The same on the {rest} prompts whose texts never end in a loop", free, layers)
        )
    return tables


def _rate(lines: Sequence[Line]) -> float:
    return float(sum(line["tokens"] for line in lines) / sum(line["layers"] for line in lines))


def _table(name: str, title: str, scores: Sequence[Line], num_layers: int) -> Table:
    tasks = sorted({line["task"] for line in scores})
    keys = dict.fromkeys((line["rule"], line["settings"], line["policy"]) for line in scores)
    found = {key: matching(scores, "score", rule=key[0], settings=key[1], policy=key[2]) for key in keys}
    base = next(own for key, own in found.items() if key[2] == "del")
    rows = []
    for (rule, settings, policy), own in sorted(found.items(), key=lambda item: -_rate(item[1])):
        low, high = interval(own, base, "layers")
        by_task = {task: _rate([line for line in own if line["task"] == task]) * num_layers for task in tasks}
        accepted = sum(line["accepted"] for line in own) / max(sum(line["drafted"] for line in own), 1)
        rows.append(
            {
                "policy": f"`{policy}`",
                "rule": rule,
                "settings": settings or "–",
                **{task: f"{value:.3f}" for task, value in by_task.items()},
                "all": f"{_rate(own) * num_layers:.3f}",
                "over del": "1.00" if policy == "del" else f"{_rate(own) / _rate(base):.2f} ({low:.2f} to {high:.2f})",
                "acceptance": f"{accepted:.2f}",
            }
        )
    return Table.of(name, title, rows)
