"""One round of self-speculative decoding, over all texts at hand. One text is the simplest case, and takes the same road.

Source: LayerSkip (Elhoushi et al. 2024), section 4.3, with the length of each draft left to a policy; acceptance after
Leviathan et al. 2023 (`selfspec.accept`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from layerskip_models.prefill import MOST_ROWS, Piece, read_pieces
from policies import RoundRecord
from selfspec.parallel.agreement import agree_on_round
from selfspec.passes import Passes
from selfspec.text import Planned, Text


@dataclass(slots=True, kw_only=True, eq=False)
class Committed:
    """What a text got: tokens, and the record of the round; prefill has none. error: why the text cannot go on."""

    tokens: list[int]
    record: RoundRecord | None = None
    error: Exception | None = None


def run_round(texts: Sequence[Text], passes: Passes) -> list[Committed]:
    """One round of all these texts. An error that concerns one text is that text's; the others go on."""
    committed: dict[Text, Committed] = {}
    plans: dict[Text, Planned] = {}
    for text in texts:
        try:
            plans[text] = text.plan(passes, len(texts))  # 1. where to exit, how far to draft (0: a plain step)
        except Exception as error:
            committed[text] = Committed(tokens=[], error=error)
    if plans:
        committed |= zip(plans, _run_planned([*plans.items()], passes))
    return [committed[text] for text in texts]


def _run_planned(going: Sequence[tuple[Text, Planned]], passes: Passes) -> list[Committed]:
    turns = [planned.turn for _, planned in going]
    started = perf_counter()
    passes.draft(turns)  # 2. the first layers propose tokens
    drafted = perf_counter()
    passes.verify(turns)  # 3. the other layers look at all of them at once
    verified = perf_counter()
    outcomes = passes.accept(turns)  # 4. those that the model itself would have said hold, and one token more
    seconds = (drafted - started) / len(going), (verified - drafted) / len(going)
    shares = agree_on_round(going[0][0].model, seconds, turns, outcomes)
    going[0][0].stats.accept_seconds += perf_counter() - verified
    results = []
    for (text, planned), outcome in zip(going, outcomes):
        try:
            if outcome.error is not None:
                raise outcome.error
            tokens = text.commit(outcome)  # 5. commit them, and forget what was rejected: only lengths change
            with passes.learning():
                record = text.learn(planned, outcome, tokens, *shares)  # 6. the policy sees what came of its plan
            results.append(Committed(tokens=tokens, record=record))
            if outcome.failure is not None:  # the text ended before it
                passes.clear()
        except Exception as error:
            results.append(Committed(tokens=[], error=error))
    return results


def read_prompts(texts: Sequence[Text], most: int = MOST_ROWS, enough: int = 1) -> list[tuple[Text, Committed]]:
    """Read the next pieces of prompts in one pass: of `most` rows, about; no further prompt once `enough` rows are in it.

    Returns what those commit whose prompt is read now: the first new token.
    """
    pieces: list[Piece] = []
    rows = 0
    for text in texts:
        pieces.append(text.next_piece(most - rows))
        rows += pieces[-1].rows
        if rows >= enough:
            break
    reading = perf_counter()
    model = texts[0].model
    hidden = read_pieces(model, pieces, model.num_layers)
    ended = [(text, states) for text, states in zip(texts, hidden) if not text.unread]
    logits = model.logits(torch.cat([states[-1:] for _, states in ended])).split(1) if ended else ()
    seconds = perf_counter() - reading
    for text, piece in zip(texts, hidden):
        text.prefill_seconds += seconds * piece.shape[0] / rows
    committed = []
    for (text, states), scores in zip(ended, logits):
        try:
            committed.append((text, Committed(tokens=text.begin(states, scores))))
        except Exception as error:
            committed.append((text, Committed(tokens=[], error=error)))
    return committed


def decode(text: Text, passes: Passes) -> Iterator[Committed]:
    """A single text from its prompt to its stop, without an engine: what each step commits. Raises what ends it early."""
    while text.reading:
        for _, committed in read_prompts([text]):
            yield _sound(committed)
    while text.stop_reason is None:
        (committed,) = run_round([text], passes)
        yield _sound(committed)


def _sound(committed: Committed) -> Committed:
    if committed.error is not None:
        raise committed.error
    return committed
