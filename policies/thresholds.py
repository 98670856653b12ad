"""Stopping at a threshold: Draft&Verify's and AdaEDL's adaptive ones, SVIP's fixed one.

H is the entropy of the unfiltered draft distribution, in nats.
"""

from __future__ import annotations

import math
from typing import Any

from policies.base import NeverStop
from policies.bounds import MAX_DRAFTS, check_number
from policies.records import Drafter, DraftRow, ObservationSpec, RoundRecord

STEP = 0.01  # epsilon, how far one round moves the threshold before smoothing
RATE_DECAY = 0.5  # beta1, of the acceptance rate
THRESHOLD_DECAY = 0.9  # beta2, of the threshold
DRAFT_VERIFY_START, DRAFT_VERIFY_TARGET = 0.6, 0.8  # the first threshold, and the acceptance rate aimed at
SVIP_THRESHOLD = 0.6
ADAEDL_GAMMA = 0.2  # the constant in AdaEDL's bound
ADAEDL_START, ADAEDL_TARGET = 0.4, 0.9
MAX_LENGTH = 18


class AdaptiveStopping(NeverStop):
    """The moving threshold that Draft&Verify and AdaEDL share; subclasses say what falls below it.

    After each round the smoothed acceptance rate is compared with `target`: below it the threshold is to move up by `step`,
    at or above it down, unless drafting had already reached its cap (a lower threshold could then change nothing). Each
    move is smoothed: threshold <- decay * threshold + (1 - decay) * moved. Kept in [0, 1].
    Source: Draft & Verify (Zhang et al. 2024), section 3.3.
    """

    def __init__(self, start: float, *, target: float, step: float = STEP, max_length: int = MAX_LENGTH) -> None:
        for name, value in (("start", start), ("target", target), ("step", step)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {value}")
        self._start, self._target, self._step = start, target, step
        self.max_length = check_number("max_length", max_length, 1, MAX_DRAFTS)
        self.reset()

    def reset(self) -> None:
        self._value = self._start
        self._rate: float | None = None

    def stops(self, score: float, row: DraftRow) -> bool:
        """Tell whether this token is the last: its score is below the threshold, or it is the `max_length`th."""
        return score < self._value or row.num_drafted + 1 >= self.max_length

    def threshold(self, drafter: Drafter) -> float:
        return self._value

    def observe(self, record: RoundRecord) -> None:
        """Learn from a round. One without drafts says nothing."""
        if record.exit_layer is None or record.num_drafted == 0:
            return
        rate = self.acceptance(record)
        self._rate = rate if self._rate is None else RATE_DECAY * self._rate + (1 - RATE_DECAY) * rate
        moved = self._value
        if self._rate < self._target:
            moved += self._step
        elif record.stop_cause != "cap" and record.num_drafted < self.max_length:
            moved -= self._step
        self._value = min(max(THRESHOLD_DECAY * self._value + (1 - THRESHOLD_DECAY) * moved, 0.0), 1.0)

    def acceptance(self, record: RoundRecord) -> float:
        """Return the acceptance rate that is smoothed: the round's."""
        return record.num_accepted / record.num_drafted

    def state(self) -> dict[str, Any]:
        return {"value": self._value, "rate": self._rate}

    def restore(self, state: dict[str, Any]) -> None:
        self._value = float(state["value"])
        self._rate = None if state["rate"] is None else float(state["rate"])


class DraftVerifyThreshold(AdaptiveStopping):
    """Stop, keeping the token, when its confidence is below an adaptive threshold, or at `max_length` tokens.

    The acceptance rate is that of the whole text so far. The threshold goes on from text to text. Confidence is the top-1
    probability; when sampling, the drawn token's own.
    Source: Draft & Verify (Zhang et al. 2024), section 3.3; values and the rate as in the code that DEL released.
    """

    observes = ObservationSpec(confidence=True, probability=True)

    def __init__(
        self,
        start: float = DRAFT_VERIFY_START,
        *,
        target: float = DRAFT_VERIFY_TARGET,
        step: float = STEP,
        max_length: int = MAX_LENGTH,
    ) -> None:
        super().__init__(start, target=target, step=step, max_length=max_length)

    def begin_text(self) -> None:
        self._rate = None
        self._accepted = self._drafted = 0

    def reset(self) -> None:
        super().reset()
        self.begin_text()

    def acceptance(self, record: RoundRecord) -> float:
        self._accepted += record.num_accepted
        self._drafted += record.num_drafted
        return self._accepted / self._drafted

    def stop_after_draw(self, row: DraftRow, token: int) -> bool:
        sure = row.confidence if row.probability is None else row.probability
        assert sure is not None
        return self.stops(sure, row)


class SvipThreshold(NeverStop):
    """Stop, keeping the token, when sqrt(H) exceeds `threshold`, or at `max_length` tokens.

    sqrt(H), up to a constant, bounds the total variation between draft and target, so a low entropy promises acceptance.
    Raises ValueError for a threshold that is not positive.
    Source: SVIP (Zhang et al. 2024), as SPIDE (2025), section 4.1, compares with it. The threshold's default is ours.
    """

    def __init__(self, threshold: float = SVIP_THRESHOLD, *, max_length: int = MAX_LENGTH) -> None:
        if not threshold > 0:
            raise ValueError(f"threshold must be above 0, got {threshold}")
        self.observes = ObservationSpec(entropy=True)
        self._threshold = threshold
        self.max_length = check_number("max_length", max_length, 1, MAX_DRAFTS)

    def stop_after_draw(self, row: DraftRow, token: int) -> bool:
        assert row.entropy is not None
        return math.sqrt(max(row.entropy, 0.0)) > self._threshold or row.num_drafted + 1 >= self.max_length

    def threshold(self, drafter: Drafter) -> float:
        return self._threshold


class AdaEdlThreshold(AdaptiveStopping):
    """Stop, keeping the token, when 1 - sqrt(0.2 H) < lambda, or at `max_length` tokens.

    1 - sqrt(gamma H) is a lower bound of the acceptance probability; lambda moves as Draft&Verify's threshold does.
    Source: AdaEDL (Agrawal et al. 2024), section 3, gamma = 0.2; lambda's adaptation with Draft&Verify's constants.
    """

    observes = ObservationSpec(entropy=True)

    def __init__(self, start: float = ADAEDL_START, *, max_length: int = MAX_LENGTH) -> None:
        super().__init__(start, target=ADAEDL_TARGET, max_length=max_length)

    def stop_after_draw(self, row: DraftRow, token: int) -> bool:
        assert row.entropy is not None
        return self.stops(1 - math.sqrt(max(ADAEDL_GAMMA * row.entropy, 0.0)), row)
