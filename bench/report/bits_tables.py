"""The tables of `selfspec-bench peers --converted`: engines by bits, who is first, and what each rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from bench.record import Line, matching
from bench.report.table import UNKNOWN, Table, counted, number, subject
from selfspec.engine.stats import mean

Values = dict[tuple[int, str], dict[str, "float | None"]]
"""Figures by their names, by bits and engine."""
PLAIN_ENDING = ":ar"
"""Ends the name of an engine of ours without speculation. What a user gets without a word is the default policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A column. value: of an engine's lines at some bits, None where it is not known. most: whether the highest is best."""

    title: str
    pattern: str
    value: Callable[[Sequence[Line], Sequence[Line]], float | None]
    most: bool


def _speed(tokens: str, seconds: str, alone: bool) -> Callable[[Sequence[Line], Sequence[Line]], float | None]:
    """Tokens per second: median over repeats of each prompt (or of the texts together), then over prompts."""

    def value(runs: Sequence[Line], loading: Sequence[Line]) -> float | None:
        found: dict[int, list[float]] = {}
        for line in runs:
            if (line["texts"] == 1) is alone and line[seconds]:
                found.setdefault(line["group"], []).append(line[tokens] / line[seconds])
        return median(median(speeds) for speeds in found.values()) if found else None

    return value


def _loading(name: str) -> Callable[[Sequence[Line], Sequence[Line]], float | None]:
    def value(runs: Sequence[Line], loading: Sequence[Line]) -> float | None:
        return median(line[name] for line in loading)

    return value


def _memory(runs: Sequence[Line], loading: Sequence[Line]) -> float | None:
    """MiB beyond what the process had before, of the process that was measured."""
    last = loading[-1]
    before, whole = last["bytes_before"], last["peak_bytes"]
    return None if None in (before, whole) else (max(whole, last["peak_loading_bytes"]) - before) / 2**20


def figures(texts: int) -> dict[str, Figure]:
    """By name, in the order of the columns. texts: that were decoded together."""
    many = counted(texts, "text")
    decoding, prompt = ("decode_tokens", "decode_seconds"), ("prompt_tokens", "prompt_seconds")
    return {
        "decode 1": Figure(
            title="decoding, 1 text, tokens/s", pattern="{:.0f}", value=_speed(*decoding, True), most=True
        ),
        "decode n": Figure(
            title=f"decoding, {many}, tokens/s", pattern="{:.0f}", value=_speed(*decoding, False), most=True
        ),
        "prompt 1": Figure(title="prompt, 1 text, tokens/s", pattern="{:.0f}", value=_speed(*prompt, True), most=True),
        "prompt n": Figure(
            title=f"prompts, {many}, tokens/s", pattern="{:.0f}", value=_speed(*prompt, False), most=True
        ),
        "load": Figure(title="load, s", pattern="{:.2f}", value=_loading("load_seconds"), most=False),
        "memory": Figure(title="peak memory, MiB", pattern="{:.0f}", value=_memory, most=False),
    }


def bits_headline(lines: Sequence[Line]) -> str:
    """What was measured."""
    configuration = lines[0]["configuration"]
    alone, many = configuration["texts"]
    engines = counted(len(lines[0]["engines"]), "engine")
    return (
        f"{subject(lines)}, greedy: {engines}, {alone} and {many} texts, {configuration['max_new_tokens']} new tokens "
        f"each, {counted(configuration['repeats'], 'run')} of each."
    )


def bits_tables(lines: Sequence[Line]) -> list[Table]:
    """Who is first in each row; all engines; what each rounds, and which were left out."""
    chosen = figures(lines[0]["configuration"]["texts"][1])
    values = {
        (bits, engine): {
            name: figure.value(
                matching(lines, "batch", engine=engine, bits=bits), matching(lines, "loading", engine=engine, bits=bits)
            )
            for name, figure in chosen.items()
        }
        for bits in _bits(lines)
        for engine in _engines(lines, bits)
    }
    return [_first_table(lines, chosen, values), _engine_table(lines, chosen, values), _rounding_table(lines)]


def _bits(lines: Sequence[Line]) -> list[int]:
    return sorted({line["bits"] for line in matching(lines, "loading")}, reverse=True)


def _engines(lines: Sequence[Line], bits: int) -> list[str]:
    measured = {line["engine"] for line in matching(lines, "loading", bits=bits)}
    return [name for name in lines[0]["engines"] if name in measured]


def _first_table(lines: Sequence[Line], chosen: dict[str, Figure], values: Values) -> Table:
    """The first engine of each row in bold; then ours where that is another, or the next one. Ours is the default policy."""
    labels = lines[0]["engines"]

    def cell(name: str, bits: int) -> str:
        figure = chosen[name]
        best: dict[str, float] = {}
        for (own_bits, engine), found in values.items():
            value = found[name]
            if own_bits == bits and value is not None and not engine.endswith(PLAIN_ENDING):
                best[str(labels[engine]).partition(",")[0]] = value
        order = sorted(best, key=lambda family: best[family], reverse=figure.most)
        if not order:
            return UNKNOWN
        place = order.index("selfspec") if "selfspec" in order else 0
        beside = order[place] if place else (order[1] if len(order) > 1 else None)
        text = f"**{order[0]} {figure.pattern.format(best[order[0]])}**"
        if beside is None:
            return text
        rank = f" ({_ordinal(place + 1)})" if place else ""
        return f"{text}, {beside} {figure.pattern.format(best[beside])}{rank}"

    rows = (
        {"": figure.title, **{f"{bits} bits": cell(name, bits) for bits in _bits(lines)}}
        for name, figure in chosen.items()
    )
    title = (
        f"{lines[0]['configuration']['model']}: the first engine in bold, then selfspec with its place, or the next one"
    )
    return Table.of("first", title, rows)


def _ordinal(place: int) -> str:
    return f"{place}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(place, 'th') }"


def _engine_table(lines: Sequence[Line], chosen: dict[str, Figure], values: Values) -> Table:
    rows = []
    for bits in _bits(lines):
        rows.append({"engine": f"**{bits} bits**", **dict.fromkeys((figure.title for figure in chosen.values()), "")})
        for engine in _engines(lines, bits):
            found = values[bits, engine]
            cells = {figure.title: number(found[name], figure.pattern) for name, figure in chosen.items()}
            rows.append({"engine": lines[0]["engines"][engine], **cells})
    title = f"{lines[0]['configuration']['model']}: engines by the bits of the weights, medians"
    return Table.of("engines", title, rows)


def _rounding_table(lines: Sequence[Line]) -> Table:
    rows = []
    for bits in _bits(lines):
        for engine in _engines(lines, bits):
            loading = matching(lines, "loading", engine=engine, bits=bits)[-1]
            shares = [line["equal_share"] for line in matching(lines, "batch", engine=engine, bits=bits)]
            rows.append(
                {
                    "engine": lines[0]["engines"][engine],
                    "rounds, beyond the weights": loading["rounding"],
                    "import, s": f"{loading['import_seconds']:.1f}",
                    "text as plain decoding's": number(mean(shares), "{:.0f} %", 100),
                }
            )
    rows += [
        {
            "engine": line["label"],
            "rounds, beyond the weights": f"left out: {line['reason']}",
            "import, s": UNKNOWN,
            "text as plain decoding's": UNKNOWN,
        }
        for line in matching(lines, "lost")
    ]
    return Table.of(
        "rounding", "What each engine rounds, what its import takes, and how much of its text is the same", rows
    )


HEADINGS = {"first": "Who is first", "engines": "Engines side by side", "rounding": "What is rounded"}
"""The parts by name."""
