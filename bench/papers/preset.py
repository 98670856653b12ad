"""A paper's preset, `NAME.json`: its tasks, arms, sampling, and claims with the authors' own numbers.

tasks: see `bench.papers.prompts`. arms: a policy by the arm's name, or one a task ("*": the others), with {placeholders} for
what calibration finds. kept: arms that keep what they learned from text to text. simulated: arms of
`bench.papers.spide_overlap`, and on how many devices. trained: options of `selfspec train-exit` by arm. sampling: arguments
of `generate` by temperature. claims: table, claim, theirs; and either verdict and why, or what is compared: of (an arm or
several), over (arms, the best of which counts), metric, expect ("more", "less", "same" within a margin, "below" a limit),
tasks, temperature; best: another metric to find the best arm by.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PAPERS = ("del", "spide", "pacer", "sd2", "dpace")
PLAIN = "ar"
Preset = Mapping[str, Any]
Claim = Mapping[str, Any]


def load_preset(paper: str, tables: Iterable[str] = ()) -> Preset:
    """Read a preset. tables: keep the claims of these alone. Raises ValueError for a paper or table that there is not."""
    if paper not in PAPERS:
        raise ValueError(f"there is no paper {paper!r}, but {', '.join(PAPERS)}")
    preset: Preset = json.loads((Path(__file__).parent / f"{paper}.json").read_text(encoding="utf-8"))
    known = list(dict.fromkeys(claim["table"] for claim in preset["claims"]))
    if unknown := [table for table in tables if table not in known]:
        raise ValueError(f"{paper} has no table {unknown[0]!r}, but {', '.join(known)}")
    wanted = [*tables] or known
    return {**preset, "claims": [claim for claim in preset["claims"] if claim["table"] in wanted]}


def arms_in(claim: Claim, *parts: str) -> list[str]:
    """List the arms that a claim names in "of", "over" or both."""
    named = [claim.get(part, []) for part in parts or ("of", "over")]
    return [arm for arms in named for arm in ([arms] if isinstance(arms, str) else arms)]


def arms_of(preset: Preset, temperature: float, task: str, quick: bool) -> list[str]:
    """List the arms that claims need of a task at a temperature, plain decoding first; nothing if none does."""
    claims = [claim for claim in preset["claims"] if claim.get("temperature", 0) == temperature]
    found = dict.fromkeys(arm for claim in claims if task in claim.get("tasks", [task]) for arm in arms_in(claim))
    chosen = [arm for arm in found if arm != PLAIN and (not quick or arm in preset["quick"])]
    return [PLAIN, *chosen] if chosen else []


def policy_of(preset: Preset, arm: str, task: str, found: Mapping[str, str]) -> str | None:
    """Return an arm's policy for a task; None if it has none, or if calibration found nothing for one of its placeholders."""
    policy = preset["arms"].get(arm, {})
    policy = policy if isinstance(policy, str) else policy.get(task, policy.get("*"))
    try:
        return None if policy is None else str(policy.format_map(found))
    except KeyError:
        return None
