"""The draft of one captured round: rows launched one behind the other, and asked about where there is a stopping rule."""

from __future__ import annotations

from functools import partial
from math import isnan
from typing import TYPE_CHECKING

from policies import DraftRow
from policies.records import StopCause
from selfspec.engine.draft import next_draft
from selfspec.engine.runners.cuda_graph.buffers import DraftRead
from selfspec.engine.runners.runner import SequenceRound

if TYPE_CHECKING:
    from selfspec.engine.runners.cuda_graph.runner import CudaGraphRunner


class Drafting:
    """The draft of one round. count: rows to verify behind the pending one, maybe past an EOS; `finish` says what is kept."""

    def __init__(self, runner: CudaGraphRunner, seq_round: SequenceRound, exit_layer: int, fast: bool) -> None:
        self._runner, self._turn, self._exit_layer, self._fast = runner, seq_round, exit_layer, fast
        self.count = 0
        self.seen: list[DraftRead] = []  # of the rows read while drafting
        self.num_discarded = 0
        self.dropped: int | None = None  # what a greedy draft would have taken from the row stopped before
        self.error: Exception | None = None  # raised by the policy
        self._cause: StopCause = "cap"

    def run(self) -> None:
        """Launch the draft; with a stopping rule, ask it about every row."""
        runner, seq_round = self._runner, self._turn
        stopping = seq_round.policy.stopping
        while self.count < seq_round.max_speculations and self._cause == "cap":
            index = self.count
            if not runner.look_at(seq_round, index, self._fast):
                self._cause = "before_draw"
                return
            if stopping is not None:
                runner.start_reading(index)
            hidden = runner.exit_hidden(index) if seq_round.observes.exit_hidden else None
            runner.advance(seq_round, index + 1, self._exit_layer)
            self.count += 1
            if stopping is None:
                continue
            look = runner.looks()[0]
            self.seen.append(look)
            row = DraftRow(
                num_drafted=index,
                exit_layer=self._exit_layer,
                position=seq_round.length - 1 + index,
                confidence=look.confidence if seq_round.observes.confidence else None,
                entropy=look.entropy if seq_round.observes.entropy else None,
                exit_hidden=hidden,
            )
            try:
                token, stop, self.dropped = next_draft(seq_round, row, partial(self._token, look))
            except Exception as error:
                self.error = error
                return
            if token is None:  # its row's successor was run for nothing
                self.count -= 1
                self.num_discarded += 1
            if stop is not None:
                self._cause = stop

    def _token(self, look: DraftRead) -> int | None:
        """What was drafted from a row, None if it cannot be drawn from."""
        return None if self._turn.sampler.do_sample and not is_weight(look.total) else look.token

    def finish(self) -> tuple[list[int], tuple[float, ...], StopCause]:
        """Drafts up to an EOS, confidences of the rows looked at, and why it ended."""
        looks = self.seen or self._runner.looks()
        tokens = []
        cause = self._cause
        for look in looks[: self.count]:
            if self._unusable(look):
                cause = "before_draw"
                break
            tokens.append(look.token)
            if tokens[-1] in self._turn.eos:
                cause = "eos"
                break
        looked_at = len(tokens) + (cause == "before_draw")
        seen = [look.confidence for look in looks[:looked_at]]
        return tokens, tuple(value for value in seen if not isnan(value)), cause

    def _unusable(self, look: DraftRead) -> bool:
        """Whether a row gives no token, or NaN to a policy."""
        observes = self._turn.observes
        if (observes.confidence and isnan(look.confidence)) or (observes.entropy and isnan(look.entropy)):
            return True
        return self._turn.sampler.do_sample and not is_weight(look.total)


def is_weight(total: float) -> bool:
    """Whether one can draw from weights of this sum."""
    return 0 < total < float("inf")
