"""What a check of a server found, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from selfspec.analysis.server_check.client import Endpoint
from selfspec.analysis.server_check.forks import Fork

Section = Literal["greedy", "without speculation", "speculation", "stops", "seeds"]
Verdict = Literal["exact", "near-ties", "differs", "incomplete"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """A text that differs from the one it should equal. prompt: its index."""

    prompt: int
    fork: Fork


@dataclass(frozen=True, slots=True, kw_only=True)
class StopFault:
    """A text that a stop string did not cut exactly before its first occurrence. expected, got: how the two texts end."""

    prompt: int
    stop: str
    expected: str
    got: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WayFinding:
    """The texts of one way to ask, beside those of one request alone.

    compared: number of texts. partings: those that differ. busy: requests that the server had no room for (429, 503).
    failed: requests that failed otherwise; error: the first one's. unsupported: why the server refuses this way at all.
    overlapped: whether answers came at the same time; None if that cannot be seen.
    """

    section: Section
    name: str
    compared: int = 0
    partings: tuple[Parting, ...] = ()
    stop_faults: tuple[StopFault, ...] = ()
    busy: int = 0
    failed: int = 0
    error: str | None = None
    unsupported: str | None = None
    company: int = 1
    overlapped: bool | None = None

    @property
    def differing(self) -> int:
        return len(self.partings) + len(self.stop_faults)

    @property
    def near_ties(self) -> int:
        return sum(parting.fork.near_tie is True for parting in self.partings)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobFinding:
    """The log probabilities of equal tokens in two ways to ask.

    prompt, token: the indices where they differ most; None if nothing differs. unsupported: why nothing was compared.
    """

    name: str
    tokens: int = 0
    largest_difference: float = 0.0
    prompt: int | None = None
    token: int | None = None
    allowed: float = 0.0
    unsupported: str | None = None

    @property
    def passed(self) -> bool:
        return self.unsupported is not None or self.largest_difference <= self.allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFindings:
    """All of a check.

    url, model, plain: what was checked, and what it was compared with, if anything. requests: sent. characters: of all
    texts that others were compared with. near_tie: tolerance in nats. expect_seeds: whether a seeded text that is not
    repeated is a fault. seed_matters: whether another seed changes a text; None if that was not found out.
    """

    url: str
    model: str
    plain: str | None
    endpoint: Endpoint
    prompts: int
    max_tokens: int
    requests: int
    characters: int
    near_tie: float
    expect_seeds: bool
    ways: tuple[WayFinding, ...]
    logprobs: tuple[LogprobFinding, ...]
    seed_matters: bool | None

    def judged(self) -> Iterator[WayFinding]:
        """The ways that the verdict is about."""
        for way in self.ways:
            if way.section not in ("seeds", "without speculation") or (way.section == "seeds" and self.expect_seeds):
                yield way

    @property
    def verdict(self) -> Verdict:
        """ "near-ties": texts differ, but only where two tokens were almost equally likely. "incomplete": nothing differs,
        but not all was answered."""
        ways = [*self.judged()]
        beyond = sum(way.differing - (way.near_ties if way.section != "seeds" else 0) for way in ways)
        if beyond or not all(found.passed for found in self.logprobs):
            return "differs"
        if any(way.differing for way in ways):
            return "near-ties"
        if any(way.busy or way.failed for way in ways) or (self.expect_seeds and not self.seed_matters):
            return "incomplete"
        return "exact"

    @property
    def company_overlapped(self) -> bool | None:
        """Whether the server ever worked on several answers at once; None if that could not be seen."""
        seen = [way.overlapped for way in self.ways if way.company > 1 and way.overlapped is not None]
        return any(seen) if seen else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: everything, the shares of texts that differ, and the verdict. What is not finite becomes null."""
        described = asdict(self)
        for way, found in zip(described["ways"], self.ways):
            way["differing"], way["near_ties"] = found.differing, found.near_ties
            way["share_differing"] = found.differing / found.compared if found.compared else None
        for scores, finding in zip(described["logprobs"], self.logprobs):
            scores["passed"] = finding.passed
        described |= {"verdict": self.verdict, "company_overlapped": self.company_overlapped}
        finite: dict[str, Any] = _finite(described)
        return finite


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
