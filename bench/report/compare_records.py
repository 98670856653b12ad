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
    """Return what differs in how the two were made, and a row per engine that both measured.

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
            {
                "engine": right.labels[name],
                "tokens/s A": spread_text(old.tokens_per_second),
                "tokens/s B": spread_text(new.tokens_per_second),
                "B over A": f"{new.tokens_per_second.value / old.tokens_per_second.value:.2f}×",
                "eTPL A, B": _pair(old.etpl, new.etpl, "{:.4f}"),
                "acceptance A, B": _pair(old.acceptance_rate, new.acceptance_rate, "{:.3f}"),
                "outputs of B": _outputs(left, right, name),
            }
        )
    return notes, Table.of("compare", "B against A", rows)


def _pair(old: float | None, new: float | None, pattern: str) -> str:
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
