"""Tables of the kernels' variants: each beside the last, which the others are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from bench.experiments.variants.one_variant import IN, OUT
from bench.record import Line, matching
from bench.report.table import Table


def variants_headline(lines: Sequence[Line]) -> str:
    """Which variants, and on what."""
    about = lines[0]["configuration"]
    return (
        f"Variants {', '.join(about['variants'])} of the kernels on {lines[0]['provenance']['cpu']}; model: {about['model']};"
        f" medians of {about['repeats']} processes each."
    )


def variants_tables(lines: Sequence[Line]) -> list[Table]:
    """Products in GB/s of weights and GFLOP/s, then whole models in tokens per second; ratios to the last variant."""
    about = lines[0]["configuration"]
    names = about["variants"]
    found = matching(lines, "product")
    tables = []
    if found:
        rows = list(dict.fromkeys(line["rows"] for line in found))
        table = [
            {
                "weights": kind,
                "variant": name,
                **{str(count): _product(lines, kind, name, count, names[-1]) for count in rows},
            }
            for kind in dict.fromkeys(line["weights"] for line in found)
            for name in names
        ]
        title = f"One product with a {OUT} x {IN} matrix, by rows: GB/s of weights, GFLOP/s; over {names[-1]}'s speed"
        tables.append(Table.of("variant_products", title, table))
    models = matching(lines, "model")
    if models:
        table = [
            {"weights": kind, "": what, **{name: _model(lines, kind, what, name, names[-1]) for name in names}}
            for kind in dict.fromkeys(line["weights"] for line in models)
            for what in dict.fromkeys(line["what"] for line in models)
        ]
        title = f"{about['model']}, tokens per second; {about['texts']} texts together; over {names[-1]}'s"
        tables.append(Table.of("variant_models", title, table))
    return tables


def _product(lines: Sequence[Line], kind: str, variant: str, rows: int, base: str) -> str:
    def seconds(name: str) -> float:
        return median(line["seconds"] for line in matching(lines, "product", weights=kind, variant=name, rows=rows))

    own = matching(lines, "product", weights=kind, variant=variant, rows=rows)[0]
    taken = seconds(variant)
    speed = f"{own['bytes'] / taken / 1e9:.1f}, {2 * rows * OUT * IN / taken / 1e9:.0f}"
    return speed if variant == base else f"{speed} ({seconds(base) / taken:.2f})"


def _model(lines: Sequence[Line], kind: str, what: str, variant: str, base: str) -> str:
    def speed(name: str) -> float:
        found = matching(lines, "model", weights=kind, what=what, variant=name)
        return median(line["tokens_per_second"] for line in found)

    own = speed(variant)
    return f"{own:.0f}" if variant == base else f"{own:.0f} ({own / speed(base):.2f})"
