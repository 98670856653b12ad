"""What a reader sees in one glance: the few rows and columns of a record that answer its question."""

from __future__ import annotations

from collections.abc import Sequence

from bench.record import BEST_FIXED, KEPT, PLAIN, Line
from bench.report.context_tables import context_tables
from bench.report.roofline_tables import roofline_tables
from bench.report.run_tables import TRANSFORMERS
from bench.report.summary import Samples
from bench.report.sweep_tables import Sweep
from bench.report.table import UNKNOWN, Table, times

EARLY_EXIT = "transformers:early-exit"
PRECISIONS = {
    "as stored": ("selfspec:", "BF16"),
    "8 bits": ("selfspec:int8:", "Q8_0"),
    "4 bits": ("selfspec:int4:", "Q4_0"),
}
"""Precision of the weights -> how our engines begin, llama.cpp's format of the same size."""


def roofline_glance(lines: Sequence[Line]) -> list[Table]:
    """Speed and limit of each policy."""
    title = "tokens/s after the first token, what memory allows at the bytes that are read, and the ratio"
    return [roofline_tables(lines)[1].part("glance", title, ("tokens/s", "limit", "of limit"))]


def context_glance(lines: Sequence[Line]) -> list[Table]:
    """Speed at each length of the context."""
    title = "tokens/s after the first token (× plain decoding), over the length of the context"
    return [context_tables(lines)[0].part("glance", title, ("plain", "best fixed", "auto", "transformers"))]


def by_precision(lines: Sequence[Line]) -> list[Table]:
    """A row for each engine, a column for each precision of the weights; no table where all ran at one precision."""
    samples = Samples(lines)
    if "selfspec:int8:ar" not in samples.engines or TRANSFORMERS not in samples.engines:
        return []

    def speed(name: str) -> str:
        return f"{samples.speed(name).value:.1f}" if name in samples.engines else UNKNOWN

    columns = list(PRECISIONS.values())
    rows = (
        (samples.labels[TRANSFORMERS], speed(TRANSFORMERS), *(UNKNOWN for _ in columns[1:])),
        ("llama.cpp", *(speed(f"llama.cpp:{theirs}") for _, theirs in columns)),
        ("selfspec, plain decoding", *(speed(f"{ours}ar") for ours, _ in columns)),
        ("selfspec, `auto`", *(speed(f"{ours}auto") for ours, _ in columns)),
    )
    title = "Tokens per second by precision of the weights, prefill included"
    return [Table(name="precision", title=title, columns=("engine", *PRECISIONS), rows=rows)]


def engine_glance(lines: Sequence[Line]) -> list[Table]:
    """What our kernels give (plain over transformers) told apart from what speculation gives (over plain)."""
    samples = Samples(lines)

    def over(name: str, baseline: str | None) -> str:
        return UNKNOWN if baseline is None else f"{samples.speedup(name, baseline).value:.2f}×"

    rows = []
    for name in _chosen(samples):
        row = {"engine": samples.labels[name], "tokens/s": f"{samples.speed(name).value:.1f}"}
        if TRANSFORMERS in samples.engines:
            row["× transformers"] = over(name, TRANSFORMERS)
        if PLAIN in samples.engines:
            row["× plain"] = over(name, _plain_of(samples, name))
        rows.append(row)
    model, dtype = lines[0]["configuration"]["model"], lines[0]["provenance"]["dtype"]
    peers = "; × transformers: kernels and speculation" if TRANSFORMERS in samples.engines else ""
    title = f"{model[0].upper()}{model[1:]}, {dtype}, prefill included. × plain: speculation alone{peers}"
    return [Table.of("glance", title, rows)]


def _chosen(samples: Samples) -> list[str]:
    """transformers and its fastest early exit, other peers, plain decoding, `auto`, the fastest other policy, the oracle."""

    def fastest(names: list[str]) -> list[str]:
        return sorted(names, key=lambda name: samples.speed(name).value)[-1:]

    peers = [name for name in samples.engines if not name.startswith("selfspec:")]
    exits = [name for name in peers if name.startswith(EARLY_EXIT)]
    ours = [name for name in samples.engines if name not in peers]
    main = [name for name in ours if name.endswith((":ar", ":auto", ":auto" + KEPT))]
    rest = [name for name in ours if name not in main and name != BEST_FIXED]
    kept = [*(name for name in peers if name not in exits), *fastest(exits), *main, *fastest(rest)]
    return kept + [name for name in ours if name == BEST_FIXED]


def _plain_of(samples: Samples, engine: str) -> str | None:
    """Plain decoding on the same weights: of "selfspec:int8:auto" that is "selfspec:int8:ar"."""
    plain = [name for name in samples.engines if name.startswith("selfspec:") and name.endswith(":ar")]
    return max((name for name in plain if engine.startswith(name.removesuffix("ar"))), key=len, default=None)


def sweep_glance(lines: Sequence[Line]) -> list[Table]:
    """The settings that were timed, fastest first; nothing where the whole table is as short."""
    sweep = Sweep.of(lines)
    if len(sweep.axes) != 2:
        return []
    timed = sorted(sweep.measured, key=lambda place: -sweep.measured[place].value)
    rows = (
        {
            "policy": f"`{sweep.cells[place]['policy']}`",
            "measured, prefill included": times(sweep.measured[place]),
            "predicted, decoding alone": f"{sweep.cells[place]['predicted_speedup']:.2f}×",
        }
        for place in timed
    )
    return [Table.of("glance", "The settings that were timed, fastest first: speed-up over plain decoding", rows)]
