"""The table of SpecBound beside SPIDE: tokens per layer over plain decoding's, without and with the heads that are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.experiments.spide.spide_tables import interval
from bench.record import Line, matching
from bench.report.table import Table, counted, subject

_BASE = "SPIDE"


def bounded_headline(lines: Sequence[Line]) -> str:
    """How settings were chosen and scored, in a sentence or two."""
    about = lines[0]["configuration"]
    scored = {line["prompt"] for line in matching(lines, "score")}
    return (
        f"{subject(lines)}, greedy. {counted(len(scored), 'prompt')} scored; settings chosen on"
        f" {counted(len(about['tuning_prompts']), 'other')} by tokens per layer. A head is"
        f" {about['head_layers']:.2f} layers."
    )


def bounded_tables(lines: Sequence[Line]) -> list[Table]:
    """Each rule at its chosen settings; and, where some texts end in a loop, the same on the others."""
    scores = matching(lines, "score")
    prompts = {line["prompt"] for line in scores}
    free = [line for line in scores if line["prompt"] not in {one["prompt"] for one in scores if one["looping"]}]
    title = f"Tokens per layer over plain decoding's, {len(prompts)} prompts"
    tables = [_table("bounded", title, scores, lines[0]["configuration"])]
    if free and len(free) < len(scores):
        title = f"The same on the {len({line['prompt'] for line in free})} prompts whose texts never end in a loop"
        tables.append(_table("bounded_free", title, free, lines[0]["configuration"]))
    return tables


def _rates(head_layers: float) -> Callable[[Sequence[Line]], float]:
    def of(lines: Sequence[Line]) -> float:
        cost = sum(line["layers"] + head_layers * line["heads"] for line in lines)
        return float(sum(line["tokens"] for line in lines) / cost)

    return of


def _table(name: str, title: str, scores: Sequence[Line], about: Line) -> Table:
    found = {rule: matching(scores, "score", rule=rule) for rule in dict.fromkeys(line["rule"] for line in scores)}
    layers, with_heads = _rates(0), _rates(about["head_layers"])
    plain = 1 / about["num_layers"], 1 / (about["num_layers"] + about["head_layers"])
    base = found[_BASE]
    rows = []
    for rule, own in sorted(found.items(), key=lambda item: -layers(item[1])):
        low, high = interval(own, base, "layers")
        rows.append(
            {
                "rule": rule,
                "setting": f"`{own[0]['policy']}`",
                "tokens per layer": f"{layers(own) / plain[0]:.3f}",
                "over SPIDE": "1.00"
                if rule == _BASE
                else f"{layers(own) / layers(base):.2f} ({low:.2f} to {high:.2f})",
                "heads per token": f"{sum(line['heads'] for line in own) / sum(line['tokens'] for line in own):.2f}",
                "heads counted": f"{with_heads(own) / plain[1]:.3f}",
                "drafts per round": f"{sum(line['drafted'] for line in own) / sum(line['rounds'] for line in own):.2f}",
                "acceptance": f"{sum(line['accepted'] for line in own) / max(sum(line['drafted'] for line in own), 1):.2f}",
            }
        )
    return Table.of(name, title, rows)
