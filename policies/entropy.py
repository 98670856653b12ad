"""Stopping by entropy: SVIP's fixed bound, and AdaEDL's adaptive one. H is of the unfiltered draft distribution, in nats."""

from __future__ import annotations

import math

from policies.base import NeverStop
from policies.bounds import MAX_DRAFTS, check_number
from policies.draft_verify import AdaptiveStopping
from policies.records import Drafter, DraftRow, ObservationSpec

SVIP_THRESHOLD = 0.6
ADAEDL_GAMMA = 0.2  # the constant in AdaEDL's bound
ADAEDL_START = 0.4  # lambda of the first round
MAX_LENGTH = 18


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
        super().__init__(start, max_length=max_length)

    def stop_after_draw(self, row: DraftRow, token: int) -> bool:
        assert row.entropy is not None
        return self.stops(1 - math.sqrt(max(ADAEDL_GAMMA * row.entropy, 0.0)), row)
