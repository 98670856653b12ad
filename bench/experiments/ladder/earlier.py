"""What a ladder need not measure again: the checkpoints that its record already has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.experiments.ladder.rungs import Rung
from bench.provenance import weights_digest
from bench.record import Line, matching, read_parts, read_record
from bench.sources import parts_of

_GROWS = ("model", "rungs", "training")
"""What a record's configuration says of all checkpoints together."""


def measured_before(output: Path, first: Line, rungs: Sequence[Rung]) -> list[Line]:
    """The lines, but for the first one, of the checkpoints that are whole in the record or in what it left when it broke off.

    first: the first line of the record to be made. A checkpoint with other weights than then is measured again.
    Raises ValueError if the lines are of other code or of other options.
    """
    lines = read_parts(output) or (read_record(output) if output.exists() else [])
    if not lines:
        return []
    before, now = _decisive(lines[0]), _decisive(first)
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if changed:
        raise ValueError(
            f"cannot resume: the record was made with another {', '.join(changed)}; do the same again, or leave out --resume"
        )
    digests = {line["rung"]: line["weights_digest"] for line in matching(lines, "rung")}
    same = {rung.name for rung in rungs if rung.name in digests and digests[rung.name] == weights_digest(rung.path)}
    return [line for line in lines[1:] if line["rung"] in same]


def _decisive(first: Line) -> dict[str, Any]:
    options = {name: value for name, value in first["configuration"].items() if name not in _GROWS}
    where = first["provenance"]
    digests = where.get("sources") or {}
    code = {part: digests.get(part) for part in parts_of([first])}
    return {**options, "code": code, "dtype": where["dtype"], "quick": where.get("quick")}
