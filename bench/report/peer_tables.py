"""The tables of `selfspec-bench peers`: engines side by side. Medians, and ratios of runs on the same prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median, quantiles

from bench.record import PLAIN, Line, matching
from bench.report.run_tables import run_tables
from bench.report.summary import ALL, Samples
from bench.report.table import Table, cross_table, names, number

Figure = Callable[[Line], float | None]


def prompt_speed(line: Line) -> float | None:
    """Return the tokens of the prompt per second until the first new token."""
    first = line["time_to_first_token"]
    return float(line["num_prompt_tokens"] / first) if first else None


def decode_speed(line: Line) -> float | None:
    """Return the tokens after the first per second; None for an engine that does not tell them apart."""
    return float((line["num_new_tokens"] - 1) / line["decode_seconds"]) if line["decode_seconds"] else None


def answer_speed(line: Line) -> float | None:
    """Return the new tokens per second of the whole call."""
    return float(line["num_new_tokens"] / line["seconds"])


def peer_tables(lines: Sequence[Line]) -> list[Table]:
    """Make all tables that the record has lines for."""
    samples = Samples(lines)
    tasks = names([*dict.fromkeys(samples.tasks.values()), ALL])
    decoding = "Decoding, tokens/s after the first: median over prompts"
    made = [
        _engine_table(lines, samples),
        _by_task("decode", decoding, samples, tasks, decode_speed),
        _by_task("prompts", "Prompts, tokens/s: median over prompts", samples, tasks, prompt_speed),
    ]
    return [*made, *_ratio_tables(samples, tasks), *run_tables(lines)]


def _engine_table(lines: Sequence[Line], samples: Samples) -> Table:
    def loading(engine: str, name: str) -> float | None:
        found = [line[name] for line in matching(lines, "loading", engine=engine) if line[name] is not None]
        return median(found) if found else None

    rows = [
        {
            "engine": label,
            "import, s": number(loading(name, "import_seconds"), "{:.1f}"),
            "load, s": number(loading(name, "load_seconds"), "{:.2f}"),
            "prompt tokens/s": number(_median(samples, name, ALL, prompt_speed), "{:.0f}"),
            "decoding tokens/s": number(_median(samples, name, ALL, decode_speed), "{:.0f}"),
            "tokens/s, whole answer": number(_median(samples, name, ALL, answer_speed), "{:.0f}"),
            "peak memory, MiB": number(loading(name, "added_bytes"), "{:.0f}", 2**-20),
        }
        for name, label in samples.engines.items()
    ]
    title = f"{lines[0]['configuration']['model']}: engines side by side, medians over prompts of all kinds"
    return Table.of("engines", title, rows, plotted="tokens/s, whole answer").known()


def _by_task(name: str, title: str, samples: Samples, tasks: dict[str, str], figure: Figure) -> Table:
    def cell(engine: str, task: str) -> str:
        return number(_median(samples, engine, task, figure), "{:.0f}")

    return cross_table(name, title, "engine", samples.engines, tasks, cell).known()


def _ratio_tables(samples: Samples, tasks: dict[str, str]) -> list[Table]:
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
        found = _paired(_of(samples, ours, task), _of(samples, theirs, task), figure)
        if len(found) == 1:
            return f"{found[0]:.2f}"
        low, middle, high = quantiles(found, n=4, method="inclusive")
        return f"{middle:.2f} ({low:.2f}–{high:.2f})"

    title = "Ratios of speeds in runs side by side: median over prompts, and in brackets the quartiles"
    return [cross_table("ratios", title, "speeds", rows, tasks, cell)] if rows else []


def _paired(ours: Sequence[Line], theirs: Sequence[Line], figure: Figure) -> list[float]:
    """Return the median ratio over repeats of each prompt."""
    other = {(line["prompt"], line["repeat"]): figure(line) for line in theirs}
    found: dict[str, list[float]] = {}
    for line in ours:
        mine, its = figure(line), other[line["prompt"], line["repeat"]]
        if mine is not None and its:
            found.setdefault(line["prompt"], []).append(mine / its)
    return [median(ratios) for ratios in found.values()]


def _of(samples: Samples, engine: str, task: str) -> list[Line]:
    return [line for line in samples.of_engine(engine) if task in (ALL, line["task"])]


def _median(samples: Samples, engine: str, task: str, figure: Figure) -> float | None:
    """Return the median over prompts of the median over repeats; None for what is not known."""
    found: dict[str, list[float]] = {}
    for line in _of(samples, engine, task):
        value = figure(line)
        if value is not None:
            found.setdefault(line["prompt"], []).append(value)
    return median(median(values) for values in found.values()) if found else None
