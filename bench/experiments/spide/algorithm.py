"""SPIDE's Algorithm 1, and serial speculative decoding, played over recorded drafts (`free_drafts`).

Two readings. Line 28 takes the minimum with k and line 30 asks for k + 1, which would never be: here a call accepts up to
k + 1 tokens, as section 3.2 and Figure 2 have it. Line 33 keeps the last s drafts, of which the first was judged by this very
call: here, as in Figure 2, the s - 1 behind it are what the next call judges first. Judging it a second time would change the
output when sampling.
Source: SPIDE (2025), section 3.2, Figure 2 and Algorithm 1, lines 1 to 42.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bench.experiments.spide.free_drafts import DraftedText
from policies import DraftRow, Plan, RoundRecord, StoppingPolicy
from policies.records import StopCause

Mode = Literal["serial", "parallel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the target model. Without drafts, a plain step.

    mode: "serial" if drafting waited for its end before this call; else drafts were left from the call before.
    drafted: in turn, before the call. ahead: drafted while it ran. judged, accepted: of the drafts. tokens: committed.
    """

    mode: Mode
    drafted: int
    ahead: int
    judged: int
    accepted: int
    tokens: int

    def layers(self, exit_layer: int, num_layers: int) -> int:
        """What it loads on one device with its drafts: DEL's k E + L, where a draft behind the last judged one has run that
        row through the exit's layers already."""
        return (self.drafted + self.ahead) * exit_layer + num_layers - (exit_layer if self.ahead else 0)

    def two_device_time(self, exit_layer: int, num_layers: int) -> int:
        """Its time in layers where a second device drafts while it runs.

        It is the same for a separate draft model of E / L of the target's cost, and for the first E layers on one device and
        the others on another.
        """
        return self.drafted * exit_layer + max(num_layers, self.ahead * exit_layer)


def drafts_ahead(exit_layer: int, num_layers: int) -> int:
    """s, the number of drafts that take as long as one call. Source: SPIDE, eq. 6, with speeds as 1 / layers."""
    return num_layers // exit_layer


def play(text: DraftedText, stopping: StoppingPolicy, *, most: int, ahead: int = 0) -> list[Call]:
    """The calls that decode a text after its first token, which the prompt's own call gives.

    stopping: ends serial drafts after a drawn token (`stop_after_draw`), and learns from every call. It keeps what it learned
    of texts before. most: drafts that one of its drafts may have. ahead: s of Algorithm 1; 0 drafts and verifies in turn,
    with a bonus token after a draft that is accepted whole.
    Raises ValueError where most + ahead is beyond the window of the recorded drafts.
    """
    if most + ahead > text.window:
        raise ValueError(f"{most} drafts and {ahead} ahead need a window of {most + ahead}, this one is {text.window}")
    plan = Plan(exit_layer=text.exit_layer, max_speculations=most)
    total, committed, pending = len(text.tokens), 1, 0
    mode: Mode = "serial"
    calls: list[Call] = []
    while committed < total:
        left = total - committed
        cause: StopCause = "cap"
        if mode == "serial":  # lines 3 to 15
            pending, cause = _draft(text, stopping, plan, committed, min(most, left - 1))
        more = min(ahead, left - pending) if pending or mode == "parallel" else 0  # lines 19 to 23
        judged = pending + (more > 0)  # p_{k+1} of the call judges the first draft that was made while it ran
        draft = text.draft(committed).tokens[:judged]
        accepted = text.accepted(committed, draft)
        tokens = accepted if accepted == judged and more else min(accepted + 1, left)
        record = _record(text, committed, len(calls), judged, accepted, tokens, most, cause)
        stopping.observe(record)  # line 29
        calls.append(
            Call(
                mode=mode,
                drafted=pending if mode == "serial" else 0,
                ahead=more,
                judged=judged,
                accepted=accepted,
                tokens=tokens,
            )
        )
        committed += tokens
        if more and accepted == judged:  # lines 30 to 34
            mode, pending = "parallel", more - 1
        else:  # lines 35 to 39
            mode, pending = "serial", 0
    return calls


def _draft(text: DraftedText, stopping: StoppingPolicy, plan: Plan, committed: int, cap: int) -> tuple[int, StopCause]:
    """How many tokens a serial draft gets, and why it ends."""
    if cap == 0:
        return 0, "none"
    draft = text.draft(committed)
    stopping.start_round(plan)
    for place in range(cap):
        row = DraftRow(
            num_drafted=place,
            exit_layer=text.exit_layer,
            position=text.num_prompt_tokens + committed - 1 + place,
            confidence=draft.confidences[place],
            entropy=draft.entropies[place],
        )
        if stopping.stop_after_draw(row, draft.tokens[place]):
            return place + 1, "after_draw"
    return cap, "cap"


def _record(
    text: DraftedText,
    committed: int,
    index: int,
    judged: int,
    accepted: int,
    tokens: int,
    most: int,
    cause: StopCause,
) -> RoundRecord:
    draft = text.draft(committed)
    return RoundRecord(
        index=index,
        num_committed_before=text.num_prompt_tokens + committed,
        exit_layer=text.exit_layer if judged else None,
        max_speculations=most,
        draft_tokens=draft.tokens[:judged],
        num_accepted=accepted,
        tokens=text.tokens[committed : committed + tokens],
        loaded_layers=judged * text.exit_layer + text.num_layers,
        stop_cause=cause,
        confidences=draft.confidences[:judged],
    )


def longest_runs(calls: Sequence[Call]) -> list[int]:
    """Drafts accepted in a row between two tokens of the target: what parallel calls add up to, as the paper's MAT does."""
    runs, run = [], 0
    for call in calls:
        run += call.accepted
        if call.tokens > call.accepted:
            runs.append(run)
            run = 0
    return [*runs, run] if run else runs
