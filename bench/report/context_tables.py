"""The tables of a measurement over contexts: speed, time beside reading keys and values, memory."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from bench.record import Line
from bench.report.table import UNKNOWN, Table, number, subject

ROLES = ("plain", "best fixed", "auto")


def seconds_per_token(lines: Sequence[Line], context: int, role: str) -> float:
    """Median over repeats, after the first token."""
    runs = [line for line in lines if line["kind"] == "decode" and (line["context"], line["role"]) == (context, role)]
    return median(run["seconds"] / run["tokens"] for run in runs)


def time_beside_reading(lines: Sequence[Line], context: int) -> float:
    """t': seconds per token of plain decoding, less keys and values read at the measured bandwidth."""
    limits = next(line for line in lines if line["kind"] == "limits")
    configuration = lines[0]["configuration"]
    positions = context + configuration["max_new_tokens"] / 2
    read = configuration["num_layers"] * limits["kv_bytes"] * positions
    return float(seconds_per_token(lines, context, "plain") - read / limits["bytes_per_second"])


def context_headline(lines: Sequence[Line]) -> str:
    """What a long context costs."""
    configuration, where = lines[0]["configuration"], lines[0]["provenance"]
    contexts = _contexts(lines)
    differing = sum(not line["outputs_equal"] for line in lines if line["kind"] == "decode")
    unread = "" if configuration["prefill"] else " (keys and values random: the prompt was not read)"
    text = (
        f"{subject(lines)}, greedy, "
        f"{configuration['max_new_tokens']} new tokens after {', '.join(map(str, contexts))}{unread}: runs whose text "
        f"is not plain decoding's: {differing}."
    )
    if configuration.get("kv_dtype", where["dtype"]) != where["dtype"]:
        text = f"Keys and values in {configuration['kv_dtype']}. {text}"
    if len(contexts) > 1:
        short, long = contexts[0], contexts[-1]
        ratio = time_beside_reading(lines, short) / time_beside_reading(lines, long)
        text += f" Time per token less keys and values read at bandwidth: t'({short}) / t'({long}) = {ratio:.2f}."
    return text


def context_tables(lines: Sequence[Line]) -> list[Table]:
    """Speed, then the next turn and memory if they were measured."""
    measured = {line["kind"] for line in lines}
    turns = [_turn_table(lines)] if "turn" in measured else []
    memory = [_memory_table(lines)] if "memory" in measured else []
    return [_speed_table(lines), *turns, *memory]


def _contexts(lines: Sequence[Line]) -> list[int]:
    return list(dict.fromkeys(line["context"] for line in lines if line["kind"] == "prefill"))


def _speed_table(lines: Sequence[Line]) -> Table:
    rows = []
    for context in _contexts(lines):
        plain = seconds_per_token(lines, context, "plain")
        fixed = next(
            line["policy"]
            for line in lines
            if line["kind"] == "decode" and (line["context"], line["role"]) == (context, "best fixed")
        )
        prefill = next(line for line in lines if line["kind"] == "prefill" and line["context"] == context)
        theirs = next((line for line in lines if line["kind"] == "transformers" and line["context"] == context), None)
        rows.append(
            (
                str(context),
                f"{1 / plain:.1f}",
                *(_speed_of(lines, context, role, plain) for role in ROLES[1:]),
                f"`{fixed}`",
                UNKNOWN if theirs is None else f"{theirs['tokens'] / theirs['seconds']:.1f}",
                f"{1000 * plain:.2f}",
                f"{1000 * time_beside_reading(lines, context):.2f}",
                number(prefill["time_to_first_token"], "{:.2f}"),
                UNKNOWN if theirs is None else f"{theirs['time_to_first_token']:.2f}",
            )
        )
    return Table(
        name="contexts",
        title="tokens/s after the first token (× plain decoding), plain decoding's time per token and t' (less keys and "
        "values read at the measured bandwidth), time to the first token",
        columns=(
            "context", "plain", "best fixed", "auto", "that setting", "transformers", "plain, ms", "t', ms", "TTFT, s",
            "transformers' TTFT, s",
        ),
        rows=tuple(rows),
    )  # fmt: skip


def _speed_of(lines: Sequence[Line], context: int, role: str, plain: float) -> str:
    seconds = seconds_per_token(lines, context, role)
    return f"{1 / seconds:.1f} ({plain / seconds:.2f}×)"


def _turn_table(lines: Sequence[Line]) -> Table:
    rows = []
    for context in _contexts(lines):
        turns = [line for line in lines if line["kind"] == "turn" and line["context"] == context]
        if not turns:
            continue
        fresh = next(line for line in lines if line["kind"] == "prefill" and line["context"] == context)
        seconds = median(turn["time_to_first_token"] for turn in turns)
        rows.append(
            (
                str(context),
                f"{turns[0]['prompt_tokens']} ({turns[0]['reused_tokens']} not read again)",
                f"{1000 * fresh['time_to_first_token']:.0f}",
                f"{1000 * seconds:.0f}",
                f"{100 * seconds / fresh['time_to_first_token']:.1f} %",
            )
        )
    return Table(
        name="turns",
        title="The next turn of a conversation: time to the first token when only what is new is read",
        columns=("context", "next prompt, tokens", "first turn's TTFT, ms", "next turn's TTFT, ms", "share"),
        rows=tuple(rows),
    )


def _memory_table(lines: Sequence[Line]) -> Table:
    weights = lines[0]["configuration"]["weight_bytes"]
    rows = []
    for line in lines:
        if line["kind"] == "memory":
            rows.append(
                (
                    str(line["context"]),
                    *(
                        number(value, "{:.1f}", 1 / 2**20)
                        for value in (
                            weights + line["peak_bytes"],
                            weights,
                            line["kv_bytes"],
                            line["peak_bytes"] - line["kv_bytes"],
                        )
                    ),
                )
            )
    return Table(
        name="memory",
        title="Peak memory in tensors, MiB: weights, the KV cache, and all the rest together",
        columns=("context", "peak", "weights", "KV cache", "rest"),
        rows=tuple(rows),
    )
