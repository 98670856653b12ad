"""The tables of copied drafts: what each policy gains over plain decoding, by kind of prompt, measured and estimated."""

from __future__ import annotations

from collections.abc import Sequence

from bench.experiments.copying.gain import by_engine
from bench.record import Line
from bench.report.table import Table, number, subject
from selfspec.engine.stats import ratio


def copying_headline(lines: Sequence[Line]) -> str:
    """What the estimate says, in a sentence."""
    shape = lines[0]["configuration"]["costs_of"]
    gains = {name: _over_plain(lines, name, None, "estimated_seconds") for name in lines[0]["engines"]}
    told = ", ".join(f"{lines[0]['engines'][name]} {gain:.2f}" for name, gain in gains.items() if gain is not None)
    return (
        f"{subject(lines)}. Tokens per second over plain decoding of the same engine, at the costs of {shape}: {told}."
    )


def copying_tables(lines: Sequence[Line]) -> list[Table]:
    """Gains by task, estimated and measured, and where committed tokens came from."""
    tasks = sorted({line["task"] for line in lines if line["kind"] == "gain"})
    names = lines[0]["engines"]
    columns = ("engine", *tasks, "all")
    tables = []
    for name, title in (
        ("estimated_seconds", f"Gain over plain decoding, at the costs of {lines[0]['configuration']['costs_of']}"),
        ("seconds", "Gain over plain decoding, measured on this model"),
    ):
        rows = tuple(
            (names[engine], *(number(_over_plain(lines, engine, task, name), "{:.2f}") for task in (*tasks, None)))
            for engine in names
        )
        tables.append(Table(name=f"gain_{name}", title=title, columns=columns, rows=rows))
    tables.append(
        Table(
            name="copy_sources",
            title="Where committed tokens came from, and how many a round brought",
            columns=("engine", "copied", "drafted at an exit", "the model's own", "tokens per round"),
            rows=tuple((names[engine], *_sources(found)) for engine, found in by_engine(lines).items()),
        )
    )
    return tables


def _speed(found: Sequence[Line], name: str) -> float | None:
    """Tokens per second over all prompts together."""
    if not found or any(line[name] is None for line in found):
        return None
    return ratio(sum(line["tokens"] for line in found), sum(line[name] for line in found))


def _over_plain(lines: Sequence[Line], engine: str, task: str | None, name: str) -> float | None:
    """An engine's speed over plain decoding with the same library."""
    found = by_engine(lines, task)
    plain = "transformers:generate" if engine.startswith("transformers") else "ar"
    speed, base = _speed(found.get(engine, []), name), _speed(found.get(plain, []), name)
    return None if speed is None or base is None else ratio(speed, base)


def _sources(found: Sequence[Line]) -> tuple[str, ...]:
    tokens = sum(line["tokens"] for line in found)
    copied, drafted = (sum(line[name] for line in found) for name in ("copied", "drafted"))
    rounds = sum(line["rounds"] for line in found)
    shares = (f"{part / tokens:.2f}" for part in (copied, drafted, tokens - copied - drafted))
    return (*shares, f"{tokens / rounds:.2f}")
