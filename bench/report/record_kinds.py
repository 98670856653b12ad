"""What a report shows for each command that writes records.

A study adds its own kinds to `KINDS` (see `bench/experiments/record_kinds.py`): nothing here knows them. The tables group by
hand, and not with pandas: most of a table's code is what its cells say, and a grouping is one line either way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.record import Line
from bench.report import bits_tables
from bench.report.at_exit_layer import exit_layer_tables
from bench.report.batch_tables import batch_headline, batch_tables
from bench.report.chat_tables import chat_headline, chat_tables
from bench.report.context_tables import context_headline, context_tables
from bench.report.glance import by_precision, context_glance, engine_glance, roofline_glance, sweep_glance
from bench.report.roofline_tables import roofline_headline, roofline_tables
from bench.report.run_tables import run_tables
from bench.report.serving_tables import serving_headline, serving_tables
from bench.report.sweep_tables import sweep_headline, sweep_tables
from bench.report.table import Table

Tables = Callable[[Sequence[Line]], list[Table]]

HEADINGS = {
    "glance": "At a glance",
    "precision": "By precision of the weights",
    "speed": "Speed",
    "speedups": "Speed-up by task",
    "tasks": "Speed by task",
    "sources": "Where each source of drafts pays",
    "rounds": "Rounds",
    "phases": "Where the time goes",
    "scores": "Scores",
    "passes": "Answers that are right in any of several runs",
    "etpl": "Tokens per loaded layer",
    "intervals": "Intervals over prompts",
    "loops": "Texts that loop, and others",
    "exit-layer": "At one exit layer",
    "speedup": "Speed-up of every setting",
    "cells": "Every setting",
    "agreement": "Agreement of early layers with the last",
    "calls": "Single calls",
    "contexts": "Speed over the length of the context",
    "turns": "The next turn of a conversation",
    "memory": "Memory",
    "decoding": "Throughput while all texts decode",
    "batch": "Throughput with prompts",
    "joining": "A long prompt that joins",
    "serving": "Throughput of a server",
    "waiting": "Time to first token",
    "overhead": "What the server adds",
}
"""The parts of a page by name, with their headings, in the order of the page."""


def _none(lines: Sequence[Line]) -> list[Table]:
    return []


def _no_figures(lines: Sequence[Line]) -> dict[str, dict[str, Any]]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordKind:
    """What is made of a command's records.

    tables: for the terminal and the page; page_tables: for the page only. headline: None for the one of engines over
    prompts. figures: more figures than `bench.report.figures` draws, by part and title. headings: of parts that
    `HEADINGS` does not name. spread: whether tables show the lowest and highest repeat. trains: repeats are seeds of a
    training, and no engines take turns. glance: the short table that its page begins with, none where tables are short.
    """

    tables: Tables
    page_tables: Tables = _none
    glance: Tables = _none
    headline: Callable[[Sequence[Line]], str] | None = None
    figures: Callable[[Sequence[Line]], dict[str, dict[str, Any]]] = _no_figures
    headings: Mapping[str, str] = field(default_factory=dict)
    spread: bool = False
    trains: bool = False


KINDS: dict[str, RecordKind] = {
    "run": RecordKind(tables=run_tables, page_tables=exit_layer_tables, glance=engine_glance, spread=True),
    "peers": RecordKind(tables=run_tables, page_tables=by_precision, glance=engine_glance, spread=True),
    "peers --converted": RecordKind(
        tables=bits_tables.bits_tables, headline=bits_tables.bits_headline, headings=bits_tables.HEADINGS
    ),
    "chat": RecordKind(
        tables=chat_tables,
        headline=chat_headline,
        headings={
            "engines": "Engines side by side",
            "decode": "Decoding by kind of prompt",
            "prompts": "Prompts by kind",
            "ratios": "Ratios by kind",
            "rounding": "What is rounded",
        },
    ),
    "sweep": RecordKind(tables=sweep_tables, headline=sweep_headline, glance=sweep_glance, spread=True),
    "roofline": RecordKind(tables=roofline_tables, headline=roofline_headline, glance=roofline_glance),
    "context": RecordKind(tables=context_tables, headline=context_headline, glance=context_glance),
    "batch": RecordKind(tables=batch_tables, headline=batch_headline),
    "serving": RecordKind(tables=serving_tables, headline=serving_headline),
}
"""By the command that wrote the record."""


def kind_of(lines: Sequence[Line]) -> RecordKind:
    """What a report shows for the command that made this record.

    Raises ValueError for a command without a report.
    """
    command = lines[0]["command"]
    if command not in KINDS:
        raise ValueError(f"no report is made here for records of {command!r}: try python -m bench.experiments report")
    return KINDS[command]
