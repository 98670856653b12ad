"""The tables of many texts at once: throughput over their number, and what a joining prompt delays."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from bench.record import Line, matching
from bench.report.table import UNKNOWN, Table, counted, cross_table, subject


def batch_headline(lines: Sequence[Line]) -> str:
    """What decoding texts together gains."""
    sizes = _sizes(lines)
    most = sizes[-1]
    parts = []
    for name, label in lines[0]["engines"].items():
        speed, alone = _speed(lines, name, most), _speed(lines, name, sizes[0])
        if speed and alone:
            parts.append(f"{label} {speed:.0f} tokens/s ({speed / alone:.1f} times one text's)")
    return f"{subject(lines)}, {most} texts decoded together: {', '.join(parts)}."


def batch_tables(lines: Sequence[Line]) -> list[Table]:
    """Throughput while all decode, then with prompts; then waiting."""
    sizes, engines = _sizes(lines), lines[0]["engines"]
    plain = next(iter(engines))
    columns = {size: counted(size, "text") for size in sizes}
    doubtful = {engine: _slow_passes(lines, engine) if engine.endswith(":ar") else set() for engine in engines}

    def decoding(engine: str, size: int) -> str:
        speed, base = _speed(lines, engine, size, "decode_"), _speed(lines, plain, size, "decode_")
        alone = _speed(lines, engine, sizes[0], "decode_")
        if speed is None or base is None or alone is None:
            return UNKNOWN
        over_plain = "" if engine == plain else f", {speed / base:.2f}× plain"
        mark = "†" if size in doubtful[engine] else ""
        return f"{speed:.1f}{mark} ({speed / alone:.2f}× one text{over_plain})"

    def whole(engine: str, size: int) -> str:
        speed, base = _speed(lines, engine, size), _speed(lines, plain, size)
        return UNKNOWN if not speed or not base else f"{speed:.1f} ({speed / base:.2f}×)"

    title = "Tokens/s of all texts together while they decode"
    if any(doubtful.values()):
        title += (
            ". †: a pass took longer than one for more texts, so the machine was slow, and ratios to this are too high"
        )
    tables = [
        cross_table("decoding", title, "engine", engines, columns, decoding).known(),
        cross_table("batch", "Tokens/s with prompts included, and beside plain", "engine", engines, columns, whole),
    ]
    joining = [
        {
            "": f"{line['texts']} texts, a prompt of {line['prompt_tokens']} tokens joins",
            "before, median": f"{1000 * line['before_median']:.0f}",
            "while it is read, median": f"{1000 * line['reading_median']:.0f}",
            "longest": f"{1000 * line['reading_longest']:.0f}",
            "pieces": str(line["steps"]),
        }
        for line in matching(lines, "joining")
    ]
    if joining:
        tables.append(Table.of("joining", "Time between tokens of texts that decode, ms", joining))
    return tables


def _sizes(lines: Sequence[Line]) -> list[int]:
    return sorted({line["texts"] for line in matching(lines, "batch")})


def _slow_passes(lines: Sequence[Line], engine: str) -> set[int]:
    """The numbers of texts for which plain decoding's pass took longer, by more than noise, than one for more texts."""
    speeds = {size: _speed(lines, engine, size, "decode_") for size in _sizes(lines)}
    seconds = {size: size / speed for size, speed in speeds.items() if speed}
    return {size for size in seconds if any(seconds[size] > 1.05 * seconds[more] for more in seconds if more > size)}


def _speed(lines: Sequence[Line], engine: str, texts: int, when: str = "") -> float | None:
    """Tokens per second, median of the repeats. when: "decode_" for the time in which all texts decode."""
    runs = [line for line in matching(lines, "batch", engine=engine, texts=texts) if line[f"{when}seconds"]]
    return median(line[f"{when}tokens"] / line[f"{when}seconds"] for line in runs) if runs else None
