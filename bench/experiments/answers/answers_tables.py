"""The table of a replayed session."""

from __future__ import annotations

from collections.abc import Sequence

from bench.experiments.answers.session import PROMPTS
from bench.record import Line, matching
from bench.report.table import Table, subject


def answers_headline(lines: Sequence[Line]) -> str:
    """What was replayed, and whether any text changed."""
    answers = matching(lines, "answer")
    edits, same = len({line["edit"] for line in answers}), all(line["same_text"] for line in answers)
    told = "every text is the same with and without the store" if same else "some texts differ"
    return f"{subject(lines)}. {edits} edits of {lines[0]['configuration']['file']}; {told}."


def answers_tables(lines: Sequence[Line]) -> list[Table]:
    """A row for each session: how many times as fast it is with the store, and what it copied."""
    sessions = dict.fromkeys((line["forced"], line["prompt"], line["policy"]) for line in matching(lines, "answer"))
    rows = []
    for forced, prompt, policy in sessions:
        found = matching(lines, "answer", forced=forced, prompt=prompt, policy=policy)
        plain, stored = matching(found, "answer", store=False), matching(found, "answer", store=True)
        rows.append(
            (
                PROMPTS[prompt],
                "the edited file" if forced else "the model's own",
                policy,
                f"{_seconds(plain):.0f}",
                f"{_seconds(stored):.0f}",
                f"{_seconds(plain) / _seconds(stored):.2f}",
                f"{_decoding(plain) / _decoding(stored):.2f}",
                f"{_per_round(plain):.2f}",
                f"{_per_round(stored):.2f}",
                "all" if all(line["same_text"] for line in found) else "not all",
            )
        )
    columns = (
        "the prompt holds", "answers", "policy", "seconds without", "with", "times as fast", "decoding alone",
        "tokens per round without", "with the store", "same texts",
    )  # fmt: skip
    return [
        Table(
            name="session",
            title="A session of edits, with and without earlier answers",
            columns=columns,
            rows=tuple(rows),
        )
    ]


def _seconds(lines: Sequence[Line]) -> float:
    return sum(float(line["seconds"]) for line in lines)


def _decoding(lines: Sequence[Line]) -> float:
    """Seconds without the prompts."""
    return _seconds(lines) - sum(float(line["prefill_seconds"]) for line in lines)


def _per_round(lines: Sequence[Line]) -> float:
    return sum(int(line["tokens"]) for line in lines) / max(1, sum(int(line["rounds"]) for line in lines))
