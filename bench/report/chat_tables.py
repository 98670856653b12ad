"""The tables of `selfspec-bench chat`: engines on one file, by kind of prompt. Medians, and ratios of runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median, quantiles

from bench.grid import ALL
from bench.record import PLAIN, Line, matching
from bench.report.run_tables import round_table, source_tables
from bench.report.summary import Samples
from bench.report.table import Table, cross_table, names, number

LLAMA_CPP = "llama.cpp"
Figure = Callable[[Line], float]


def prompt_speed(line: Line) -> float:
    """Tokens of the prompt per second until the first new token."""
    return float(line["num_prompt_tokens"] / line["time_to_first_token"])


def decode_speed(line: Line) -> float:
    """Tokens after the first per second."""
    return float((line["num_new_tokens"] - 1) / line["decode_seconds"])


def answer_speed(line: Line) -> float:
    """Return the new tokens per second of the whole call."""
    return float(line["num_new_tokens"] / line["seconds"])


FIGURES: dict[str, Figure] = {"prompt": prompt_speed, "decoding": decode_speed, "whole answer": answer_speed}


def chat_tables(lines: Sequence[Line]) -> list[Table]:
    """All that the record has lines for."""
    samples = Samples(lines)
    kinds = names([*dict.fromkeys(samples.tasks.values()), ALL])
    return [
        _engine_table(lines, samples),
        _speed_table("decode", "Decoding, tokens/s after the first: median over prompts", samples, kinds, decode_speed),
        _speed_table("prompts", "Prompts, tokens/s: median over prompts", samples, kinds, prompt_speed),
        _ratio_table(samples, kinds),
        *source_tables(samples),
        round_table(samples),
    ]


def _engine_table(lines: Sequence[Line], samples: Samples) -> Table:
    rows = []
    for name, label in samples.engines.items():
        loading = matching(lines, "loading", engine=name)
        own = matching(samples.samples, "sample", engine=name)
        before, whole = loading[-1]["bytes_before"], loading[-1]["peak_bytes"]
        peak = None if None in (before, whole) else max(whole, loading[-1]["peak_loading_bytes"]) - before
        rows.append(
            {
                "engine": label,
                "import, s": f"{median(line['import_seconds'] for line in loading):.1f}",
                "load, s": f"{median(line['load_seconds'] for line in loading):.2f}",
                "prompt tokens/s": f"{_median(own, prompt_speed):.0f}",
                "decoding tokens/s": f"{_median(own, decode_speed):.0f}",
                "tokens/s, whole answer": f"{_median(own, answer_speed):.0f}",
                "peak memory, MiB": number(peak, "{:.0f}", 2**-20),
            }
        )
    title = f"{lines[0]['configuration']['model']}: engines side by side, medians over prompts of all kinds"
    return Table.of("engines", title, rows)


def _speed_table(name: str, title: str, samples: Samples, kinds: dict[str, str], figure: Figure) -> Table:
    return cross_table(
        name,
        title,
        "engine",
        samples.engines,
        kinds,
        lambda engine, kind: f"{_median(_of(samples, engine, kind), figure):.0f}",
    )


def _comparisons(samples: Samples) -> dict[tuple[str, str, str], str]:
    """Engine, the one that it is compared with, and the figure -> what the row is called."""
    found = {
        (PLAIN, LLAMA_CPP, "decoding"): "plain ÷ llama.cpp, decoding",
        (PLAIN, LLAMA_CPP, "prompt"): "plain ÷ llama.cpp, prompts",
    }
    for name, label in samples.engines.items():
        if name.startswith("selfspec:") and name != PLAIN:
            short = label.removeprefix("selfspec, ")
            found[name, PLAIN, "decoding"] = f"{short} ÷ plain, decoding"
            found[name, PLAIN, "whole answer"] = f"{short} ÷ plain, whole answers"
    return {row: text for row, text in found.items() if {row[0], row[1]} <= samples.engines.keys()}


def _ratio_table(samples: Samples, kinds: dict[str, str]) -> Table:
    """Ratios within a repeat on a prompt; the median of a prompt's; then median and quartiles over prompts."""

    def cell(row: tuple[str, str, str], kind: str) -> str:
        ours, theirs, figure = row
        found = list(_paired(_of(samples, ours, kind), _of(samples, theirs, kind), FIGURES[figure]).values())
        if len(found) == 1:
            return f"{found[0]:.2f}"
        low, middle, high = quantiles(found, n=4, method="inclusive")
        return f"{middle:.2f} ({low:.2f}–{high:.2f})"

    title = "Ratios of speeds in runs side by side: median over prompts, and in brackets the quartiles"
    return cross_table("ratios", title, "speeds", _comparisons(samples), kinds, cell)


def _paired(ours: Sequence[Line], theirs: Sequence[Line], figure: Figure) -> dict[str, float]:
    """By prompt: the median ratio over repeats."""
    other = {(line["prompt"], line["repeat"]): figure(line) for line in theirs}
    found: dict[str, list[float]] = {}
    for line in ours:
        found.setdefault(line["prompt"], []).append(figure(line) / other[line["prompt"], line["repeat"]])
    return {prompt: median(ratios) for prompt, ratios in found.items()}


def _of(samples: Samples, engine: str, kind: str) -> list[Line]:
    return [line for line in matching(samples.samples, "sample", engine=engine) if kind in (ALL, line["task"])]


def _median(runs: Sequence[Line], figure: Figure) -> float:
    """Median over prompts of the median over repeats."""
    found: dict[str, list[float]] = {}
    for line in runs:
        found.setdefault(line["prompt"], []).append(figure(line))
    return median(median(values) for values in found.values())
