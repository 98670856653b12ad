"""Step 2 of a round: drafts grow row by row, until the plan's maximum, a policy or an end of sequence stops each."""

from __future__ import annotations

import math
from collections import abc
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from layerskip_models.choices import HeadOutput, choices_of
from layerskip_models.kernels.native_sampling import look, takes
from layerskip_models.transfer import to_device
from policies import Drafter, DraftRow, RoundContext
from policies.records import StopCause
from selfspec.engine.results import without_traceback

if TYPE_CHECKING:
    from layerskip_models.draft_vocabulary import TextVocabulary
    from selfspec.cache.hidden_states import HiddenStates
    from selfspec.engine.runners.runner import Runner
    from selfspec.engine.sequence import Sequence
    from selfspec.engine.wave import Row


class Draft:
    """One sequence's part in a round, from its plan to what is accepted. All else is the sequence's own.

    Row 0 of the round is the pending token, row i draft i. Drafting runs rows through the layers before the exit, and
    verification runs all of them through the layers that they lack.

    By the plan:
        exit_layer: 0 if no exit drafts. max_speculations: most tokens it drafts. bits: of the weights that draft, None for
            the model's own. num_copied: drafts copied from earlier text, all or none. context, acceptance, threshold: for the
            round's record. plan_seconds: it took. learns: whether the policy learns from the round. states: keeps hidden
            states for whoever looks at them, None if nobody does. steering: of steered exits, by the row that was verified
            last. vocabulary: that drafts choose among, None for all tokens. wave: the loops after which drafts are chosen,
            where the text is decoded along the diagonal (`selfspec.engine.wave`); else 0.
    While it runs:
        rows: their tokens. first, end: a pass runs rows [first, end). outputs: what the head said of them. logits: float32
            [end - first, vocab], where tokens are sampled or processed; the next pass may overwrite them. verified_from: the
            layer at which verification takes up all rows. seen: the confidence of every row looked at that has one.
            dropped_token: what a greedy draft would have taken from the row that a policy stopped before. num_q: when
            sampling, the rows of the sequence's q that are this draft's: of its tokens, and of the row stopped before. error:
            why the sequence cannot go on: its policy raised it, or a processor, or memory is short. flight, sweeps: of a
            wave, the rows that are on their way through the loops, and the sweeps over the layers so far.
    By the verdict:
        num_accepted: m. block: the m + 1 tokens to commit. failure: why the last of them is not a token: the text ends with
            it if it gets that far. target_tokens: greedy, the full model's choice for rows 0..m at least; when sampling, the
            argmax of every row, if the policy asked for rejected ones. p: when sampling, the distributions that tokens were
            judged by, float32 [m+1 or more, vocab]. rates: when sampling, the chance that the token of each row had, dropped
            or drawn, as far as the rows before it were accepted; None if nobody learns.
    """

    __slots__ = (
        "acceptance", "bits", "block", "context", "dropped_token", "end", "error", "exit_layer", "failure", "first", "flight",
        "learns", "logits", "max_speculations", "num_accepted", "num_copied", "num_q", "outputs", "p", "plan_seconds",
        "rates", "rows", "seen", "sequence", "states", "steering", "stop_cause", "sweeps", "target_tokens", "threshold",
        "verified_from", "vocabulary", "wave",
    )  # fmt: skip
    context: RoundContext
    acceptance: abc.Mapping[Drafter, float] | None
    threshold: float | None
    plan_seconds: float

    def __init__(
        self,
        sequence: Sequence,
        exit_layer: int = 0,
        max_speculations: int = 0,
        bits: int | None = None,
        copied: abc.Sequence[int] = (),
    ) -> None:
        self.sequence, self.exit_layer, self.max_speculations, self.bits = sequence, exit_layer, max_speculations, bits
        self.learns = False
        self.states: HiddenStates | None = None
        self.vocabulary: TextVocabulary | None = None
        self.steering: Tensor | None = None
        # What weights in fewer bits have computed is not kept: see `make_drafts`.
        self.verified_from = exit_layer if bits is None else 0
        self.num_copied = len(copied)
        self.rows: list[int] = [sequence.pending, *copied]
        self.first, self.end = 0, len(self.rows)
        self.outputs: abc.Sequence[HeadOutput] = ()
        self.logits: Tensor | None = None
        self.stop_cause: StopCause = "cap" if copied or exit_layer else "none"
        self.seen: list[float] = []
        self.dropped_token: int | None = None
        self.num_q = self.wave = self.sweeps = 0
        self.flight: list[Row] = []
        self.error: Exception | None = None
        self.num_accepted = 0
        self.block: list[int] = []
        self.failure: Exception | None = None
        self.target_tokens: list[int] = []
        self.p: Tensor | None = None
        self.rates: tuple[float, ...] | None = None
        sequence.reserve(self.end + max_speculations)
        if copied and not sequence.greedy:  # processors see drafts, and so does whoever draws
            length = sequence.length
            sequence.tokens[0, length : length + len(copied)] = torch.tensor(copied, device=sequence.tokens.device)

    @property
    def tokens(self) -> list[int]:
        """The kept drafts d_1..d_k."""
        return self.rows[1:]

    @property
    def confidences(self) -> tuple[float, ...] | None:
        """As in `RoundRecord`."""
        if not self.exit_layer or self.stop_cause == "none" or self.wave or not self.sequence.observes.confidence:
            return None
        return tuple(self.seen)

    @property
    def dropped_acceptance(self) -> float | None:
        """As in `RoundRecord`: known where every draft before the dropped one was accepted."""
        if self.rates is not None:
            return self.rates[-1] if len(self.rates) == len(self.rows) else None
        if self.dropped_token is None or self.failure is not None or self.num_accepted < len(self.rows) - 1:
            return None
        return float(self.block[-1] == self.dropped_token)

    def drop_drafts(self) -> None:
        """Make it a plain step: the round is run once more, without drafts."""
        sequence = self.sequence
        sequence.cache.roll_back(sequence.length - 1)
        del self.rows[1:]
        self.first, self.end, self.verified_from, self.num_copied = 0, 1, 0, 0
        self.stop_cause, self.dropped_token, self.failure = "none", None, None

    def extend(self) -> bool:
        """Take what the head says of the row that was run. Returns whether drafting goes on."""
        try:
            stop = self._take_row()
        except Exception as error:
            self.error = without_traceback(error)
            return False
        self.first, self.end = self.end, len(self.rows)
        self.stop_cause = stop or "cap"
        return stop is None

    def _take_row(self) -> StopCause | None:
        """Ask the policy about the row, take its token, and ask about that. Returns why drafting ends, None if it goes on.

        A token that the policy stops before is never drawn.
        """
        sequence, index = self.sequence, self.first
        observes, stopping = sequence.observes, sequence.policy.stopping
        logits = self.logits
        output = self.outputs[0] if logits is None or self.outputs else self._output_of(logits)
        row = DraftRow(
            num_drafted=index,
            exit_layer=self.exit_layer,
            bits=self.bits,
            position=sequence.length - 1 + index,
            confidence=output.confidence if observes.confidence else None,
            entropy=output.entropy if observes.entropy else None,
            exit_hidden=sequence.hidden[index] if observes.exit_hidden else None,
            features=_features(output, sequence.hidden.device) if observes.features else None,
            context=self.states if observes.context_layers else None,
        )
        if row.confidence is not None and row.confidence == row.confidence:
            self.seen.append(row.confidence)
        no_number = row.confidence != row.confidence or row.entropy != row.entropy
        if no_number or (observes.features and any(map(math.isnan, output[2:]))):  # no policy is shown NaN
            return "before_draw"
        if stopping is not None and stopping.stop_before_draw(row):
            self.dropped_token = self._pick(output, logits, draws=False)
            return "before_draw"
        token = self._pick(output, logits)
        if token is None:
            return "before_draw"
        if logits is not None:  # processors see drafts, and so does whoever draws
            sequence.tokens[0, sequence.length + index] = token
        self.rows.append(token)
        if token in sequence.request.stops.eos:
            return "eos"
        if observes.probability and sequence.samples:
            row = replace(row, probability=float(sequence.q[index, token]))
        if stopping is not None and stopping.stop_after_draw(row, token):
            return "after_draw"
        return "cap" if index + 1 == self.max_speculations else None

    def _output_of(self, logits: Tensor) -> HeadOutput:
        """Return what the policy wants to know of a row whose token is sampled or processed."""
        sequence = self.sequence
        if sequence.detail == "token":
            return HeadOutput(-1, math.nan)
        looked = look if sequence.sampler.native and takes(logits) and logits.is_contiguous() else choices_of
        return looked(logits, sequence.detail).outputs()[0]

    def _pick(self, output: HeadOutput, logits: Tensor | None, *, draws: bool = True) -> int | None:
        """Pick the next draft: the argmax after processors, or a draw from q, which is kept.

        draws: whether to draw it; else q alone is computed, and there is no token.
        None where nothing can be drawn from the row, or a processor refuses the text, to which plain decoding may never come.
        The draft then ends, which depends on nothing that is drawn later, and verification looks at the same row if it is
        ever committed.
        """
        if logits is None:
            return output.token
        sequence, index = self.sequence, self.first
        sampler, before = sequence.sampler, (sequence.tokens, sequence.length + index)
        try:
            if not sequence.samples:
                # Of NaN, too: a greedy draft is a guess, which verification checks.
                return int(sampler.process(logits, *before).argmax())
            q, token = sequence.q[index : index + 1], None
            if draws:
                token = sampler.sample(logits, *before, q, f"draft position {sequence.length + index}")
            else:
                sampler.probabilities(logits, *before, q)
            self.num_q = index + 1
            return token
        except Exception:
            return None


def make_drafts(runner: Runner, drafts: abc.Sequence[Draft]) -> None:
    """Draft as far as each plan and each policy say. A sequence without an exit layer drafts nothing.

    Step j runs one row of every sequence that still drafts. Where exits differ, a row leaves the pass at its own, and the
    draft head then looks at all rows together. Rows that are drafted with weights in fewer bits have a pass of their own.
    """
    going = drafting = [draft for draft in drafts if draft.exit_layer]
    kinds = {draft.bits for draft in drafting}
    while going:
        for bits in kinds:
            alike = going if len(kinds) == 1 else [draft for draft in going if draft.bits == bits]
            if not alike:
                continue
            used = runner if bits is None else runner.rounded(bits)
            exits = sorted({draft.exit_layer for draft in alike})
            if len(exits) == 1:
                used.run(alike, 0, exits[0], "draft")
                continue
            start = 0
            for stop in exits:
                used.run([draft for draft in alike if draft.exit_layer >= stop], start, stop, None)
                start = stop
            used.run(alike, start, start, "draft")
        going = [draft for draft in going if draft.extend()]
    for draft in drafting:
        if draft.bits is not None:
            # Verification runs these rows through every layer in full, and writes keys and values of its own.
            draft.sequence.cache.roll_back(draft.sequence.length - 1)


def _features(output: HeadOutput, device: torch.device) -> Tensor:
    """Compute a row's `selfspec.pacer.network.FEATURES`."""
    p = output.confidence
    features = [math.log(p) if p > 0 else p, output.margin, output.entropy]
    return to_device(torch.tensor(features, dtype=torch.float32, device="cpu"), device)
