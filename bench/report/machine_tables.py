"""The tables of `selfspec-bench kernels`, `roofline` and `context`: what the machine gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from bench.machine import WeightBytes
from bench.record import PLAIN, Line, matching
from bench.report.summary import Samples, decode_speed, fastest_memory
from bench.report.table import Table, counted, cross_table, names

PHASES = ("draft", "verify", "accept", "learn", "other")
"""What comes after prefill, of policies without a pre-verifier."""


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
    samples, bandwidth = Samples(lines), fastest_memory(lines)
    title = (
        f"After prefill: tokens/s, their limit at the bytes that rounds read ({bandwidth / 1e9:.1f} GB/s), and ms per token "
        "by phase (share of bandwidth)"
    )
    weights, num_layers = WeightBytes.from_line(matching(lines, "limits")[0]), lines[0]["configuration"]["num_layers"]

    def row(engine: str) -> dict[str, str]:
        runs = [line["stats"] for line in samples.of_engine(engine)]
        seconds = {phase: sum(run[f"{phase}_seconds"] for run in runs) for phase in PHASES}
        needed = sum(map(weights.moved, runs))
        verified = sum(weights.verified(run, num_layers) for run in runs)
        read = {"draft": needed - verified, "verify": verified}
        tokens, decoding = sum(run["num_new_tokens"] - 1 for run in runs), sum(seconds.values())

        def cell(phase: str) -> str:
            share = f" ({100 * read[phase] / seconds[phase] / bandwidth:.0f} %)" if read.get(phase) else ""
            return f"{1000 * seconds[phase] / tokens:.2f}{share}"

        return {
            "engine": samples.engines[engine],
            "tokens/s": f"{tokens / decoding:.1f}",
            "limit": f"{tokens * bandwidth / needed:.1f}",
            "of limit": f"{100 * needed / decoding / bandwidth:.0f} %",
            **{phase: cell(phase) for phase in PHASES},
        }

    return [Table.of("phases", title, map(row, samples.engines))]


def context_tables(lines: Sequence[Line]) -> list[Table]:
    """Show speed over the length of the context."""
    samples, kv_dtype = Samples(lines), lines[0]["configuration"]["kv_dtype"]
    if lines[0]["configuration"].get("agreements"):
        return _imposed_tables(lines, samples)
    title = (
        "tokens/s after the first token (× plain decoding), plain decoding's time per token and t' (less keys and values "
        f"read at the memory's speed), time to the first token; keys and values in {kv_dtype}"
    )

    def speed(engine: str, context: str) -> float:
        return samples.per_prompt(engine, decode_speed, context)[0]

    rows = []
    for context in samples.tasks:
        plain = speed(PLAIN, context)
        row = {"context": context, "plain": f"{plain:.1f}"}
        for engine, label in samples.engines.items():
            if engine != PLAIN:
                row[label] = f"{speed(engine, context):.1f} ({speed(engine, context) / plain:.2f}×)"
        row["plain, ms"] = f"{1000 / plain:.2f}"
        row["t', ms"] = f"{1000 * time_beside_reading(lines, int(context), plain):.2f}"
        # Only one run of all had to read the context.
        row["TTFT, s"] = (
            f"{max(line['time_to_first_token'] for line in samples.samples if line['task'] == context):.2f}"
        )
        rows.append(row)
    return [Table.of("contexts", title, rows)]


def _imposed_tables(lines: Sequence[Line], samples: Samples) -> list[Table]:
    """Show what policies gain where drafts are right as often as said, and what passes then cost."""
    asked, memory = lines[0]["configuration"], fastest_memory(lines)
    layers, layer_bytes = asked["loop_layers"], matching(lines, "limits")[0]["layer_bytes"]
    kinds = f"weights in {asked['weights']}, keys and values in {asked['kv_dtype']}"

    def speed(engine: str, context: str) -> str:
        own, plain = (samples.per_prompt(name, decode_speed, context)[0] for name in (engine, PLAIN))
        return f"{own:.2f}" if engine == PLAIN else f"{own:.2f} ({own / plain:.2f}×)"

    def passes(engine: str, context: str) -> str:
        seconds = samples.per_prompt(engine, lambda line: line["decode_seconds"], context)[0]
        line = samples.of_engine(engine, context)[0]
        count = line["stats"]["loaded_layers"] / layers
        share = count * layers * layer_bytes / seconds / memory
        return f"{count / (line['num_new_tokens'] - 1):.2f} × {1000 * seconds / count:.1f} ms ({100 * share:.0f} %)"

    def table(name: str, title: str, cell: Callable[[str, str], str]) -> Table:
        rows = []
        for context in samples.tasks:
            for share in asked["agreements"]:
                row = {"context": context, "right drafts": f"{share:g}", "`ar`": cell(PLAIN, context)}
                row |= {f"`{one}`": cell(f"selfspec:{one}@{share:g}", context) for one in asked["policies"][1:]}
                rows.append(row)
        return Table.of(name, title, rows)

    speeds = f"tokens/s after the first (× plain), for a share of right drafts which is set, not the model's; {kinds}"
    costs = f"passes over {layers} layers for a token × what one takes (share of the memory's speed, for weights alone)"
    return [table("imposed", speeds, speed), table("passes", costs, passes)]


def time_beside_reading(lines: Sequence[Line], context: int, speed: float) -> float:
    """Return t': seconds per token at this speed, less keys and values read at the memory's."""
    configuration, kv_bytes = lines[0]["configuration"], matching(lines, "limits")[0]["kv_bytes"]
    read = configuration["num_layers"] * kv_bytes * (context + configuration["max_new_tokens"] / 2)
    return float(1 / speed - read / fastest_memory(lines))
