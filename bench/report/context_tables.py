"""The tables of a measurement over contexts: speed, and time compared with reading keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from bench.record import Line, matching
from bench.report.table import UNKNOWN, Table

ROLES = ("plain", "best fixed", "auto")


def seconds_per_token(lines: Sequence[Line], context: int, role: str) -> float:
    """Median over repeats, after the first token."""
    return median(run["seconds"] / run["tokens"] for run in matching(lines, "decode", context=context, role=role))


def time_beside_reading(lines: Sequence[Line], context: int) -> float:
    """t': seconds per token of plain decoding, less keys and values read at the measured bandwidth."""
    limits = matching(lines, "limits")[0]
    configuration = lines[0]["configuration"]
    positions = context + configuration["max_new_tokens"] / 2
    read = configuration["num_layers"] * limits["kv_bytes"] * positions
    return float(seconds_per_token(lines, context, "plain") - read / limits["bytes_per_second"])


def context_tables(lines: Sequence[Line]) -> list[Table]:
    """Speed, then the next turn where positions were left for it."""
    tables = [_speed_table(lines)]
    turns = _turn_rows(lines)
    if turns:
        title = "The next turn of a conversation: time to the first token when only what is new is read"
        tables.append(Table.of("turns", title, turns))
    return tables


def _contexts(lines: Sequence[Line]) -> list[int]:
    return list(dict.fromkeys(line["context"] for line in matching(lines, "prefill")))


def _speed_table(lines: Sequence[Line]) -> Table:
    rows = []
    for context in _contexts(lines):
        seconds = {role: seconds_per_token(lines, context, role) for role in ROLES}
        plain = seconds.pop("plain")
        prefill = matching(lines, "prefill", context=context)[0]
        peers = matching(lines, "transformers", context=context)
        decoded = matching(lines, "decode", context=context)
        rows.append(
            {
                "context": str(context),
                "plain": f"{1 / plain:.1f}",
                **{role: f"{1 / own:.1f} ({plain / own:.2f}×)" for role, own in seconds.items()},
                "that setting": f"`{matching(lines, 'decode', context=context, role='best fixed')[0]['policy']}`",
                "transformers": f"{peers[0]['tokens'] / peers[0]['seconds']:.1f}" if peers else UNKNOWN,
                "plain, ms": f"{1000 * plain:.2f}",
                "t', ms": f"{1000 * time_beside_reading(lines, context):.2f}",
                "TTFT, s": f"{prefill['time_to_first_token']:.2f}",
                "other texts than plain's": str(sum(not line["outputs_equal"] for line in decoded)),
                "transformers' TTFT, s": f"{peers[0]['time_to_first_token']:.2f}" if peers else UNKNOWN,
            }
        )
    configuration = lines[0]["configuration"]
    title = (
        "tokens/s after the first token (× plain decoding), plain decoding's time per token and t' (less keys and values "
        f"read at the measured bandwidth), time to the first token; keys and values in {configuration['kv_dtype']}"
    )
    return Table.of("contexts", title, rows)


def _turn_rows(lines: Sequence[Line]) -> list[dict[str, str]]:
    rows = []
    for context in _contexts(lines):
        turns = matching(lines, "turn", context=context)
        if turns:
            fresh = matching(lines, "prefill", context=context)[0]["time_to_first_token"]
            seconds = median(turn["time_to_first_token"] for turn in turns)
            rows.append(
                {
                    "context": str(context),
                    "next prompt, tokens": f"{turns[0]['prompt_tokens']} ({turns[0]['reused_tokens']} not read again)",
                    "first turn's TTFT, ms": f"{1000 * fresh:.0f}",
                    "next turn's TTFT, ms": f"{1000 * seconds:.0f}",
                    "share": f"{100 * seconds / fresh:.1f} %",
                }
            )
    return rows
