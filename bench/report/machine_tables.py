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
    configuration = lines[0]["configuration"]
    columns = {rows: counted(rows, "row") for rows in configuration["rows"]}

    def table(kind: str) -> Table:
        def cell(variant: str, rows: int) -> str:
            measured = [one for line in matching(lines, "products", variant=variant) for one in line["measured"]]
            runs = [one for one in measured if (one["weights"], one["rows"]) == (kind, rows)]
            seconds = median(one["seconds"] for one in runs)
            return f"{runs[0]['bytes'] / seconds / 1e9:.1f} ({1e6 * seconds:.0f})"

        title = f"{kind}: GB/s of weights, and microseconds of a product"
        return cross_table(f"products {kind}", title, "variant", names(configuration["variants"]), columns, cell)

    return [table(kind) for kind in configuration["kinds"]]


def roofline_tables(lines: Sequence[Line]) -> list[Table]:
    """Show what whole runs take, beside what they must read."""
    bandwidth = _bandwidth(lines)
    runs = by_value(matching(lines, "phases"), "policy")
    title = (
        f"After prefill: tokens/s, their limit at the bytes that rounds read ({bandwidth / 1e9:.1f} GB/s), and ms per token "
        "by phase (share of bandwidth); last, ms per token that measured costs predict, learning aside"
    )
    rows = [_phase_row(policy, own, bandwidth) for policy, own in runs.items()]
    return [Table.of("phases", title, rows, plotted="tokens/s")]


def _phase_row(policy: str, measured: Sequence[Line], bandwidth: float) -> dict[str, str]:
    """Make a row of the median run of each prompt."""
    by_prompt = [sorted(own, key=lambda run: run["decode_seconds"]) for own in by_value(measured, "prompt").values()]
    runs = [own[(len(own) - 1) // 2] for own in by_prompt]
    decoding = sum(run["decode_seconds"] for run in runs)
    # Without those of learning: a faster engine would not need them.
    needed = sum(run["bytes"]["draft"] + run["bytes"]["verify"] for run in runs)
    tokens = sum(run["tokens"] for run in runs)
    predicted = sum(run["predicted_seconds"] for run in runs)

    def cell(phase: str) -> str:
        seconds = sum(run["seconds"][phase] for run in runs)
        read = sum(run["bytes"].get(phase, 0.0) for run in runs)
        share = f" ({100 * read / seconds / bandwidth:.0f} %)" if read else ""
        return f"{1000 * seconds / tokens:.2f}{share}"

    return {
        "policy": f"`{policy}`",
        "tokens/s": f"{tokens / decoding:.1f}",
        "limit": f"{tokens * bandwidth / needed:.1f}",
        "of limit": f"{100 * needed / decoding / bandwidth:.0f} %",
        **{phase: cell(phase) for phase in PHASES},
        "predicted": f"{1000 * predicted / tokens:.2f}" if predicted else UNKNOWN,
    }


def _bandwidth(lines: Sequence[Line]) -> float:
    return median(line["bytes_per_second"] for line in matching(lines, "bandwidth"))


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
