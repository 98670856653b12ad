"""The tables of `selfspec-bench load`, `kernels` and `roofline`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from bench.machine.roofline import PHASES
from bench.record import Line, by_value, matching
from bench.report.table import UNKNOWN, Table, cross_table, number


def load_tables(lines: Sequence[Line]) -> list[Table]:
    """Medians of the repeats; the share is the median of their shares."""
    rows = []
    for name, own in _by_model(lines).items():

        def of(value: Callable[[Line], float], own: Sequence[Line] = own) -> float:
            return median(map(value, own))

        known = all(line["peak"] and line["held"] for line in own)  # Linux tells
        rows.append(
            {
                "checkpoint": name,
                "GB": f"{own[0]['bytes'] / 1e9:.2f}",
                "load, s": f"{of(lambda line: line['seconds']):.2f}",
                "load, GB/s": f"{of(lambda line: line['bytes'] / line['seconds'] / 1e9):.2f}",
                "plain read, GB/s": f"{of(lambda line: line['read_by_1'] / 1e9):.2f}",
                "by two readers": f"{of(lambda line: line['read_by_2'] / 1e9):.2f}",
                "share of a plain read": f"{of(_share_of_read):.2f}",
                "peak memory / file": number(
                    of(lambda line: line["peak"] / line["bytes"]) if known else None, "{:.2f}"
                ),
                "memory without files / file": number(
                    of(lambda line: line["held"] / line["bytes"]) if known else None, "{:.2f}"
                ),
            }
        )
    tables = [Table.of("load", "Loading, medians; memory is that of the whole process", rows)]
    starts = by_value(matching(lines, "start"), "what")
    if starts:
        rows = [
            {
                "": what,
                "seconds": f"{median(line['seconds'] for line in own):.2f}",
                "fastest": f"{min(line['seconds'] for line in own):.2f}",
                "slowest": f"{max(line['seconds'] for line in own):.2f}",
                "seconds of processors": f"{median(line['processor_seconds'] for line in own):.2f}",
            }
            for what, own in starts.items()
        ]
        tables.append(Table.of("starts", "From the start of a process to its end or its prompt: medians", rows))
    return tables


def _by_model(lines: Sequence[Line]) -> dict[str, list[Line]]:
    return by_value(matching(lines, "load"), "model")


def _share_of_read(line: Line) -> float:
    return float(line["bytes"] / line["seconds"] / line["read_by_1"])


def kernels_tables(lines: Sequence[Line]) -> list[Table]:
    """One table for each kind of weights: variants by rows."""
    variants = {name: name for name in lines[0]["configuration"]["variants"]}

    def table(kind: str, own: Sequence[Line]) -> Table:
        def cell(variant: str, rows: int) -> str:
            found = matching(own, "product", variant=variant, rows=rows)
            seconds = median(line["seconds"] for line in found)
            return f"{found[0]['bytes'] / seconds / 1e9:.1f} ({1e6 * seconds:.0f})"

        columns = {rows: f"{rows} rows" if rows > 1 else "1 row" for rows in by_value(own, "rows")}
        title = f"{kind}: GB/s of weights, and microseconds of a product"
        return cross_table(f"products {kind}", title, "variant", variants, columns, cell)

    return [table(kind, own) for kind, own in by_value(matching(lines, "product"), "weights").items()]


def roofline_tables(lines: Sequence[Line]) -> list[Table]:
    """Make two tables: calls, then phases."""
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
    """Return the median run of each prompt."""
    by_prompt: dict[str, list[Line]] = {}
    for run in matching(lines, "phases", policy=policy):
        by_prompt.setdefault(run["prompt"], []).append(run)
    return [sorted(runs, key=lambda run: run["decode_seconds"])[(len(runs) - 1) // 2] for runs in by_prompt.values()]


def _bandwidth(lines: Sequence[Line]) -> float:
    return float(matching(lines, "limits")[0]["bytes_per_second"])


def _bytes(runs: Sequence[Line]) -> float:
    """Count the bytes that rounds must read, without those of learning: a faster engine would not need them."""
    return float(sum(run["bytes"]["draft"] + run["bytes"]["verify"] for run in runs))


def _seconds(runs: Sequence[Line]) -> float:
    return float(sum(run["decode_seconds"] for run in runs))


def _speed(runs: Sequence[Line]) -> float:
    return sum(run["tokens"] for run in runs) / _seconds(runs)


def _share(num_bytes: float, seconds: float, bandwidth: float) -> str:
    return f"{100 * num_bytes / seconds / bandwidth:.0f} %"
