"""What overlap would gain on recorded texts, each exit layer at its best settings (`selfspec.parallel.overlap_timing`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from selfspec.parallel.overlap_timing import AHEAD, ROWS, StagedRun, Stages, with_overlap, without_overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapGain:
    """Of one exit layer, over all texts: tokens per second, each at its best setting.

    plain: plain decoding on one device. acceptance: how often the exit says the model's token. length: of drafts without
    overlap; rows, ahead: as in `with_overlap`. discarded: drafts thrown away, for each token.
    """

    exit_layer: int
    acceptance: float
    ratio: float
    plain: float
    apart: float
    length: int
    overlapped: float
    rows: int
    ahead: int
    discarded: float


def overlap_gain(texts: Sequence[Sequence[bool]], exit_layer: int, stages: Stages, plain_seconds: float) -> OverlapGain:
    """The best settings for these texts. plain_seconds: of a plain step on one device."""
    apart = {length: _speed([without_overlap(text, stages, length) for text in texts]) for length in range(1, 9)}
    both = {
        (rows, ahead): [with_overlap(text, stages, rows, ahead) for text in texts] for rows in ROWS for ahead in AHEAD
    }
    length = max(apart, key=lambda one: apart[one])
    best = max(both, key=lambda one: _speed(both[one]))
    flags = [flag for text in texts for flag in text]
    return OverlapGain(
        exit_layer=exit_layer,
        acceptance=sum(flags) / len(flags),
        ratio=stages.verification(length + 1) / stages.draft,
        plain=1 / plain_seconds,
        apart=apart[length],
        length=length,
        overlapped=_speed(both[best]),
        rows=best[0],
        ahead=best[1],
        discarded=sum(run.discarded for run in both[best]) / sum(run.tokens for run in both[best]),
    )


def _speed(runs: Sequence[StagedRun]) -> float:
    return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)
