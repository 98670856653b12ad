"""Steps 3 and 4 of a round on the host: the full model's rows are judged in order, no further than the text can go.

A row counts only if its token is committed. Plain decoding never sees a row after a rejected draft or after a stop, so
nothing that is wrong with such a row may break a call: logits that hold NaN, a sampled row in which every token is masked,
or a logits processor that raises for a text which plain decoding would not have shown it. So rows after the first
rejection are not processed one by one at all, and what is wrong with the last row is handed on as a `failure`, which is
raised only if no stop condition ends the text before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerskip_models.transfer import read_rows
from selfspec.engine.accept import accept_greedy, accept_sampled, acceptance_probabilities
from selfspec.engine.sampling import NonFiniteLogitsError, Sampler, non_finite

NO_TOKEN = 0
"""Stands where a row gave no token; it is never committed."""


@dataclass(slots=True, kw_only=True, eq=False)
class Verification:
    """What verification says of a round.

    block: the accepted drafts and the token that follows them, num_accepted + 1 tokens. failure: why the last of them is
    not a token, if it is not. target_tokens: greedy, the full model's choice for rows 0..m at least.
    p: when sampling, float32 [m+1 or more, vocab]. acceptance: when sampling, min(1, p/q) of each draft whose fate is known.
    """

    num_accepted: int
    block: list[int]
    failure: Exception | None
    target_tokens: list[int]
    p: Tensor | None = None
    acceptance: tuple[float, ...] | None = None


def judge_greedy(sampler: Sampler, logits: Tensor, tokens: Tensor, length: int, drafts: Sequence[int]) -> Verification:
    """Accept the longest prefix of drafts that the full model chooses itself, and take its next choice.

    logits: float32 [k+1, vocab], of the full model for the rows pending, d_1..d_k. tokens: int64 [1, capacity], the text
    with its k drafts, of which the first `length` tokens are committed.
    """
    failure: Exception | None = None
    if sampler.prefix_free:
        best = sampler.process(logits, tokens, length).max(dim=-1)
        chosen, (values,) = read_rows(best.indices, best.values.unsqueeze(0))
    else:
        chosen, values = [], []
        for index in range(len(drafts) + 1):
            try:
                row = sampler.process(logits[index : index + 1], tokens, length + index)
            except Exception as error:
                failure = error
                chosen.append(NO_TOKEN)
                values.append(0.0)
                break
            row_best = row.max(dim=-1)
            (token,), ((value,),) = read_rows(row_best.indices, row_best.values.unsqueeze(0))
            chosen.append(token)
            values.append(value)
            if index < len(drafts) and chosen[index] != drafts[index]:
                break
    return judge_choices(chosen, values, length, drafts, failure)


def judge_choices(
    chosen: list[int], values: Sequence[float], length: int, drafts: Sequence[int], failure: Exception | None = None
) -> Verification:
    """Like `judge_greedy`, from each row's argmax and its logit. failure: why the last row has none."""
    sound = len(chosen) - (failure is not None)
    accepted = accept_greedy(drafts[:sound], chosen)
    for index, value in enumerate(values[: accepted + 1]):
        if value != value:
            accepted, failure = index, non_finite(f"position {length + index}")
            break
    return Verification(num_accepted=accepted, block=chosen[: accepted + 1], failure=failure, target_tokens=chosen)


def judge_sampled(
    sampler: Sampler, logits: Tensor, tokens: Tensor, length: int, drafts: Sequence[int], q: Tensor
) -> Verification:
    """Speculative sampling of one round (`selfspec.engine.accept`); arguments as in `judge_greedy`, q: float32 [k, vocab]."""
    num_drafts = len(drafts)
    drafted = tokens[0, length : length + num_drafts]
    uniforms = sampler.uniforms(num_drafts, drafted.device)
    failure: Exception | None = None
    if sampler.prefix_free:
        p = sampler.probabilities(logits, tokens, length)
    else:
        rows: list[Tensor] = []
        # A draft is accepted where its p is above this: the comparison that `accept_sampled` makes.
        bounds = (uniforms * q[:num_drafts].gather(-1, drafted.unsqueeze(-1)).squeeze(-1)).tolist()
        for index in range(num_drafts + 1):
            try:
                rows.append(sampler.probabilities(logits[index : index + 1], tokens, length + index))
            except Exception as error:
                failure = error
                rows.append(torch.full_like(logits[:1], torch.nan))  # accepts nothing
            if index < num_drafts and not bounds[index] < float(rows[index][0, drafts[index]]):
                break
        p = torch.cat(rows)
    known = min(p.shape[0], num_drafts)
    accepted, weights = accept_sampled(p, q[:known], drafted[:known], uniforms[:known])
    token = NO_TOKEN
    if failure is None:
        try:
            token = sampler.draw(weights, f"position {length + accepted}")
        except NonFiniteLogitsError as error:
            failure = error
    rates = acceptance_probabilities(p, q[:known], drafted[:known]).tolist()
    return Verification(
        num_accepted=accepted,
        block=[*drafts[:accepted], token],
        failure=failure,
        target_tokens=[],
        p=p,
        acceptance=tuple(rates[: accepted + (failure is None)]),
    )
