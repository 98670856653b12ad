"""One round of self-speculative decoding, over all texts at hand. One text is the simplest case, and takes the same road.

Source: LayerSkip (Elhoushi et al. 2024), section 4.3, with the length of each draft left to a policy; acceptance after
Leviathan et al. 2023 (`selfspec.engine.accept`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from layerskip_models.prefill import MOST_ROWS, PromptPiece, read_pieces
from policies import RoundRecord
from selfspec.engine.agreement import agree_on_round
from selfspec.engine.runners.runner import Runner
from selfspec.engine.sequence import Planned, Text


@dataclass(slots=True, kw_only=True, eq=False)
class Committed:
    """What a text got: tokens, and the record of the round; prefill has none. error: why the text cannot go on."""

    tokens: list[int]
    record: RoundRecord | None = None
    error: Exception | None = None


Found = list[tuple[Text, Committed]]
"""What texts got so far in a step. Whoever wants to go on after an error keeps it: a text that is in it is not run again."""


def run_round(texts: Sequence[Text], passes: Runner, found: Found | None = None) -> list[Committed]:
    """One round of all these texts. An error that concerns one text is that text's; the others go on.

    found: gets each text's share as soon as it is complete, so that an error of all loses nothing.
    """
    found = [] if found is None else found
    first = len(found)
    plans: list[tuple[Text, Planned]] = []
    for text in texts:
        try:
            plans.append((text, text.plan(passes, len(texts))))  # 1. where to exit, how far to draft (0: a plain step)
        except Exception as error:
            tell(text, found, Committed(tokens=text.unsent, error=error))
    if plans:
        _run_planned(plans, passes, found)
    committed = dict(found[first:])
    return [committed[text] for text in texts]


def _run_planned(going: Sequence[tuple[Text, Planned]], passes: Runner, found: Found) -> None:
    turns = [planned.turn for _, planned in going]
    started = perf_counter()
    passes.draft(turns)  # 2. the first layers propose tokens
    drafted = perf_counter()
    passes.verify(turns)  # 3. the other layers look at all of them at once
    verified = perf_counter()
    outcomes = passes.accept(turns)  # 4. those that the model itself would have said hold, and one token more
    seconds = (drafted - started) / len(going), (verified - drafted) / len(going)
    shares = agree_on_round(going[0][0].model, seconds, turns, outcomes)
    accepting = (perf_counter() - verified) / len(going)
    for (text, planned), outcome in zip(going, outcomes):
        text.stats.accept_seconds += accepting
        try:
            if outcome.error is not None:
                raise outcome.error
            tokens = text.commit(outcome)  # 5. commit them, and forget what was rejected: only lengths change
            with passes.learning():
                record = text.learn(planned, outcome, tokens, *shares)  # 6. the policy sees what came of its plan
            if outcome.failure is not None:  # the text ended before it
                passes.clear()
            tell(text, found, Committed(tokens=text.unsent, record=record))
        except Exception as error:
            tell(text, found, Committed(tokens=text.unsent, error=error))


def tell(text: Text, found: Found, committed: Committed) -> None:
    """Hand over what a text got. Nothing is called here, so no signal comes between: no token is lost or told twice."""
    found += [(text, committed)]
    text.unsent = []


def read_prompts(
    texts: Sequence[Text], most: int = MOST_ROWS, enough: int = 1, found: Found | None = None
) -> list[tuple[Text, Committed]]:
    """Read the next pieces of prompts in one pass: of `most` rows, about; no further prompt once `enough` rows are in it.

    Returns what those commit whose prompt is read now: the first new token. found: as in `run_round`.
    """
    pieces: list[PromptPiece] = []
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
    found = [] if found is None else found
    first = len(found)
    failed = _show_prompts(texts, hidden, found)
    for (text, states), scores in zip(ended, logits):
        if text in failed:
            continue
        try:
            text.begin(states, scores)
            tell(text, found, Committed(tokens=text.unsent))
        except Exception as error:
            tell(text, found, Committed(tokens=text.unsent, error=error))
    return found[first:]


def _show_prompts(texts: Sequence[Text], hidden: Sequence[Tensor], found: Found) -> set[Text]:
    """Let those who watch prompts see what was read. Returns the texts where that fails."""
    failed = set()
    for text, states in zip(texts, hidden):
        try:
            text.show_prompt(states)
        except Exception as error:
            failed.add(text)
            tell(text, found, Committed(tokens=text.unsent, error=error))
    return failed


def decode(text: Text, passes: Runner) -> Iterator[Committed]:
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
