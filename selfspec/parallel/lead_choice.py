"""How far to draft ahead, worked out from the times that both stages take and from how many drafts are accepted.

SPIDE (2025) tunes this for each pair of models; here it is what the simulation of `overlap_timing` finds best.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import log2

from selfspec.parallel.overlap_timing import LONGEST, Stages, best_lead

_RECONSIDERED = 24  # verifications between two looks at how far to draft ahead
_START = 0.7  # acceptance that is assumed before any is known
_FIRST_LEAD = (2, 2)

Lead = tuple[int, int]
"""(rows, ahead): how many drafts a verification waits for, and how many may lie ahead of it."""


class LeadChoice:
    """The lead to keep, and what is known for choosing it. Lasts longer than a text.

    fixed: to keep to, None to work it out. overlap: False lets each stage wait for the other. draft_seconds: of a draft step,
    0 before the first. Raises ValueError for a lead that is none.
    """

    def __init__(self, fixed: Lead | None = None, overlap: bool = True) -> None:
        if fixed is not None and not (1 <= fixed[0] <= LONGEST and fixed[1] >= 1):
            raise ValueError(f"lead must be (rows, ahead), rows in [1, {LONGEST}] and ahead at least 1, got {fixed}")
        self.fixed, self.overlap = fixed, overlap
        self.draft_seconds = 0.0
        self._verifications = 0
        self._chosen = _FIRST_LEAD
        self._times: dict[int, float] = {}  # seconds of verifications, by their rows
        self._acceptance = _START

    @property
    def lead(self) -> Lead:
        return self.fixed or self._chosen

    def most_waiting(self, lead: Lead) -> int:
        """Drafts that may wait: without overlap those that a verification takes, and no more until it is over."""
        return sum(lead) if self.overlap else lead[0]

    def note_draft(self, seconds: float) -> None:
        """seconds: of a draft step, 0 if unknown."""
        if seconds:
            self.draft_seconds += 0.05 * (seconds - self.draft_seconds) if self.draft_seconds else seconds

    def note_verification(self, rows: int, accepted: int, seconds: float) -> None:
        """rows: that were judged, of which so many were accepted."""
        before = self._times.get(rows, seconds)
        self._times[rows] = before + 0.2 * (seconds - before)
        judged = accepted + (accepted < rows)
        self._acceptance += 0.02 * judged * (accepted / judged - self._acceptance)
        self._verifications += 1
        if self.fixed is None and self._verifications % _RECONSIDERED == 0 and self.draft_seconds:
            self._chosen = best_lead_of(self.draft_seconds, _rising(self._times), self._acceptance)


def best_lead_of(draft: float, verify: Sequence[float], acceptance: float) -> Lead:
    """`best_lead` for seconds of a draft step, and of verifications of 1, 2, .. rows.

    Remembered for times and an acceptance that are nearly alike, since trying all leads takes as long as some rounds.
    """
    few, many = verify[0] / draft, verify[-1] / verify[0]
    return _best_lead_near(round(4 * log2(few)), round(4 * log2(many)), len(verify), round(acceptance, 1))


@lru_cache(maxsize=1024)
def _best_lead_near(few: int, many: int, rows: int, acceptance: float) -> Lead:
    """few, many: in quarters of a power of two, what one row costs in draft steps, and all rows in single ones."""
    first, last = 2 ** (few / 4), 2 ** ((few + many) / 4)
    verify = tuple(first + (last - first) * row / max(rows - 1, 1) for row in range(rows))
    return best_lead(Stages(draft=1.0, verify=verify, catch_up=0.0), acceptance)


def _rising(times: dict[int, float]) -> tuple[float, ...]:
    """Seconds of 1, 2, .. rows from those of some numbers of rows: never less than for fewer."""
    rows = sorted(times)
    found, most = [], 0.0
    for count in range(1, rows[-1] + 1):
        nearest = min(rows, key=lambda one: abs(one - count))
        most = max(most, times[nearest])
        found.append(most)
    return tuple(found)
