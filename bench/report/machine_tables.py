"""The tables of `selfspec-bench kernels`, `roofline` and `context`: what the machine gives."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from bench.record import Line, by_value, matching
from bench.report.table import UNKNOWN, Table, counted, cross_table, names

PHASES = ("draft", "verify", "accept", "learn", "other")
ROLES = ("best fixed", "auto")


def kernels_tables(lines: Sequence[Line]) -> list[Table]:
    """One table for each kind of weights: variants by rows."""
    found = [
        {"variant": line["variant"], **product} for line in matching(lines, "products") for product in line["measured"]
    ]

    def table(kind: str, own: Sequence[Line]) -> Table:
        def cell(variant: str, rows: int) -> str:
            runs = [line for line in own if (line["variant"], line["rows"]) == (variant, rows)]
            seconds = median(line["seconds"] for line in runs)
            return f"{runs[0]['bytes'] / seconds / 1e9:.1f} ({1e6 * seconds:.0f})"

        columns = {rows: counted(rows, "row") for rows in by_value(own, "rows")}
        title = f"{kind}: GB/s of weights, and microseconds of a product"
        variants = names(lines[0]["configuration"]["variants"])
        return cross_table(f"products {kind}", title, "variant", variants, columns, cell)

    return [table(kind, own) for kind, own in by_value(found, "weights").items()]


def roofline_tables(lines: Sequence[Line]) -> list[Table]:
    """Show what whole runs take, beside what they must read."""
    bandwidth = _bandwidth(lines)
    runs = by_value(matching(lines, "phases"), "policy")
    title = (
        f"After prefill: tokens/s, their limit at the bytes that rounds read ({bandwidth / 1e9:.1f} GB/s), and ms per token "
        "by phase (share of bandwidth); last, ms per token that measured costs predict, learning aside"
    )
    rows = [_phase_row(policy, _median_runs(own), bandwidth) for policy, own in runs.items()]
    return [Table.of("phases", title, rows, plotted="tokens/s")]


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


def _median_runs(runs: Sequence[Line]) -> list[Line]:
    """Return the median run of each prompt."""
    by_prompt = by_value(runs, "prompt").values()
    return [sorted(own, key=lambda run: run["decode_seconds"])[(len(own) - 1) // 2] for own in by_prompt]


def _bandwidth(lines: Sequence[Line]) -> float:
    return median(line["bytes_per_second"] for line in matching(lines, "bandwidth"))


def _bytes(runs: Sequence[Line]) -> float:
    """Count the bytes that rounds must read, without those of learning: a faster engine would not need them."""
    return float(sum(run["bytes"]["draft"] + run["bytes"]["verify"] for run in runs))


def _seconds(runs: Sequence[Line]) -> float:
    return float(sum(run["decode_seconds"] for run in runs))


def _speed(runs: Sequence[Line]) -> float:
    return sum(run["tokens"] for run in runs) / _seconds(runs)


def _share(num_bytes: float, seconds: float, bandwidth: float) -> str:
    return f"{100 * num_bytes / seconds / bandwidth:.0f} %"


def context_tables(lines: Sequence[Line]) -> list[Table]:
    """Show speed over the length of the context."""
    contexts = by_value(matching(lines, "prefill"), "context")
    configuration = lines[0]["configuration"]
    title = (
        "tokens/s after the first token (× plain decoding), plain decoding's time per token and t' (less keys and values "
        f"read at the measured bandwidth), time to the first token; keys and values in {configuration['kv_dtype']}"
    )
    speeds = [_context_row(lines, context, own[0]["time_to_first_token"]) for context, own in contexts.items()]
    return [Table.of("contexts", title, speeds, plotted="plain")]


def seconds_per_token(lines: Sequence[Line], context: int, role: str) -> float:
    """Return the median over repeats, after the first token."""
    return median(run["seconds"] / run["tokens"] for run in matching(lines, "decode", context=context, role=role))


def time_beside_reading(lines: Sequence[Line], context: int) -> float:
    """Return t': seconds per token of plain decoding, less keys and values read at the measured bandwidth."""
    configuration, kv_bytes = lines[0]["configuration"], matching(lines, "bandwidth")[0]["kv_bytes"]
    positions = context + configuration["max_new_tokens"] / 2
    read = configuration["num_layers"] * kv_bytes * positions
    return float(seconds_per_token(lines, context, "plain") - read / _bandwidth(lines))


def _context_row(lines: Sequence[Line], context: int, first_seconds: float) -> dict[str, str]:
    plain = seconds_per_token(lines, context, "plain")
    decoded = matching(lines, "decode", context=context)
    own = {role: seconds_per_token(lines, context, role) for role in ROLES}
    return {
        "context": str(context),
        "plain": f"{1 / plain:.1f}",
        **{role: f"{1 / seconds:.1f} ({plain / seconds:.2f}×)" for role, seconds in own.items()},
        "that setting": f"`{matching(decoded, 'decode', role='best fixed')[0]['policy']}`",
        "plain, ms": f"{1000 * plain:.2f}",
        "t', ms": f"{1000 * time_beside_reading(lines, context):.2f}",
        "TTFT, s": f"{first_seconds:.2f}",
        "other texts than plain's": str(sum(not line["outputs_equal"] for line in decoded)),
    }
