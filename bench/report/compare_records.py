"""Two records side by side: the same engines, how much faster the second is, and whether anything but time changed."""

from __future__ import annotations

from collections.abc import Sequence

from bench.record import Line
from bench.report.summary import Samples
from bench.report.table import UNKNOWN, Table, number

_WHERE = ("cpu", "device", "threads", "dtype", "torch", "transformers", "commit")


def compare_records(before: Sequence[Line], after: Sequence[Line]) -> tuple[list[str], Table]:
    """Return what differs in how the two were made, and a row per engine that both measured.

    Raises ValueError if they have no engine in common.
    """
    notes = [
        f"{name}: {old} -> {new}"
        for part, chosen in (("configuration", None), ("provenance", _WHERE))
        for name in chosen or sorted({*before[0][part], *after[0][part]})
        if (old := before[0][part].get(name)) != (new := after[0][part].get(name))
    ]
    left, right = Samples(before), Samples(after)
    common = [name for name in left.engines if name in right.engines]
    if not common:
        raise ValueError("the two records have no engine in common")
    rows = []
    for name in common:
        old, new = left.speed(name), right.speed(name)
        rows.append(
            {
                "engine": right.engines[name],
                "tokens/s A": old.text("{:.1f}"),
                "tokens/s B": new.text("{:.1f}"),
                "B over A": f"{new.value / old.value:.2f}×",
                "eTPL A, B": _pair(left, right, name, "etpl_charged", "{:.4f}"),
                "acceptance A, B": _pair(left, right, name, "acceptance_rate", "{:.3f}"),
                "outputs of B": _outputs(left, right, name),
            }
        )
    return notes, Table.of("compare", "B against A", rows)


def _pair(left: Samples, right: Samples, engine: str, name: str, pattern: str) -> str:
    old, new = left.count(engine, name), right.count(engine, name)
    return UNKNOWN if old is None and new is None else f"{number(old, pattern)}, {number(new, pattern)}"


def _outputs(left: Samples, right: Samples, engine: str) -> str:
    """Whether an engine wrote the same tokens for the prompts that both have."""
    old, new = (
        {line["prompt"]: line["output"] for line in samples.outputs if line["engine"] == engine}
        for samples in (left, right)
    )
    shared = old.keys() & new.keys()
    if not shared:
        return "no prompt in common"
    changed = sum(old[prompt] != new[prompt] for prompt in shared)
    return "equal" if not changed else f"{changed} of {len(shared)} differ"
