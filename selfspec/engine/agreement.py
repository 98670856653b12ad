"""What must be one decision where several processes hold a model together: rank 0's times, random numbers and stops.

All ranks run the same code on the same hidden states, so everything else comes out alike by itself; that it did is checked
once a round. Where one process holds the model nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args
from zlib import crc32

import torch

from layerskip_models import LayerSkipModel
from policies import Policy
from selfspec.engine.request import Request
from selfspec.engine.results import RoundResult
from selfspec.engine.runners.runner import SequenceRound
from selfspec.engine.stopping import StopReason

_REASONS: tuple[StopReason | None, ...] = (None, *get_args(StopReason))


def agree_on_call(model: LayerSkipModel, request: Request, policy: Policy) -> None:
    """Give the call rank 0's random numbers. Raises RankError unless all ranks were called alike."""
    if model.num_ranks == 1:
        return
    own = request.generator
    stops = request.stops
    called = (
        request.prompt.tolist(), stops.max_new_tokens, sorted(stops.eos), len(stops.criteria), policy.name, own is not None,
        len(request.processors),
    )  # fmt: skip
    state = [] if own is None else own.get_state().tolist()
    agreed = model.agree(state, same=crc32(repr(called).encode()))
    if own is not None:
        own.set_state(torch.tensor([int(value) for value in agreed], dtype=torch.uint8))


def agree_on_round(
    model: LayerSkipModel,
    seconds: tuple[float, float],
    seq_rounds: Sequence[SequenceRound],
    outcomes: Sequence[RoundResult],
) -> tuple[float, float]:
    """Rank 0's seconds. Raises RankError unless all ranks came to the same tokens in this round."""
    if model.num_ranks == 1:
        return seconds
    found = [
        (seq_round.length, seq_round.exit_layer, outcome.draft_tokens, outcome.block)
        for seq_round, outcome in zip(seq_rounds, outcomes)
    ]
    drafting, verifying = model.agree(seconds, same=crc32(repr(found).encode()))
    return drafting, verifying


def agree_on_seconds(model: LayerSkipModel, seconds: float) -> float:
    """Rank 0's."""
    return model.agree([seconds])[0]


def agree_on_stop(model: LayerSkipModel, count: int, reason: StopReason | None) -> tuple[int, StopReason | None]:
    """Where the text stops and why, as rank 0's criteria say: some look at the clock, or at a key that was pressed."""
    if model.num_ranks == 1:
        return count, reason
    agreed, index = model.agree([count, _REASONS.index(reason)])
    return int(agreed), _REASONS[int(index)]
