"""Step 2 of a round: drafts grow row by row, until the plan's maximum, a policy or an end of sequence stops each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from layerskip_models.choices import Detail, HeadOutput, choices_of
from layerskip_models.kernels.native_sampling import look, takes
from layerskip_models.transfer import to_device
from policies import DraftRow, ObservationSpec
from policies.records import StopCause
from selfspec.engine.results import without_traceback
from selfspec.engine.runners.runner import RowBuffers, Runner, SequenceRound, SequenceRows

NOTHING = HeadOutput(-1, math.nan)


def make_drafts(runner: Runner, seq_rounds: Sequence[SequenceRound]) -> list[Draft]:
    """Draft as far as each plan and each policy say. A sequence without an exit layer drafts nothing.

    Step j runs one row of every sequence that still drafts. Where exits differ, a row leaves the pass at its own, and the
    draft head then looks at all rows together. Rows that are drafted with weights in fewer bits have a pass of their own.
    """
    drafts = [Draft(seq_round, runner.buffers(index, seq_round.max_rows)) for index, seq_round in enumerate(seq_rounds)]
    going = [draft for draft in drafts if draft.exit_layer]
    kinds = {draft.seq_round.bits for draft in going}
    while going:
        for bits in kinds:
            alike = going if len(kinds) == 1 else [draft for draft in going if draft.seq_round.bits == bits]
            if not alike:
                continue
            used = runner if bits is None else runner.rounded(bits)
            exits = sorted({draft.exit_layer for draft in alike})
            if len(exits) == 1:
                used.run([draft.rows for draft in alike], 0, exits[0], "draft")
                continue
            start = 0
            for stop in exits:
                used.run([draft.rows for draft in alike if draft.exit_layer >= stop], start, stop, None)
                start = stop
            used.run([draft.rows for draft in alike], start, start, "draft")
        going = [draft for draft in going if draft.extend()]
    for draft in drafts:
        draft.discard_low_bit_rows()
    return drafts


class Draft:
    """A sequence's draft while it grows, and then what verification is handed.

    rows: the next rows to run, and what the head said of the last ones. num_rows: how many were run: k + 1 if drafting
        stopped before a draw, else k.
    confidences: of every row looked at that has one, if the policy asked for them.
    error: raised by the policy, or because memory is short. It ends this sequence alone.
    """

    def __init__(self, seq_round: SequenceRound, buffers: RowBuffers) -> None:
        self.seq_round, self.buffers = seq_round, buffers
        self.exit_layer = seq_round.exit_layer or 0
        self.rows = SequenceRows(seq_round, buffers.hidden, detail_of(seq_round.observes))
        self.num_copied = len(seq_round.copied)
        self.num_rows = 0
        self.stop_cause: StopCause = "cap" if seq_round.copied or seq_round.exit_layer is not None else "none"
        self.dropped_token: int | None = None
        self.error: Exception | None = None
        self._seen: list[float] = []
        if seq_round.copied and not self.rows.greedy:  # processors see drafts, and so does whoever draws
            copied = torch.tensor(seq_round.copied, device=seq_round.tokens.device)
            seq_round.tokens[0, seq_round.length : seq_round.length + len(copied)] = copied

    @property
    def tokens(self) -> list[int]:
        """The kept drafts d_1..d_k; copied ones if num_copied is not 0."""
        return self.rows.tokens[1:]

    @property
    def q(self) -> Tensor:
        """float32 [max_speculations or more, vocab]: the distributions that drafts are drawn from, when sampling."""
        return self.buffers.q(self.seq_round.max_rows)

    @property
    def confidences(self) -> tuple[float, ...] | None:
        """As in `RoundRecord`."""
        return tuple(self._seen) if self.seq_round.observes.confidence and self.seq_round.exit_layer else None

    def discard_low_bit_rows(self) -> None:
        """Forget what weights in fewer bits have computed: verification runs every row through every layer in full.

        Keys and values of these rows lie after the committed ones, where verification writes its own.
        """
        if self.seq_round.bits is not None and self.exit_layer:
            self.seq_round.cache.roll_back(self.seq_round.length - 1)
            self.exit_layer = self.rows.exit_layer = 0

    def extend(self) -> bool:
        """Take what the head says of the rows that were run. Returns whether drafting goes on."""
        try:
            going = self._grow()
        except Exception as error:
            self.error = without_traceback(error)
            return False
        self.rows.first, self.rows.end = self.num_rows, len(self.rows.tokens)
        return going

    def _grow(self) -> bool:
        seq_round, rows, observes = self.seq_round, self.rows, self.seq_round.observes
        logits = rows.logits
        output = rows.outputs[0] if logits is None or rows.outputs else self._output_of(logits)
        self.num_rows += 1
        row = DraftRow(
            num_drafted=len(rows.tokens) - 1,
            exit_layer=self.exit_layer,
            bits=seq_round.bits,
            position=seq_round.length - 2 + self.num_rows,
            confidence=output.confidence if observes.confidence else None,
            entropy=output.entropy if observes.entropy else None,
            exit_hidden=rows.hidden[self.num_rows - 1] if observes.exit_hidden else None,
            features=_features(output, rows.hidden.device) if observes.features else None,
            context=seq_round.states if observes.context_layers else None,
        )
        if row.confidence is not None and row.confidence == row.confidence:
            self._seen.append(row.confidence)
        stop = self._stop(row, output, logits)
        if stop is not None:
            self.stop_cause = stop
        return stop is None

    def _stop(self, row: DraftRow, output: HeadOutput, logits: Tensor | None) -> StopCause | None:
        """Ask the policy about a row, take its token, and ask about that. Returns why drafting ends, None if it goes on.

        A token that the policy stops before is never drawn.
        """
        seq_round, observes = self.seq_round, self.seq_round.observes
        stopping = seq_round.policy.stopping
        if row.confidence != row.confidence or row.entropy != row.entropy:  # no policy is shown NaN
            return "before_draw"
        if observes.features and any(map(math.isnan, output[2:])):
            return "before_draw"
        if stopping is not None and stopping.stop_before_draw(row):
            self.dropped_token = None if seq_round.sampler.do_sample else self._pick(output, logits)
            return "before_draw"
        token = self._pick(output, logits)
        if token is None:
            return "before_draw"
        tokens = self.rows.tokens
        if logits is not None:  # processors see drafts, and so does whoever draws
            seq_round.tokens[0, seq_round.length + len(tokens) - 1] = token
        tokens.append(token)
        if token in seq_round.eos:
            return "eos"
        if stopping is not None and stopping.stop_after_draw(row, token):
            return "after_draw"
        return "cap" if row.num_drafted + 1 == seq_round.max_speculations else None

    def _output_of(self, logits: Tensor) -> HeadOutput:
        """Return what the policy wants to know of a row whose token is sampled or processed."""
        if self.rows.detail == "token":
            return NOTHING
        looked = look if self.seq_round.sampler.native and takes(logits) and logits.is_contiguous() else choices_of
        return looked(logits, self.rows.detail).outputs()[0]

    def _pick(self, output: HeadOutput, logits: Tensor | None) -> int | None:
        """Pick the next draft: the argmax after processors, or a draw from q, which is kept.

        None where the row gives none: nothing can be drawn from it, or a processor refuses the text. That text holds drafts,
        so plain decoding may never come to it. The draft then ends, which depends on nothing that is drawn later, and
        verification looks at the same row if it is ever committed.
        """
        if logits is None:
            return output.token
        seq_round, index = self.seq_round, len(self.rows.tokens) - 1
        sampler, before = seq_round.sampler, (seq_round.tokens, seq_round.length + index)
        q = self.q[index : index + 1] if sampler.do_sample else None
        try:
            if q is None:
                # Of NaN, too: a greedy draft is a guess, which verification checks.
                return int(sampler.process(logits, *before).argmax())
            return sampler.sample(logits, *before, q, f"draft position {seq_round.length + index}")
        except Exception:
            return None


def detail_of(observes: ObservationSpec) -> Detail:
    """Say what to compute of every row for a policy that needs this."""
    if observes.entropy or observes.features:
        return "all"
    return "confidence" if observes.confidence else "token"


def _features(output: HeadOutput, device: torch.device) -> Tensor:
    """Return what `draft_features` computes from logits."""
    p = output.confidence
    features = [math.log(p) if p > 0 else p, output.margin, output.entropy]
    return to_device(torch.tensor(features, dtype=torch.float32, device="cpu"), device)
