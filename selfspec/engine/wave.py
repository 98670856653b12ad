"""Decode texts of a looped model along the diagonal: a sweep over its layers takes every row in flight one loop further.

With 4 loops, a text whose drafts hold:

    sweep                      1       2       3       4       5       6
    pending token, row n - 1   loop 1  loop 2  loop 3  loop 4
    draft 1, row n                     loop 1  loop 2  loop 3  loop 4
    draft 2, row n + 1                         loop 1  loop 2  loop 3  loop 4

The row that leaves loop 1 drafts the next token, whose row enters with the next sweep. The row that leaves the last loop is
the model's own word on the next token. If that is the draft, it is committed, and the rows behind it stay in flight: then
each sweep, which reads the weights of one loop, commits a token. If not, they are dropped, and the model's own token enters.

In a sweep a row attends to the keys and values of its own loop. Those of the rows before it were written by earlier sweeps,
so each row is computed as in plain decoding. Loops that rows have entered hold more rows than the text has: the cache's
length is what the last loop holds, and rolling back makes all loops equal.

Between two rounds rows in flight are the sequence's (`Sequence.flight`). They may be dropped there at any time: the cache is
rolled back, and the pending token enters again. A round works on a list of its own, so one that breaks off changes nothing.

Source: LoopSpec (arXiv 2609.17184) and WaveFront Decoding (arXiv 2609.23033), with acceptance token by token (`accept.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.choices import HeadOutput
from layerskip_models.transfer import to_device
from selfspec.engine.accept import accept_sampled, reach
from selfspec.engine.draft import Draft
from selfspec.engine.results import without_traceback
from selfspec.engine.sampling import non_finite
from selfspec.engine.verification import NO_TOKEN


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """A row in flight.

    token: that it is of. loops: that it has been through. hidden: [1, hidden], what the last of them put out. q: float32
    [1, vocab], what the token was drawn from; None unless it is a drawn draft.
    """

    token: int
    loops: int = 0
    hidden: Tensor | None = None
    q: Tensor | None = None


Said = Mapping[Row, HeadOutput | Tensor]
"""The head's answer for each row: a choice, or logits [1, vocab] where tokens are drawn or processed."""


def run_waves(model: LayerSkipModel, drafts: Sequence[Draft]) -> None:
    """Sweep until each of these texts has a token to commit. Those that have one earlier go on and may commit several.

    A text that starts with nothing in flight takes as many sweeps as there are loops, and no text takes more. So a block is
    some accepted drafts, and at most one token behind them that is the model's own.
    """
    for draft in drafts:
        if draft.flight:
            _restore(model, draft)
        else:
            draft.flight = [Row(token=draft.sequence.pending)]
    while any(draft.flight and not draft.block for draft in drafts):
        _sweep(model, [draft for draft in drafts if draft.flight])
    for draft in drafts:
        drafted = len(draft.rows) > 1
        draft.exit_layer, draft.stop_cause = (draft.wave * model.loop_layers, "cap") if drafted else (0, "none")


def _restore(model: LayerSkipModel, draft: Draft) -> None:
    """Write keys and values of the rows in flight again, if a round broke off: then no loop holds more than the text has."""
    sequence, flight = draft.sequence, draft.flight
    if not flight[0].loops or sequence.cache.loop(0).length >= sequence.length:
        return
    tokens = torch.tensor([row.token for row in flight], dtype=torch.long, device="cpu")
    sequence.tokens[0, sequence.length - 1 : sequence.length - 1 + len(flight)] = to_device(tokens, model.device)
    hidden = model.embed(to_device(tokens, model.device))
    for loop in range(flight[0].loops):
        rows = sum(row.loops > loop for row in flight)
        hidden = model.run_layers(hidden[:rows], 0, model.loop_layers, [(sequence.cache.loop(loop), rows)])


def _sweep(model: LayerSkipModel, drafts: Sequence[Draft]) -> None:
    """Take all rows in flight one loop further, and hear the head on those that land or draft, all texts at once."""
    rows = [row for draft in drafts for row in draft.flight]
    caches = [(draft.sequence.cache.loop(row.loops), 1) for draft in drafts for row in draft.flight]
    entering = torch.tensor([row.token for row in rows if row.hidden is None], dtype=torch.long, device="cpu")
    embedded = iter(model.embed(to_device(entering, model.device)).split(1) if len(entering) else ())
    hidden = torch.cat([next(embedded) if row.hidden is None else row.hidden for row in rows])
    moved = iter(model.run_layers(hidden, 0, model.loop_layers, caches).split(1))
    for draft in drafts:
        draft.sweeps += 1
        draft.flight = [replace(row, loops=row.loops + 1, hidden=next(moved)) for row in draft.flight]
    said: dict[Row, HeadOutput | Tensor] = {}
    for greedy in (True, False):
        alike = [draft for draft in drafts if draft.sequence.greedy == greedy]
        asked = [row for draft in alike for row in draft.flight if row.loops in (draft.wave, model.num_loops)]
        if asked:
            ends = [(row.hidden, row.loops * model.loop_layers) for row in asked if row.hidden is not None]
            hidden = torch.cat([model.at_exit(hidden, layer) for hidden, layer in ends])  # drafts may have an adapter
            said |= zip(asked, model.choices(hidden).outputs() if greedy else model.logits(hidden).split(1))
    for draft in drafts:
        try:
            if draft.flight[0].loops == model.num_loops:
                _land(draft, said)
            if draft.flight and draft.flight[-1].loops == draft.wave:
                _draft(draft, said)
        except Exception as error:
            draft.error, draft.flight = without_traceback(error), []


def _land(draft: Draft, said: Said) -> None:
    """Commit the model's own token after the row that has left the last loop, and drop the rows of other guesses."""
    sequence, stops = draft.sequence, draft.sequence.request.stops
    landed, behind = draft.flight[0], draft.flight[1:]
    position = sequence.length + len(draft.block)
    try:
        token = _own_token(draft, said[landed], position, behind[0] if behind else None)
    except Exception as error:
        draft.flight = []
        if not draft.block:  # else that is committed first, and the next round comes here again
            draft.block, draft.failure = [NO_TOKEN], without_traceback(error)
        return
    draft.block.append(token)
    if behind and behind[0].token == token:
        draft.num_accepted += 1
        draft.rows.append(token)
        draft.flight = behind
    else:
        draft.rows += [row.token for row in behind]
        draft.flight = [Row(token=token)]
        sequence.cache.roll_back(position)
        if not sequence.greedy:  # processors see the text
            sequence.tokens[0, position] = token
    if token in stops.eos or len(draft.block) == draft.context.remaining_tokens:
        draft.flight = []


def _own_token(draft: Draft, said: HeadOutput | Tensor, position: int, guess: Row | None) -> int:
    """Take the token for this position that the model itself says: a draft with probability min(1, p / q), when sampling."""
    sequence, where = draft.sequence, f"position {position}"
    sampler, tokens = sequence.sampler, sequence.tokens
    if isinstance(said, HeadOutput):
        if said.logit != said.logit:
            raise non_finite(where)
        return said.token
    if guess is None or guess.q is None:
        return sampler.next_token(said, tokens, position)
    p = sampler.probabilities(said, tokens, position)
    reached = reach(p, guess.q, torch.tensor([guess.token], dtype=torch.long, device=p.device))
    accepted, weights = accept_sampled(p.expand(2, -1), guess.q, reached, sampler.uniforms(1, p.device))
    return guess.token if accepted else sampler.draw(weights, where)


def _draft(draft: Draft, said: Said) -> None:
    """Draft the token after the newest row, as in `Draft.extend`; nothing behind a stop or where no row would be of use."""
    sequence, newest = draft.sequence, draft.flight[-1]
    position = sequence.length + len(draft.block) + len(draft.flight) - 1
    last = draft.context.num_committed + draft.context.remaining_tokens - 1
    if position >= last or newest.token in sequence.request.stops.eos:
        return
    head, q = said[newest], None
    if isinstance(head, HeadOutput):
        draft.flight.append(Row(token=head.token))
        return
    try:
        if sequence.samples:
            q = torch.empty_like(head)
            token = sequence.sampler.sample(head, sequence.tokens, position, q, f"draft position {position}")
        else:
            token = int(sequence.sampler.process(head, sequence.tokens, position).argmax())
    except Exception:  # no draft from this row, as in `Draft._pick`
        return
    sequence.tokens[0, position] = token
    draft.flight.append(Row(token=token, q=q))
