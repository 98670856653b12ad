"""The tables of many cores: speed over threads, the measured parts, and what follows for larger machines."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from bench.experiments.cores.pool_model import Machine, Pass
from bench.experiments.cores.pool_parts import PARTS
from bench.record import Line, matching
from bench.report.table import Table, cross_table, subject

MODELLED = (8, 16, 32, 64)
_PASSES = {
    "medium, 16 bits": ("medium", 2.0),
    "1B, 4 bits": ("llama3.2-1B", 0.56),
    "1B, 16 bits": ("llama3.2-1B", 2.0),
    "8B, 4 bits": ("llama3-8B", 0.56),
    "8B, 16 bits": ("llama3-8B", 2.0),
}
_LEAST, _MOST = 4, 1  # marks that a core reads at a time: the least cost, and the most
_WORDS = {"ar": "plain decoding", "auto": "auto", "prompt": "reading prompts"}


def cores_headline(lines: Sequence[Line]) -> str:
    """How fast the largest number of threads was, beside one thread for each core."""
    cores, most = lines[0]["provenance"]["cores"], max(_threads(lines))
    kept = [f"{_WORDS[what]} {_ratio(lines, what, most):.2f}" for what in _WORDS]
    return (
        f"{subject(lines)}. With {most} threads on {cores} cores, of the speed with {cores} threads: {', '.join(kept)}."
    )


def cores_tables(lines: Sequence[Line]) -> list[Table]:
    """Speeds, parts, model."""
    columns = {threads: str(threads) for threads in _threads(lines)}
    cores = lines[0]["provenance"]["cores"]

    def cell(what: str, threads: int) -> str:
        return f"{_speed(lines, what, threads):,.0f} ({_ratio(lines, what, threads):.2f})"

    title = f"tokens/s by the number of threads, on {cores} cores; in brackets the ratio to {cores} threads"
    speeds = cross_table("threads", title, "threads", _WORDS, columns, cell)
    return [speeds, *([_parts(lines)] if matching(lines, "part") else []), *_modelled(lines)]


def _parts(lines: Sequence[Line]) -> Table:
    numbers = sorted({line["threads"] for line in matching(lines, "part")})
    rows = []
    for name, words in PARTS.items():
        found = [
            [line["nanoseconds"] for line in matching(lines, "part", name=name, threads=count)] for count in numbers
        ]
        rows.append((words, *(f"{median(one):,.0f}" if one else "" for one in found)))
    return Table(
        name="pool_parts",
        title="Nanoseconds, medians of five, by the number of threads",
        columns=("", *map(str, numbers)),
        rows=tuple(rows),
    )


def _modelled(lines: Sequence[Line]) -> list[Table]:
    transfers = [line["nanoseconds"] for line in matching(lines, "part", name="transfer")]
    reading = matching(lines, "bandwidth")
    if not transfers or not reading:
        return []
    machine = Machine(
        near=1e-9 * median(transfers), thread_bytes=reading[0]["bytes_per_second"] / reading[0]["threads"]
    )
    phases = tuple(
        f"{1e6 * machine.phase(count, _LEAST):.1f} to {1e6 * machine.phase(count, _MOST):.1f}" for count in MODELLED
    )
    rows = [("a phase, µs", *phases)]
    for words, (shape, size) in _PASSES.items():
        one = Pass.of(shape, size)
        shares = (
            f"{100 * one.share(machine, count, _LEAST):.1f} to {100 * one.share(machine, count, _MOST):.0f} %"
            for count in MODELLED
        )
        rows.append((words, *shares))
    title = (
        "A model: what a phase costs by the number of threads, and which part of a pass of one row they all cost. Measured: "
        f"{1e9 * machine.near:.0f} ns for a transfer, {machine.thread_bytes / 1e9:.0f} GB/s for a thread. Assumed: "
        f"{1e9 * machine.far:.0f} ns beyond {machine.group} cores, {1e9 * machine.other:.0f} ns between sockets of "
        f"{machine.socket} cores, {machine.socket_bytes / 1e9:.0f} GB/s for a socket; a core sees {_LEAST} others at a time, "
        "or one"
    )
    return [Table(name="pool_model", title=title, columns=("", *map(str, MODELLED)), rows=tuple(rows))]


def _threads(lines: Sequence[Line]) -> list[int]:
    return sorted({line["threads"] for line in matching(lines, "cell")})


def _speed(lines: Sequence[Line], what: str, threads: int) -> float:
    return median(line["tokens"] / line["seconds"] for line in matching(lines, "cell", what=what, threads=threads))


def _ratio(lines: Sequence[Line], what: str, threads: int) -> float:
    """To as many threads as there are cores."""
    return _speed(lines, what, threads) / _speed(lines, what, lines[0]["provenance"]["cores"])
