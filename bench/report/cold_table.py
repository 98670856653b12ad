"""The table of `selfspec-bench run --cold`: the first texts of fresh processes, beside plain decoding's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from statistics import median

from bench.record import Line, matching
from bench.report.table import Table, cross_table

_CACHES = {"empty": "none", "filled": "found"}


def cold_tables(lines: Sequence[Line]) -> list[Table]:
    """Seconds of each text, and how many times as fast as plain decoding's: medians over processes, each beside its own."""
    asked = lines[0]["configuration"]
    runs = {(line["policy"], line["cache"], line["repeat"]): line for line in matching(lines, "cold")}
    rows = {key: f"`{key[0]}`, kept costs {_CACHES[key[1]]}" for key in product(asked["policies"], _CACHES)}

    def cell(row: tuple[str, str], text: int) -> str:
        policy, cache = row
        repeats = range(asked["repeats"])
        plain, own = ([runs[one, cache, each]["seconds"][text] for each in repeats] for one in ("ar", policy))
        faster = "" if policy == "ar" else f" ({median(a / b for a, b in zip(plain, own)):.2f}×)"
        return f"{median(own):.2f}{faster}"

    model, tokens = asked["model"], asked["max_new_tokens"]
    title = f"{model}: seconds of a process's first texts, {tokens} tokens each (times plain's speed)"
    columns = {text: f"text {text + 1}" for text in range(len(asked["prompts"]))}
    return [cross_table("cold", title, "policy", rows, columns, cell)]
