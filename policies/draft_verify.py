"""Draft&Verify's adaptive threshold: hold the acceptance rate at a target by moving a confidence threshold."""

from __future__ import annotations

from typing import Any

from policies.base import NeverStop
from policies.bounds import MOST_DRAFTS, check_number
from policies.records import DraftRow, ObservationSpec, RoundRecord

TARGET = 0.9  # alpha, the acceptance rate aimed at
STEP = 0.01  # epsilon, how far one round moves the threshold before smoothing
RATE_DECAY = 0.5  # beta1, of the acceptance rate
THRESHOLD_DECAY = 0.9  # beta2, of the threshold
MAX_LENGTH = 8


class AdaptiveThreshold:
    """The moving threshold that Draft&Verify and AdaEDL share.

    After each round the smoothed acceptance rate is compared with `target`: below it the threshold is to move up by `step`,
    at or above it down, unless drafting had already reached its cap (a lower threshold could then change nothing). Each
    move is smoothed: threshold <- decay * threshold + (1 - decay) * moved. Kept in [0, 1].
    Source: Draft & Verify (Zhang et al. 2024), section 3.3.
    """

    def __init__(self, start: float, *, target: float = TARGET, step: float = STEP) -> None:
        for name, value in (("start", start), ("target", target), ("step", step)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {value}")
        self._start, self._target, self._step = start, target, step
        self.value = start
        self.rate: float | None = None

    def observe(self, record: RoundRecord, max_length: int) -> None:
        """Learn from a round, which drafting ended at its cap or at `max_length`, or not; one without drafts says nothing."""
        if record.num_drafted == 0:
            return
        rate = record.num_accepted / record.num_drafted
        self.rate = rate if self.rate is None else RATE_DECAY * self.rate + (1 - RATE_DECAY) * rate
        moved = self.value
        if self.rate < self._target:
            moved += self._step
        elif record.stop_cause != "cap" and record.num_drafted < max_length:
            moved -= self._step
        self.value = min(max(THRESHOLD_DECAY * self.value + (1 - THRESHOLD_DECAY) * moved, 0.0), 1.0)

    def reset(self) -> None:
        self.value = self._start
        self.rate = None

    def state(self) -> dict[str, Any]:
        return {"value": self.value, "rate": self.rate}

    def restore(self, state: dict[str, Any]) -> None:
        self.value = float(state["value"])
        self.rate = None if state["rate"] is None else float(state["rate"])


class AdaptiveStopping(NeverStop):
    """A stopping policy whose threshold moves as `AdaptiveThreshold` says; subclasses say what falls below it."""

    def __init__(self, adaptive: AdaptiveThreshold, max_length: int) -> None:
        self.adaptive = adaptive
        self.max_length = check_number("max_length", max_length, 1, MOST_DRAFTS)

    def stops(self, score: float, row: DraftRow) -> bool:
        """Whether this token is the last: its score is below the threshold, or it is the `max_length`th."""
        return score < self.adaptive.value or row.num_drafted + 1 >= self.max_length

    def threshold(self, exit_layer: int) -> float:
        return self.adaptive.value

    def observe(self, record: RoundRecord) -> None:
        self.adaptive.observe(record, self.max_length)

    def reset(self) -> None:
        self.adaptive.reset()

    def state(self) -> dict[str, Any]:
        return self.adaptive.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.adaptive.restore(state)


class DraftVerifyThreshold(AdaptiveStopping):
    """Stop, keeping the token, when its confidence is below an adaptive threshold, or at `max_length` tokens.

    start: the first threshold; 0.8 suits greedy decoding, 0.5 sampling. Confidence is the top-1 probability of the unfiltered
    distribution at temperature 1 (the published code takes the drawn token's).
    Source: Draft & Verify (Zhang et al. 2024), section 3.3; values as in DEL (Entezari Zarch et al. 2025), Appendix B.
    """

    def __init__(
        self, start: float = 0.8, *, target: float = TARGET, step: float = STEP, max_length: int = MAX_LENGTH
    ) -> None:
        super().__init__(AdaptiveThreshold(start, target=target, step=step), max_length)
        self.observes = ObservationSpec(confidence=True)

    def stop_after_draw(self, row: DraftRow, token: int) -> bool:
        assert row.confidence is not None
        return self.stops(row.confidence, row)
