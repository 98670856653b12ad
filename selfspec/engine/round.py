"""One round of self-speculative decoding, over all sequences at hand. A single sequence is the simplest case of the same.

Source: LayerSkip (Elhoushi et al. 2024), section 4.3, with the length of each draft left to a policy; acceptance after
Leviathan et al. 2023 (`selfspec.engine.accept`).
"""

from __future__ import annotations

from collections import abc
from time import perf_counter

import torch

from layerskip_models.prefill import MAX_ROWS, PromptPiece, read_pieces
from selfspec.engine.draft import Draft, make_drafts
from selfspec.engine.results import StepOutput, without_traceback
from selfspec.engine.runners.runner import Runner
from selfspec.engine.sequence import Sequence
from selfspec.engine.verification import accept, verify

Outputs = list[tuple[Sequence, StepOutput]]
"""What sequences got so far in a step. Keep it to go on after an error: a sequence that is in it is not run again."""


def run_round(sequences: abc.Sequence[Sequence], runner: Runner, found: Outputs | None = None) -> list[StepOutput]:
    """One round of all these sequences. An error that concerns one of them ends that one; the others go on.

    found: gets each sequence's output as soon as it is complete, so that an error of all loses nothing.
    """
    found = [] if found is None else found
    first = len(found)
    drafts: list[Draft] = []
    for sequence in sequences:
        try:
            drafts.append(sequence.plan(len(sequences)))  # 1. Plan: where to exit, how far to draft (0: a plain step).
        except Exception as error:
            emit(sequence, found, StepOutput(tokens=sequence.unsent, error=without_traceback(error)))
    if drafts:
        clock = drafts[0].sequence.clock
        started = clock()
        others = [draft for draft in drafts if not draft.wave]
        make_drafts(runner, others)  # 2. Draft: the first layers propose tokens.
        drafted = clock()
        verify(runner, others)  # 3. Verify: the other layers look at all of them at once.
        if len(others) < len(drafts):  # Texts of a looped model may do both at once.
            from selfspec.engine.wave import run_waves

            run_waves(runner.model, [draft for draft in drafts if draft.wave])
        verified = clock()
        for draft in others:
            accept(runner, draft)  # 4. Accept those that the model itself would have said.
        spent = drafted - started, verified - drafted, clock() - verified
        shares = tuple(seconds / len(drafts) for seconds in spent)
        for draft in drafts:
            sequence = draft.sequence
            sequence.stats.accept_seconds += shares[2]
            try:
                # 5. Commit them and one token more. Only lengths change.
                tokens = None if draft.error is not None else sequence.commit(draft)
                if tokens is None:
                    emit(sequence, found, StepOutput(tokens=sequence.unsent, error=draft.error or draft.failure))
                    continue
                record = sequence.learn(draft, tokens, shares)  # 6. Learn: the policy sees what came of its plan.
                emit(sequence, found, StepOutput(tokens=sequence.unsent, record=record))
            except Exception as error:
                emit(sequence, found, StepOutput(tokens=sequence.unsent, error=without_traceback(error)))
    outputs = dict(found[first:])
    return [outputs[sequence] for sequence in sequences]


def emit(sequence: Sequence, found: Outputs, output: StepOutput) -> None:
    """Hand over what a text got. Nothing is called here, so no signal comes between: no token is lost or told twice."""
    found += [(sequence, output)]
    sequence.unsent = []


def read_prompts(
    sequences: abc.Sequence[Sequence], most: int = MAX_ROWS, enough: int = 1, found: Outputs | None = None
) -> list[tuple[Sequence, StepOutput]]:
    """Read the next pieces of prompts in one pass: of `most` rows, about; no further prompt once `enough` rows are in it.

    Returns what those commit whose prompt is read now: the first new token. found: as in `run_round`.
    """
    pieces: list[PromptPiece] = []
    rows = 0
    for sequence in sequences:
        pieces.append(sequence.next_piece(most - rows))
        rows += pieces[-1].rows
        if rows >= enough:
            break
    reading = perf_counter()
    model = sequences[0].model
    hidden = read_pieces(model, pieces, model.num_layers)
    read = [(one, states, one.cache.length == one.length) for one, states in zip(sequences, hidden)]
    last = [states[-1:] for _, states, ends in read if ends]
    logits = iter(model.logits(torch.cat(last)).split(1) if last else ())
    seconds = perf_counter() - reading
    found = [] if found is None else found
    first = len(found)
    for sequence, states, ends in read:
        sequence.prefill_seconds += seconds * states.shape[0] / rows
        scores = next(logits) if ends else None
        try:
            sequence.show_prompt(states)
            if scores is not None:
                sequence.begin(states, scores)
                emit(sequence, found, StepOutput(tokens=sequence.unsent))
        except Exception as error:
            emit(sequence, found, StepOutput(tokens=sequence.unsent, error=without_traceback(error)))
    return found[first:]
