"""The tables of a roofline: calls and phases against what memory allows."""

from __future__ import annotations

from collections.abc import Sequence

from bench.machine.roofline import PHASES
from bench.record import Line, matching
from bench.report.table import UNKNOWN, Table


def roofline_tables(lines: Sequence[Line]) -> list[Table]:
    """Calls, then phases."""
    bandwidth = _bandwidth(lines)
    positions = lines[0]["configuration"]["timed_context"]
    calls = (
        {
            "call": line["name"],
            "must read, MB": f"{line['bytes'] / 1e6:.2f}",
            "at bandwidth, ms": f"{1000 * line['bytes'] / bandwidth:.3f}",
            "measured, ms": f"{1000 * line['seconds']:.3f}",
            "of bandwidth": _share(line["bytes"], line["seconds"], bandwidth),
        }
        for line in matching(lines, "call")
    )
    policies = dict.fromkeys(line["policy"] for line in matching(lines, "phases"))
    return [
        Table.of(
            "calls",
            f"Calls, timed alone with {positions} positions in the cache; memory gives {bandwidth / 1e9:.1f} GB/s",
            calls,
        ),
        Table.of(
            "phases",
            "After prefill: tokens/s, their limit at the bytes that the rounds read, and ms per token by "
            "phase (share of bandwidth); last, ms per token that measured costs predict, learning aside",
            (_phase_row(policy, _of_policy(lines, policy), bandwidth) for policy in policies),
        ),
    ]


def _phase_row(policy: str, runs: Sequence[Line], bandwidth: float) -> dict[str, str]:
    tokens = sum(run["tokens"] for run in runs)
    predicted = sum(run["predicted_seconds"] for run in runs)

    def cell(phase: str) -> str:
        seconds = sum(run["seconds"][phase] for run in runs)
        read = sum(run["bytes"].get(phase, 0.0) for run in runs)
        share = f" ({_share(read, seconds, bandwidth)})" if read else ""
        return f"{1000 * seconds / tokens:.2f}{share}"

    return {
        "policy": f"`{policy}`",
        "tokens/s": f"{_speed(runs):.1f}",
        "limit": f"{tokens * bandwidth / _bytes(runs):.1f}",
        "of limit": _share(_bytes(runs), _seconds(runs), bandwidth),
        **{phase: cell(phase) for phase in PHASES},
        "predicted": f"{1000 * predicted / tokens:.2f}" if predicted else UNKNOWN,
    }


def _of_policy(lines: Sequence[Line], policy: str) -> list[Line]:
    """The median run of each prompt."""
    by_prompt: dict[str, list[Line]] = {}
    for run in matching(lines, "phases", policy=policy):
        by_prompt.setdefault(run["prompt"], []).append(run)
    return [sorted(runs, key=lambda run: run["decode_seconds"])[(len(runs) - 1) // 2] for runs in by_prompt.values()]


def _bandwidth(lines: Sequence[Line]) -> float:
    return float(matching(lines, "limits")[0]["bytes_per_second"])


def _bytes(runs: Sequence[Line]) -> float:
    """What rounds must read; learning is not part of it: a faster engine would not need it."""
    return float(sum(run["bytes"]["draft"] + run["bytes"]["verify"] for run in runs))


def _seconds(runs: Sequence[Line]) -> float:
    return float(sum(run["decode_seconds"] for run in runs))


def _speed(runs: Sequence[Line]) -> float:
    return sum(run["tokens"] for run in runs) / _seconds(runs)


def _share(num_bytes: float, seconds: float, bandwidth: float) -> str:
    return f"{100 * num_bytes / seconds / bandwidth:.0f} %"
