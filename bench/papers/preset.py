"""A paper's preset, `NAME.json`: its tasks, arms, sampling, and claims with the authors' own numbers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAPERS = ("del", "spide", "pacer", "sd2", "dpace")
PLAIN = "ar"
Claim = Mapping[str, Any]
"""table, claim, theirs; and either verdict and why, or what is compared: of (an arm or several), over (arms, the best of which
counts), metric, expect, and where: tasks and temperature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """arms: a policy by the arm's name, or one a task ("*": the others), with {placeholders} for what calibration finds.

    sampling: arguments of `generate` by temperature. trained: options of `selfspec train-exit` by the name of an adapter.
    """

    paper: str
    title: str
    dtype: str
    max_new_tokens: int
    tasks: Mapping[str, Mapping[str, Any]]
    arms: Mapping[str, str | Mapping[str, str]]
    quick: Sequence[str]
    sampling: Mapping[str, Mapping[str, float]]
    claims: Sequence[Claim]
    published: Mapping[str, Sequence[int]]
    trained: Mapping[str, Mapping[str, Any]]
    notes: Sequence[str]

    @classmethod
    def load(cls, paper: str, tables: Iterable[str] = ()) -> Preset:
        """tables: keep the claims of these alone. Raises ValueError for a paper or table that there is not."""
        if paper not in PAPERS:
            raise ValueError(f"there is no paper {paper!r}, but {', '.join(PAPERS)}")
        fields = json.loads((Path(__file__).parent / f"{paper}.json").read_text(encoding="utf-8"))
        known = list(dict.fromkeys(claim["table"] for claim in fields["claims"]))
        if unknown := [table for table in tables if table not in known]:
            raise ValueError(f"{paper} has no table {unknown[0]!r}, but {', '.join(known)}")
        wanted = [*tables] or known
        fields["claims"] = [claim for claim in fields["claims"] if claim["table"] in wanted]
        return cls(paper=paper, **fields)

    def arms_of(self, temperature: float, task: str, quick: bool) -> list[str]:
        """List the arms that claims need of a task at a temperature, plain decoding first; nothing if none does."""
        found: dict[str, None] = {}
        for claim in self.claims:
            if "of" in claim and claim.get("temperature", 0) == temperature and task in claim.get("tasks", [task]):
                found |= dict.fromkeys([*arms_in(claim, "of"), *arms_in(claim, "over")])
        chosen = [arm for arm in found if arm != PLAIN and (not quick or arm in self.quick)]
        return [PLAIN, *chosen] if chosen else []

    def timed(self) -> set[str]:
        """Return the arms of claims in seconds."""
        claims = [claim for claim in self.claims if claim.get("metric") in ("seconds", "learning", "preverifying")]
        return {arm for claim in claims for part in ("of", "over") for arm in arms_in(claim, part)}

    def policy(self, arm: str, task: str, found: Mapping[str, str]) -> str | None:
        """Return an arm's policy for a task; None where one of its placeholders was not found."""
        policy = self.arms[arm]
        if not isinstance(policy, str):
            policy = policy[task] if task in policy else policy["*"]
        try:
            return policy.format_map(found)
        except KeyError:
            return None


def arms_in(claim: Claim, part: str) -> list[str]:
    """List the arms that a claim names in "of" or "over"."""
    named = claim.get(part, [])
    return [named] if isinstance(named, str) else list(named)
