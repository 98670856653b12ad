"""Two records side by side: the same engines, how much faster the second is, and whether anything but time changed."""

from __future__ import annotations

from collections.abc import Sequence

from bench.record import Line
from bench.report.summary import Samples
from bench.report.table import UNKNOWN, Table, number, spread_text

_CONTEXT = ("model", "weights_digest", "prompts_digest", "max_new_tokens", "runner")
_SAMPLING = ("do_sample", "temperature", "top_p", "top_k", "seed")
_MACHINE = ("cpu", "device", "threads", "dtype", "torch", "transformers", "commit")


def compare_records(before: Sequence[Line], after: Sequence[Line]) -> tuple[list[str], Table]:
    """What differs in how the two were made, and a row per engine that both measured.

    Raises ValueError if they have no engine in common.
    """
    notes = [
        f"{name}: {old} -> {new}"
        for part, names in (("configuration", (*_CONTEXT, *_SAMPLING)), ("provenance", _MACHINE))
        for name in names
        if (old := before[0][part].get(name)) != (new := after[0][part].get(name))
    ]
    left, right = Samples(before), Samples(after)
    common = [name for name in left.engines if name in right.engines]
    if not common:
        raise ValueError("the two records have no engine in common")
    rows = []
    for name in common:
        old, new = left.summary(name), right.summary(name)
        rows.append(
            (
                right.labels[name],
                spread_text(old.tokens_per_second),
                spread_text(new.tokens_per_second),
                f"{new.tokens_per_second.value / old.tokens_per_second.value:.2f}×",
                _pair(old.etpl, new.etpl, "{:.4f}"),
                _pair(old.acceptance_rate, new.acceptance_rate, "{:.3f}"),
                _outputs(left, right, name),
            )
        )
    columns = ("engine", "tokens/s A", "tokens/s B", "B over A", "eTPL A, B", "acceptance A, B", "outputs of B")
    return notes, Table(name="compare", title="B against A", columns=columns, rows=tuple(rows))


def _pair(old: float | None, new: float | None, pattern: str) -> str:
    return UNKNOWN if old is None and new is None else f"{number(old, pattern)}, {number(new, pattern)}"


def _outputs(left: Samples, right: Samples, engine: str) -> str:
    """True if an engine wrote the same tokens for the prompts of both."""
    old, new = (
        {line["prompt"]: line["output"] for line in samples.outputs if line["engine"] == engine}
        for samples in (left, right)
    )
    shared = old.keys() & new.keys()
    if not shared:
        return "no prompt in common"
    changed = sum(old[prompt] != new[prompt] for prompt in shared)
    return "equal" if not changed else f"{changed} of {len(shared)} differ"
