"""The tables of `selfspec-bench peers`: engines side by side. Medians, and ratios of runs on the same prompt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import median, quantiles

from bench.record import PLAIN, Line, matching
from bench.report.run_tables import run_tables
from bench.report.summary import ALL, Figure, Samples, answer_speed, decode_speed
from bench.report.table import UNKNOWN, Table, cross_table, names, number

_KIND = re.compile(r",?[ -](?:\w+-)?(?:BF16|F16|fp16|[a-zA-Z]+(\d)[\w]*)(?=,|$)")
"""Weights in an engine's label: of how many bits, if these are fewer than 16."""


def prompt_speed(line: Line) -> float | None:
    """Return the tokens of the prompt per second until the first new token."""
    first = line["time_to_first_token"]
    return float(line["num_prompt_tokens"] / first) if first else None


def peer_tables(lines: Sequence[Line]) -> list[Table]:
    """Make all tables that the record has lines for."""
    samples = Samples(lines)
    return [_engine_table(lines, samples), *_bits_table(lines, samples), *_ratio_tables(samples), *run_tables(lines)]


def _engine_table(lines: Sequence[Line], samples: Samples) -> Table:
    def loading(engine: str, name: str, pattern: str, factor: float = 1) -> str:
        found = [line[name] for line in matching(lines, "loading", engine=engine) if line.get(name) is not None]
        return number(median(found) if found else None, pattern, factor)

    def speed(engine: str, figure: Figure) -> str:
        found = samples.per_prompt(engine, figure)
        return number(median(found) if found else None, "{:.0f}")

    rows = [
        {
            "engine": label,
            "import, s": loading(name, "import_seconds", "{:.1f}"),
            "load, s": loading(name, "load_seconds", "{:.2f}"),
            "first token, s": loading(name, "first_seconds", "{:.2f}"),
            "prompt tokens/s": speed(name, prompt_speed),
            "decoding tokens/s": speed(name, decode_speed),
            "tokens/s, whole answer": speed(name, answer_speed),
            "peak memory, MiB": loading(name, "peak_bytes", "{:.0f}", 2**-20),
        }
        for name, label in samples.engines.items()
    ]
    title = f"{lines[0]['configuration']['model']}: engines side by side, medians over prompts of all kinds"
    return Table.of("engines", title, rows).known()


def _bits_table(lines: Sequence[Line], samples: Samples) -> list[Table]:
    """Put an engine's speeds with weights of 16, 8 and 4 bits side by side. None for a record of one kind of weights."""
    speeds: dict[tuple[str, str], str] = {}
    for name, label in samples.engines.items():
        kind = _KIND.search(label)
        bits = (kind and kind[1]) or "16"
        program = label if kind is None else label.replace(kind[0], "")
        found = samples.per_prompt(name, answer_speed)
        speeds[program, f"{bits} bits"] = number(median(found) if found else None, "{:.0f}")
    columns = [f"{bits} bits" for bits in (16, 8, 4)]
    if not {column for _, column in speeds} >= {*columns}:
        return []
    model = lines[0]["configuration"]["model"]
    title = f"{model}: tokens/s of whole answers, prompt included, by the bits of the weights"
    programs = names(dict.fromkeys(program for program, _ in speeds))
    table = cross_table("bits", title, "engine", programs, names(columns), lambda *key: speeds.get(key, UNKNOWN))
    return [table]


def _ratio_tables(samples: Samples) -> list[Table]:
    """Take ratios within a repeat on a prompt; the median of a prompt's; then median and quartiles over prompts."""
    if PLAIN not in samples.engines:
        return []
    rows: dict[tuple[str, str, Figure], str] = {}
    for name, label in samples.engines.items():
        short = label.removeprefix("selfspec, ")
        if name in ("llama.cpp", "ik_llama.cpp", "openvino:the file"):
            rows[PLAIN, name, decode_speed] = f"plain ÷ {short}, decoding"
            rows[PLAIN, name, prompt_speed] = f"plain ÷ {short}, prompts"
        elif name.startswith("selfspec:") and name != PLAIN:
            rows[name, PLAIN, decode_speed] = f"{short} ÷ plain, decoding"
            rows[name, PLAIN, answer_speed] = f"{short} ÷ plain, whole answers"

    def cell(row: tuple[str, str, Figure], task: str) -> str:
        ours, theirs, figure = row
        other = {(line["prompt"], line["repeat"]): figure(line) for line in samples.of_engine(theirs, task)}

        def times(line: Line) -> float | None:
            mine, its = figure(line), other[line["prompt"], line["repeat"]]
            return mine / its if mine is not None and its else None

        found = samples.per_prompt(ours, times, task)
        if len(found) == 1:
            return f"{found[0]:.2f}"
        low, middle, high = quantiles(found, n=4, method="inclusive")
        return f"{middle:.2f} ({low:.2f}–{high:.2f})"

    title = "Ratios of speeds in runs side by side: median over prompts, and in brackets the quartiles"
    return [cross_table("ratios", title, "speeds", rows, names([*samples.tasks, ALL]), cell)] if rows else []
