"""How many prompts are answered exactly in any of several runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from bench.report.run_tables import pass_tables, scores_by_run
from bench.report.table import Table
from bench.scoring import EXACT_MATCH


def tables_of(runs: dict[str, list[float]], metric: str = EXACT_MATCH) -> list[Table]:
    """runs: of each prompt of one task, by one engine."""
    lines = [
        {"task": "sums", "engine": "ours", "prompt": prompt, "scores": {metric: value}}
        for prompt, values in runs.items()
        for value in values
    ]
    samples: Any = SimpleNamespace(
        samples=[*lines, {"task": "text", "engine": "ours", "prompt": "z"}], engines={"ours": "ours"}
    )
    return pass_tables(samples, scores_by_run(samples))


def test_a_prompt_counts_once_however_many_of_its_runs_are_right() -> None:
    (table,) = tables_of({"a": [1, 0, 1], "b": [0, 0, 0], "c": [0, 0, 1]})
    assert table.columns == ("engine", "sums: right runs", "sums: prompts right in any run")
    assert table.rows == (("ours", "3 of 9", "2 of 3"),)
    assert table.title.endswith("pass@3)")


def test_there_is_no_such_table_of_single_runs_or_of_other_scores() -> None:
    assert tables_of({"a": [1], "b": [0]}) == []
    assert tables_of({"a": [0.4, 0.5]}, "ROUGE-1") == []
