"""Simulate SPIDE's Algorithm 1 on two devices: it assumes a second one that drafts while the first verifies.

The engine has the serial half alone. Here the whole is played over greedy drafts that were recorded from every position of
a text. Calls and drafts are exact; the unit of time is a pass of one of the model's layers. `play_arms` lists the arms; an
arm's speed is its tokens over its layers.

Two readings of what is printed. Line 28 takes the minimum with k and line 30 asks for k + 1, which would never be: here a
call accepts up to k + 1 tokens, as in section 3.2 and Figure 2. Line 33 keeps the last s drafts, the first of which this very
call has judged: here the next call judges the s - 1 drafts behind that one, as in Figure 2.
Source: SPIDE (2025), section 3.2, Figure 2, eq. 6 and Algorithm 1, lines 1 to 42.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass

from policies.records import Drafter
from policies.spide import AcceptanceTable
from selfspec import SelfSpecGenerator
from selfspec.pacer import PAPER
from selfspec.pacer.examples import draft_traces
from selfspec.pacer.settings import DataPlan

TAU = 0.7
LENGTHS = range(1, 13)
MOST = 32
"""Drafts that are made in turn, in a row; the paper has no bound but the text's end."""
MOST_AHEAD = 16
"""Drafts that are made while a call runs; eq. 6 gives at most the number of layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedText:
    """A greedy text of N new tokens, and what one exit drafts from each of its positions, past the first mistake.

    accepted, confidences: N - 1 drafts; draft i begins when i + 1 new tokens are committed, and ends with the text.
    accepted: its tokens before the first that is not the text's. confidences: of each of its tokens.
    """

    exit_layer: int
    num_layers: int
    accepted: Sequence[int]
    confidences: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A text decoded after its first token. calls: of the target. drafts: made, on either device; accepted: of them.

    two_devices: layers of time where drafts are made beside a call; one_device: where they wait for one another.
    """

    tokens: int
    calls: int
    drafts: int
    accepted: int
    two_devices: int
    one_device: int


def record_drafts(
    generator: SelfSpecGenerator, prompt: Sequence[int], max_new_tokens: int, exit_layers: Sequence[int]
) -> dict[int, DraftedText]:
    """Continue a prompt greedily, EOS off, and draft from every position at each exit layer."""
    plan = DataPlan(
        exit_layers=tuple(exit_layers),
        response_tokens=max_new_tokens,
        window=MOST + MOST_AHEAD,
        positions=0,
        ignore_eos=True,
        design=PAPER,  # drafts go on to the window's end
    )
    found = {}
    for trace in draft_traces(generator, prompt, plan, seed=0):
        rows = trace.features[:, 0].double().exp().split(trace.lengths.tolist())
        found[trace.exit_layer] = DraftedText(
            exit_layer=trace.exit_layer,
            num_layers=generator.model.num_layers,
            accepted=trace.accepted.tolist(),
            confidences=[row.tolist() for row in rows],
        )
    return found


def drafts_ahead(text: DraftedText) -> int:
    """Return s, how many drafts take as long as one call, at most `MOST_AHEAD`. Source: eq. 6, with speeds as 1 / layers."""
    return min(text.num_layers // text.exit_layer, MOST_AHEAD)


def play(
    text: DraftedText, *, most: int, ahead: int = 0, tau: float = 0.0, table: AcceptanceTable | None = None
) -> Played:
    """Decode a text by Algorithm 1.

    most: drafts in turn. ahead: s, the drafts that are made while a call runs; 0 drafts and verifies in turn, and a draft
    that is accepted whole brings a token of the target. table: learns from every call, and ends drafts in turn when the
    product of its rates falls to `tau` or below; without one all have `most` tokens.
    """
    drafter, exit_layer, num_layers = Drafter(text.exit_layer), text.exit_layer, text.num_layers
    end, committed, pending, is_parallel = len(text.accepted) + 1, 1, 0, False
    calls = drafts = accepted_drafts = two_devices = one_device = 0
    while committed < end:
        confidences, left = text.confidences[committed - 1], end - committed
        in_turn = 0
        if not is_parallel:  # lines 3 to 15
            in_turn = pending = _drafts_in_turn(confidences[: min(most, left - 1)], drafter, tau, table)
        meanwhile = min(ahead, left - pending) if pending or is_parallel else 0  # lines 19 to 23
        judged = pending + (meanwhile > 0)  # p_{k+1} of this call judges the first draft that is made meanwhile
        accepted = min(text.accepted[committed - 1], judged)
        if table is not None:  # line 29
            for place in range(min(accepted + 1, judged)):
                table.add(drafter, confidences[place], float(place < accepted))
        is_parallel = meanwhile > 0 and accepted == judged
        pending = meanwhile - 1 if is_parallel else 0  # lines 30 to 39
        committed += accepted if is_parallel else min(accepted + 1, left)
        calls += 1
        drafts += in_turn + meanwhile
        accepted_drafts += accepted
        two_devices += in_turn * exit_layer + max(num_layers, meanwhile * exit_layer)
        # A draft behind the last judged one has run that row through the exit's layers already.
        one_device += (in_turn + meanwhile) * exit_layer + num_layers - (exit_layer if meanwhile else 0)
    made = {"drafts": drafts, "accepted": accepted_drafts}
    return Played(tokens=end - 1, calls=calls, **made, two_devices=two_devices, one_device=one_device)


def _drafts_in_turn(confidences: Sequence[float], drafter: Drafter, tau: float, table: AcceptanceTable | None) -> int:
    """Count the drafts up to the one that brings the product of the table's rates to tau or below, that one included."""
    reliability = 1.0
    for place, confidence in enumerate(confidences):
        reliability *= 1.0 if table is None else table.rate(drafter, confidence)
        if reliability <= tau:
            return place + 1
    return len(confidences)


def best_length(texts: Iterable[DraftedText]) -> int:
    """Return the fixed length in turn that has the most tokens a layer, all texts pooled."""
    layers = {length: sum(play(text, most=length).two_devices for text in texts) for length in LENGTHS}
    return min(layers, key=layers.__getitem__)


def play_arms(texts: Sequence[DraftedText], length: int) -> dict[str, list[Played]]:
    """Play texts of one exit layer: drafts of a fixed length in turn, all of SPIDE, it without parallel verification, and
    that with tables from elsewhere: each text begins with what every second text has taught, its own among them or not.

    Else a table keeps what it learned from text to text, as in the paper.
    """
    tables = [AcceptanceTable([Drafter(texts[0].exit_layer)]) for _ in range(4)]

    def dynamic(texts: Sequence[DraftedText], table: AcceptanceTable, ahead: int = 0) -> list[Played]:
        return [play(text, most=MOST, ahead=ahead, tau=TAU, table=table) for text in texts]

    arms = {
        "fixed": [play(text, most=length) for text in texts],
        "spide": dynamic(texts, tables[0], drafts_ahead(texts[0])),
        "serial": dynamic(texts, tables[1]),
    }
    for half in (0, 1):
        dynamic(texts[half::2], tables[2 + half])
    for name, other in (("own half's table", 0), ("other half's table", 1)):
        taught = [deepcopy(tables[2 + (place + other) % 2]) for place in range(len(texts))]
        arms[name] = [played for text, table in zip(texts, taught) for played in dynamic([text], table)]
    return arms
