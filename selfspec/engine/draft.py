"""Step 2 of a round, for one text: a draft grows row by row, until the cap or the policy says stop.

`next_draft` is the order of questions to a policy, for eager and captured passes alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from layerskip_models.choices import Detail, HeadOutput
from layerskip_models.transfer import sent
from policies import CopiedRow, DraftRow, ObservationSpec
from policies.records import StopCause
from selfspec.engine.runners.runner import SequenceRound
from selfspec.engine.sampling import NonFiniteLogitsError, distribution

NOTHING = HeadOutput(-1, math.nan)


class NextDraft(NamedTuple):
    """What comes of a draft row. token: None if the row gives none. stop: why drafting ends with it, None if it goes on.

    dropped: what a greedy draft would have taken from a row that the policy stopped before.
    """

    token: int | None
    stop: StopCause | None
    dropped: int | None = None


def next_draft(
    seq_round: SequenceRound, row: DraftRow, pick: Callable[[], int | None], *, is_sound: bool = True
) -> NextDraft:
    """Ask the policy about a row, take its token, and ask about that.

    is_sound: whether the row's features are numbers, as the host knows without reading them from the device.
    pick: the token, None if the row gives none. It is asked for only once it is known that it is wanted, so a token that the
    policy stops before is never drawn here.
    """
    stopping = seq_round.policy.stopping
    if not is_sound or _unusable(row):
        return NextDraft(None, "before_draw")
    if stopping is not None and stopping.stop_before_draw(row):
        return NextDraft(None, "before_draw", None if seq_round.sampler.do_sample else pick())
    token = pick()
    if token is None:
        return NextDraft(None, "before_draw")
    if token in seq_round.eos:
        return NextDraft(token, "eos")
    if stopping is not None and stopping.stop_after_draw(row, token):
        return NextDraft(token, "after_draw")
    return NextDraft(token, "cap" if row.num_drafted + 1 == seq_round.max_speculations else None)


class Draft:
    """A text's draft while it grows, and then what verification is handed.

    exit_hidden: [max_speculations + 1 or more, hidden], output of layer E for the rows pending, d_1, d_2, ..
    q: float32 [max_speculations or more, vocab], the distributions that drafts are drawn from; unused when greedy.
    tokens: the kept drafts d_1..d_k, the first num_copied of them copied. num_rows: how many rows were run: k + 1 if drafting
        stopped before a draw, else k.
    confidences: of every row looked at that has one, if the policy asked for them.
    """

    def __init__(self, seq_round: SequenceRound, exit_hidden: Tensor, q: Tensor) -> None:
        self.seq_round, self.exit_hidden, self.q = seq_round, exit_hidden, q
        self.exit_layer = seq_round.exit_layer or 0
        self.tokens: list[int] = [*seq_round.copied]
        self.num_copied = len(seq_round.copied)
        self.num_rows = 0
        self.stop_cause: StopCause = "cap" if seq_round.copied or seq_round.exit_layer is not None else "none"
        self.dropped_token: int | None = None
        self.error: Exception | None = None  # raised by the policy
        self._seen: list[float] = []
        self.detail = detail_of(seq_round.observes)
        if seq_round.copied and not seq_round.greedy:  # processors see drafts, and so does whoever draws
            copied = torch.tensor(seq_round.copied, device=seq_round.tokens.device)
            seq_round.tokens[0, seq_round.length : seq_round.length + len(copied)] = copied

    @property
    def next_tokens(self) -> Sequence[int]:
        """The tokens of the rows to run next: the last draft, or the pending token and what was copied after it."""
        if self.num_rows:
            return self.tokens[self.num_rows - 1 :]
        return (self.seq_round.pending, *self.tokens)

    @property
    def num_next(self) -> int:
        """How many these are: of tokens whose rows were not run yet."""
        return 1 + len(self.tokens) - self.num_rows

    @property
    def confidences(self) -> tuple[float, ...] | None:
        """As in `RoundRecord`."""
        return (
            tuple(self._seen) if self.seq_round.observes.confidence and self.seq_round.exit_layer is not None else None
        )

    def grow(self, looks: Sequence[HeadOutput], logits: Tensor | None) -> bool:
        """Take what the head says of the rows that were run, and return whether drafting goes on.

        looks: of one row, or of the pending token's and of those of what was copied. logits: float32 [rows, vocab]; None if
        there is nothing to process and the argmax will do.
        """
        seq_round, observes = self.seq_round, self.seq_round.observes
        assert seq_round.exit_layer is not None
        look = looks[-1]
        if len(looks) > 1:
            self._cut(looks)
            look = looks[self.num_copied]
            logits = None if logits is None else logits[self.num_copied : self.num_copied + 1]
            if self.num_copied and self.tokens[-1] in seq_round.eos:
                self.stop_cause = "eos"
                return False
            if seq_round.max_speculations == 0:
                return False
        else:
            self.num_rows += 1
        row = DraftRow(
            num_drafted=len(self.tokens) - self.num_copied,
            exit_layer=seq_round.exit_layer,
            position=seq_round.length - 2 + self.num_rows,
            confidence=look.confidence if observes.confidence else None,
            entropy=look.entropy if observes.entropy else None,
            exit_hidden=self.exit_hidden[self.num_rows - 1] if observes.exit_hidden else None,
            features=_features(look, self.exit_hidden.device) if observes.features else None,
            context=seq_round.states if observes.context_layers else None,
        )
        if row.confidence is not None and row.confidence == row.confidence:
            self._seen.append(row.confidence)
        is_sound = not observes.features or not any(map(math.isnan, look[2:]))
        token, stop, self.dropped_token = next_draft(
            seq_round, row, lambda: self._pick(look, logits), is_sound=is_sound
        )
        if token is not None:
            if logits is not None:  # processors see drafts, and so does whoever draws
                seq_round.tokens[0, seq_round.length + len(self.tokens)] = token
            self.tokens.append(token)
        if stop is not None:
            self.stop_cause = stop
        return stop is None

    def _cut(self, looks: Sequence[HeadOutput]) -> None:
        """Keep as much of what was copied as the policy says, by what the exit head says of the row before each token."""
        seq_round = self.seq_round
        assert seq_round.exit_layer is not None
        kept = 0
        while kept < len(seq_round.copied):
            look = looks[kept]
            row = CopiedRow(
                exit_layer=seq_round.exit_layer,
                match_length=seq_round.match_length + kept,
                agrees=look.token == seq_round.copied[kept],
                confidence=look.confidence if seq_round.observes.confidence else None,
            )
            sound = row.confidence is None or row.confidence == row.confidence
            if not sound or not (
                row.agrees if seq_round.policy.stopping is None else seq_round.policy.stopping.keep_copied(row)
            ):
                break
            kept += 1
        self.num_copied = kept
        self.num_rows = kept + 1
        if seq_round.observes.context_layers and seq_round.states is not None:
            seq_round.states.show(seq_round.length - 1, kept)
        seq_round.cache.forget(seq_round.exit_layer, len(seq_round.copied) - kept)
        del self.tokens[kept:]

    def _pick(self, look: HeadOutput, logits: Tensor | None) -> int | None:
        """Token d_{index+1}: the argmax after processors, or a draw from q, which is kept.

        None where the row gives none: nothing can be drawn from it, or a processor refuses the text. That text holds drafts,
        so plain decoding may never come to it. The draft then ends, which depends on nothing that is drawn later, and
        verification looks at the same row if it is ever committed.
        """
        if logits is None:
            return look.token
        seq_round, index = self.seq_round, len(self.tokens)
        try:
            processed = seq_round.sampler.process(logits, seq_round.tokens, seq_round.length + index)
        except Exception:
            return None
        if not seq_round.sampler.do_sample:
            return int(processed.argmax())  # of NaN, too: a greedy draft is a guess, which verification judges
        q = self.q[index]
        q.copy_(distribution(processed[0]))
        try:
            return seq_round.sampler.draw(q, f"draft position {seq_round.length + index}")
        except NonFiniteLogitsError:
            return None


def detail_of(observes: ObservationSpec) -> Detail:
    """What to compute of every row for a policy that needs this."""
    if observes.entropy or observes.features:
        return "all"
    return "confidence" if observes.confidence else "token"


def _features(look: HeadOutput, device: torch.device) -> Tensor:
    """What `draft_features` computes from logits."""
    p = look.confidence
    features = [math.log(p) if p > 0 else p, look.margin, look.entropy]
    return sent(torch.tensor(features, dtype=torch.float32, device="cpu"), device)


def _unusable(row: DraftRow) -> bool:
    """Whether a policy would be shown NaN. The draft then ends without asking it."""
    return any(value is not None and math.isnan(value) for value in (row.confidence, row.entropy))
