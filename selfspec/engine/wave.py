"""Decode texts of a looped model along the diagonal: a sweep over its layers takes every row in flight one loop further.

With 4 loops, a text whose drafts hold:

    sweep                      1       2       3       4       5       6
    pending token, row n - 1   loop 1  loop 2  loop 3  loop 4
    draft 1, row n                     loop 1  loop 2  loop 3  loop 4
    draft 2, row n + 1                         loop 1  loop 2  loop 3  loop 4

The row that leaves loop 1 drafts the next token, whose row enters with the next sweep. The row that leaves the last loop is
the model's own word on the next token. If that is the draft, it is committed, and the rows behind it stay in flight: then
each sweep, which reads the weights of one loop, commits a token. If not, they are dropped, and the model's own token enters.

The loops between these are asked, too. Where one says another token than the draft, the rows behind are dropped, and its
token becomes the draft. A mistake that loop 2 corrects costs one sweep; one that the last loop finds costs N - 1. Greedy text
does not depend on who drafts. When sampling, a draft drawn from q is kept with probability min(1, q' / q), where q' is what
the later loop says, and else drawn again from max(0, q' - q). Either way it is then a draw from q'.

In a sweep a row attends to the keys and values of its own loop. Those of the rows before it were written by earlier sweeps,
so each row is computed as in plain decoding. Loops that rows have entered hold more rows than the text has: the cache's
length is what the last loop holds. Where rows are dropped, the loops that the row before them has left are rolled back to it.

Between two rounds rows in flight are the sequence's (`Sequence.flight`). They may be dropped there at any time: the cache is
rolled back, and the pending token enters again. A round works on a list of its own, so one that breaks off changes nothing.

Source: LoopSpec (arXiv 2609.17184) and WaveFront Decoding (arXiv 2609.23033), with acceptance token by token (`accept.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.choices import HeadOutput
from layerskip_models.transfer import to_device
from selfspec.engine.accept import residual
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
        asked = [row for draft in alike for row in draft.flight if row.loops >= draft.wave]
        if asked:
            ends = [(row.hidden, row.loops * model.loop_layers) for row in asked if row.hidden is not None]
            hidden = torch.cat([model.at_exit(hidden, layer) for hidden, layer in ends])  # drafts may have an adapter
            said |= zip(asked, model.choices(hidden).outputs() if greedy else model.logits(hidden).split(1))
    for draft in drafts:
        first = draft.sequence.length + len(draft.block)
        try:
            for position, row in enumerate(draft.flight, first):
                if row in said and not _hear(draft, row, said[row], position, row.loops == model.num_loops):
                    break
        except Exception as error:
            draft.error, draft.flight = without_traceback(error), []


def _hear(draft: Draft, row: Row, said: HeadOutput | Tensor, position: int, lands: bool) -> bool:
    """Take a row's word on the token at this position: a draft, or the model's own token if the row has left the last loop.

    said: what the head says of it: a choice, or logits [1, vocab] where tokens are drawn or processed. Returns whether the
    rows behind it stay in flight.
    """
    sequence, eos = draft.sequence, draft.sequence.request.stops.eos
    count = position - sequence.length - len(draft.block) + 1
    kept, behind = [] if lands else draft.flight[:count], draft.flight[count:]
    last = draft.context.num_committed + draft.context.remaining_tokens - 1
    if not (lands or behind) and (position >= last or row.token in eos):  # a row there would be of no use
        return True
    try:
        token, q = _token(draft, said, position, behind[0] if behind else None)
    except Exception as error:
        if not lands:  # no draft from this row, as in `Draft._pick`
            return True
        draft.flight = []
        if not draft.block:  # else that is committed first, and the next round comes here again
            draft.block, draft.failure = [NO_TOKEN], without_traceback(error)
        return False
    stay = bool(behind) and behind[0].token == token
    if lands:
        draft.block.append(token)
        draft.num_accepted += stay
        draft.rows += [token] if stay else [row.token for row in behind]
    if stay:
        draft.flight = [*kept, replace(behind[0], q=q), *behind[1:]]
    else:
        draft.flight = [*kept, Row(token=token, q=q)]
        for loop in range(row.loops):  # those behind hold fewer rows
            sequence.cache.loop(loop).roll_back(position)
        if not sequence.greedy:  # processors see the text, drafts included
            sequence.tokens[0, position] = token
    if lands and (token in eos or len(draft.block) == draft.context.remaining_tokens):
        draft.flight = []
    return stay and bool(draft.flight)


def _token(draft: Draft, said: HeadOutput | Tensor, position: int, guess: Row | None) -> tuple[int, Tensor | None]:
    """Take the token that the head says: a draft with probability min(1, p / q), when sampling. Returns it and this p."""
    sequence, where = draft.sequence, f"position {position}"
    sampler, tokens = sequence.sampler, sequence.tokens
    if isinstance(said, HeadOutput):
        if said.logit != said.logit:
            raise non_finite(where)
        return said.token, None
    if not sequence.samples:
        return sampler.next_token(said, tokens, position), None
    p = torch.empty_like(said, dtype=torch.float32)
    if guess is None or guess.q is None:
        return sampler.sample(said, tokens, position, p, where), p
    sampler.probabilities(said, tokens, position, p)
    if sampler.uniforms(1, p.device)[0] * float(guess.q[0, guess.token]) < float(p[0, guess.token]):
        return guess.token, p
    weights = residual(p, guess.q, (1.0,))[0]
    return sampler.draw(weights if float(weights.sum()) > 0 else p[0], where), p  # as in `accept_sampled`
