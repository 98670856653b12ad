"""What two stages on two devices would gain if the first drafts on while the second verifies: simulated.

Layers [0, E) and the drafts' head are on one device, layers [E, L) and the head on the other. Verification of n drafts takes
the n rows before them, whose exit states the first stage has by then; all n may be accepted, and no bonus token is drawn.
What was drafted ahead goes on from there. A rejection throws it away, and the first stage begins anew behind the correction.
Source: SPIDE (2025), Algorithm 1 and eq. 6, with rows sent as soon as the second stage is free instead of in windows of one
fixed length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from policies import MeasuredCost

LONGEST = 12
"""Drafts that are verified at once, and that may lie ahead, at most."""
ROWS, AHEAD = (1, 2, 3, 4, 6, 8), (1, 2, 3, 4, 6, 8, LONGEST)
_TRIAL = 400  # tokens of the text that settings are tried on


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Seconds of both stages' work.

    draft: a draft step. verify: of 1, 2, .. rows. catch_up: of a last row through the first stage, which a round without
    overlap needs. handover: of telling the other stage something. contention: by how much of itself each stage's work grows
    while the other one works, too: 0 on devices with memory of their own, 1 where both wait for the same memory bus.
    """

    draft: float
    verify: tuple[float, ...]
    catch_up: float
    handover: float = 0.0
    contention: float = 0.0

    @classmethod
    def of(cls, cost: MeasuredCost, exit_layer: int, *, handover: float = 0.0, contention: float = 0.0) -> Stages:
        """With the costs of one device on both."""
        rest = cost.num_layers - exit_layer
        verify = tuple(
            rest * layer + head for layer, head in zip(cost.layer_seconds, cost.head_seconds)
        )  # of as many rows as were timed
        return cls(
            draft=cost.drafting(exit_layer, 1),
            verify=verify,
            catch_up=exit_layer * cost.layer_seconds[0],
            handover=handover,
            contention=contention,
        )

    def verification(self, rows: int) -> float:
        return self.verify[min(rows, len(self.verify)) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedRun:
    """What a text took. verified: rows of all verifications; discarded: drafts that were thrown away unverified."""

    tokens: int
    seconds: float
    verifications: int
    verified: int
    discarded: int


def without_overlap(agrees: Sequence[bool], stages: Stages, length: int) -> StagedRun:
    """Rounds of `length` drafts, one stage after the other.

    agrees: at each position, whether the exit says the model's token.
    """
    position = rounds = rows = 0
    seconds = 0.0
    while position < len(agrees):
        drafts = min(length, len(agrees) - position - 1)
        accepted = _leading(agrees, position, drafts)
        seconds += drafts * stages.draft + stages.catch_up + stages.verification(drafts + 1) + 2 * stages.handover
        position += accepted + 1
        rounds += 1
        rows += drafts + 1
    return StagedRun(tokens=position, seconds=seconds, verifications=rounds, verified=rows, discarded=0)


def with_overlap(agrees: Sequence[bool], stages: Stages, rows: int, ahead: int) -> StagedRun:
    """The same text with both stages at work at once.

    rows: drafts that the second stage waits for. ahead: most drafts beyond those that it is at work on.
    """
    total = len(agrees)
    position = verifications = verified = discarded = 0
    waiting = at_work = 0  # drafts that were not sent yet, and those that are being verified
    drafting = verifying = 0.0  # seconds of work left of what each stage is doing; 0 for nothing
    stale = False  # whether the step at hand began behind something that was rejected
    seconds = 0.0
    while position < total:
        left = total - position - at_work
        if not verifying and waiting and waiting >= min(rows, left):
            at_work = min(waiting, LONGEST)
            waiting -= at_work
            verifying = stages.verification(at_work) + 2 * stages.handover
            verifications, verified = verifications + 1, verified + at_work
            left = total - position - at_work
        if not drafting and waiting < min(max(ahead, rows if not verifying else 0), left):
            drafting, stale = stages.draft, False
        slower = 1.0 + stages.contention if drafting and verifying else 1.0
        step = min(work for work in (drafting, verifying) if work)
        seconds += step * slower
        drafting, verifying, before = max(drafting - step, 0.0), max(verifying - step, 0.0), (drafting, verifying)
        if before[0] and not drafting:
            waiting, discarded = waiting + (not stale), discarded + stale
        if before[1] and not verifying:
            accepted = _leading(agrees, position, at_work)
            if accepted == at_work:
                position += at_work
            else:
                position += accepted + 1
                discarded += waiting
                waiting, stale = 0, bool(drafting)
            at_work = 0
    return StagedRun(
        tokens=position, seconds=seconds, verifications=verifications, verified=verified, discarded=discarded
    )


def best_lead(stages: Stages, acceptance: float) -> tuple[int, int]:
    """(rows, ahead) of `with_overlap` with which a text of independently accepted drafts is done soonest."""
    chance = Random(0)
    agrees = [chance.random() < acceptance for _ in range(_TRIAL)]
    choices = [(rows, ahead) for rows in ROWS for ahead in AHEAD]
    return min(choices, key=lambda choice: with_overlap(agrees, stages, *choice).seconds)


def _leading(agrees: Sequence[bool], first: int, count: int) -> int:
    """How many are true from there on, of so many."""
    return next(
        (i for i, flag in enumerate(agrees[first : first + count]) if not flag), min(count, len(agrees) - first)
    )
