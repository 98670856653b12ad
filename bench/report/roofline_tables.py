"""The tables of a roofline: calls and phases against what memory allows."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from bench.machine.roofline import PHASES
from bench.record import Line
from bench.report.table import UNKNOWN, Table, subject


def roofline_headline(lines: Sequence[Line]) -> str:
    """The limit, and how close plain decoding comes."""
    bandwidth = _bandwidth(lines)
    step = next(line for line in lines if line["kind"] == "call")
    plain = _of_policy(lines, "ar")
    return (
        f"{subject(lines)}: memory gives "
        f"{bandwidth / 1e9:.1f} GB/s (one large tensor, read) and a plain step must read {step['bytes'] / 1e6:.1f} MB, so at "
        f"most {bandwidth / step['bytes']:.1f} tokens/s; it does {1 / step['seconds']:.1f} by itself "
        f"({_share(step['bytes'], step['seconds'], bandwidth)}) and {_speed(plain):.1f} within `generate` "
        f"({_share(_bytes(plain), _seconds(plain), bandwidth)})."
    )


def roofline_tables(lines: Sequence[Line]) -> list[Table]:
    """Calls, then phases."""
    return [_call_table(lines), _phase_table(lines)]


def _call_table(lines: Sequence[Line]) -> Table:
    bandwidth = _bandwidth(lines)
    context = lines[0]["configuration"]["timed_context"]
    rows = tuple(
        (
            line["name"],
            f"{line['bytes'] / 1e6:.2f}",
            f"{1000 * line['bytes'] / bandwidth:.3f}",
            f"{1000 * line['seconds']:.3f}",
            _share(line["bytes"], line["seconds"], bandwidth),
        )
        for line in lines
        if line["kind"] == "call"
    )
    return Table(
        name="calls",
        title=f"Calls, timed alone with {context} positions in the cache: what measured costs are made of",
        columns=("call", "must read, MB", "at bandwidth, ms", "measured, ms", "of bandwidth"),
        rows=rows,
    )


def _phase_table(lines: Sequence[Line]) -> Table:
    bandwidth = _bandwidth(lines)
    rows = []
    for policy in dict.fromkeys(line["policy"] for line in lines if line["kind"] == "phases"):
        runs = _of_policy(lines, policy)
        tokens = sum(run["tokens"] for run in runs)
        cells = []
        for phase in PHASES:
            seconds = sum(run["seconds"][phase] for run in runs)
            read = sum(run["bytes"].get(phase, 0.0) for run in runs)
            share = f" ({_share(read, seconds, bandwidth)})" if read else ""
            cells.append(f"{1000 * seconds / tokens:.2f}{share}")
        predicted = sum(run["predicted_seconds"] for run in runs)
        rows.append(
            (
                f"`{policy}`",
                f"{_speed(runs):.1f}",
                f"{tokens * bandwidth / _bytes(runs):.1f}",
                _share(_bytes(runs), _seconds(runs), bandwidth),
                *cells,
                f"{1000 * predicted / tokens:.2f}" if predicted else UNKNOWN,
            )
        )
    return Table(
        name="phases",
        title="After prefill: tokens/s, their limit at the bytes that the rounds read, and ms per token by "
        "phase (share of bandwidth); last, ms per token that measured costs predict, learning aside",
        columns=("policy", "tokens/s", "limit", "of limit", *PHASES, "predicted"),
        rows=tuple(rows),
    )


def _of_policy(lines: Sequence[Line], policy: str) -> list[Line]:
    """The median run of each prompt."""
    runs = [line for line in lines if line["kind"] == "phases" and line["policy"] == policy]
    found = []
    for prompt in dict.fromkeys(run["prompt"] for run in runs):
        repeats = sorted((run for run in runs if run["prompt"] == prompt), key=lambda run: run["decode_seconds"])
        middle = median(range(len(repeats)))
        found.append(repeats[int(middle)])
    return found


def _bandwidth(lines: Sequence[Line]) -> float:
    return float(next(line["bytes_per_second"] for line in lines if line["kind"] == "limits"))


def _bytes(runs: Sequence[Line]) -> float:
    """What rounds must read; learning is not part of it: a faster engine would not need it."""
    return float(sum(run["bytes"]["draft"] + run["bytes"]["verify"] for run in runs))


def _seconds(runs: Sequence[Line]) -> float:
    return float(sum(run["decode_seconds"] for run in runs))


def _speed(runs: Sequence[Line]) -> float:
    return sum(run["tokens"] for run in runs) / _seconds(runs)


def _share(num_bytes: float, seconds: float, bandwidth: float) -> str:
    return f"{100 * num_bytes / seconds / bandwidth:.0f} %"
