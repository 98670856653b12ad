"""The same policies decoding greedily and sampling, side by side: one table for each measure, a column for each record.

Each column is of one record of `selfspec-bench run` and has its own plain decoding, so a ratio never mixes two. Intervals are
those of `interval_tables`: other prompts of the same tasks. A sampled text is one draw, so its luck is in them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.record import PLAIN, Line
from bench.report.interval_tables import Floats, PolicyRow, drawn, interval, policy_row, rate, speed
from bench.report.run_tables import decoding_text, first_runs
from bench.report.summary import Samples
from bench.report.table import UNKNOWN, Table, cross_table


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """One record: its policies' rows, plain decoding's among them, and its draws of prompts."""

    rows: Mapping[str, PolicyRow]
    draws: Floats

    @classmethod
    def of(cls, lines: Sequence[Line]) -> _Column:
        samples = Samples(lines)
        rows = {engine: policy_row(samples, engine, own) for engine, own in first_runs(lines).items()}
        return cls(rows=rows, draws=drawn([samples.tasks[prompt] for prompt in samples.prompts]))

    def over_plain(self, measure: Callable[[PolicyRow, Floats], Floats], engine: str) -> str:
        """A measure divided by plain decoding's, with its interval."""
        own, plain = self.rows[engine], self.rows[PLAIN]
        return interval(lambda weights: measure(own, weights) / measure(plain, weights), self.draws)


def decoding_tables(records: Sequence[Sequence[Line]]) -> list[Table]:
    """Acceptance, tokens per layer and speed of the policies that all these records have, best of the first record first.

    records: of `selfspec-bench run` on the same prompts, each decoded in its own way. Raises ValueError for records of
    different models or prompts, for two that decode alike, and for one without plain decoding.
    """
    headings = [decoding_text(lines) for lines in records]
    if len(set(headings)) < len(records):
        raise ValueError(f"records side by side must decode differently, these are {', '.join(headings)}")
    for name in ("model", "prompts_digest", "max_new_tokens"):
        if len({str(lines[0]["configuration"][name]) for lines in records}) > 1:
            raise ValueError(f"records side by side must have the same {name.replace('_', ' ')}")
    columns = dict(zip(headings, map(_Column.of, records)))
    if any(PLAIN not in column.rows for column in columns.values()):
        raise ValueError("records side by side must have plain decoding each")
    first = next(iter(columns.values()))
    common = [engine for engine in first.rows if all(engine in column.rows for column in columns.values())]
    count = first.draws.shape[1]
    common.sort(key=lambda engine: -float(rate(first.rows[engine], np.ones(count))))
    policies = {engine: f"`{engine.removeprefix('selfspec:')}`" for engine in common if engine != PLAIN}
    everyone = {**policies, PLAIN: "`ar`"}
    intervals = f"in brackets 95 % intervals over {count} prompts"

    def table(name: str, title: str, rows: Mapping[str, str], cell: Callable[[_Column, str], str]) -> Table:
        return cross_table(
            name,
            f"{title}; {intervals}",
            "policy",
            rows,
            {heading: heading for heading in columns},
            lambda engine, heading: cell(columns[heading], engine),
        )

    return [
        table("acceptance", "Acceptance rate, mean over prompts", policies, _acceptance),
        table("etpl", "eTPL over plain decoding's", policies, lambda column, engine: column.over_plain(rate, engine)),
        table(
            "speed",
            "tokens/s, prefill included",
            everyone,
            lambda column, engine: interval(
                lambda weights: speed(column.rows[engine], weights) / weights.sum(-1), column.draws, digits=0
            ),
        ),
        table(
            "speedup",
            "tokens/s over plain decoding's",
            policies,
            lambda column, engine: column.over_plain(speed, engine),
        ),
    ]


def _acceptance(column: _Column, engine: str) -> str:
    """Mean over the prompts where anything was drafted."""
    rates = column.rows[engine].acceptance
    assert rates is not None
    known = ~np.isnan(rates)
    if not known.any():
        return UNKNOWN
    found = rates[known]
    return interval(lambda weights: weights[:, known] @ found / weights[:, known].sum(-1), column.draws)
