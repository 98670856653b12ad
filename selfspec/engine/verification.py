"""Steps 3 and 4 of a round: the full model looks at all rows at once, and its verdict is read row by row.

A row counts only if its token is committed. Plain decoding never sees a row after a rejected draft or after a stop, so
nothing that is wrong with such a row may break a call: logits that hold NaN, a sampled row in which every token is masked,
or a logits processor that raises for a text which plain decoding would not have shown it. So rows after the first
rejection are not processed one by one at all, and what is wrong with the last row is handed on as a `failure`, which is
raised only if no stop condition ends the text before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from layerskip_models.transfer import read_rows, to_device
from selfspec.engine.accept import accept_greedy, accept_sampled, acceptance_probabilities
from selfspec.engine.draft import Draft
from selfspec.engine.results import RoundResult, without_traceback
from selfspec.engine.runners.runner import Runner
from selfspec.engine.sampling import NonFiniteLogitsError, Sampler, non_finite

NO_TOKEN = 0
"""Stands where a row gave no token; it is never committed."""


def verify(runner: Runner, drafts: Sequence[Draft]) -> None:
    """Run all rows of all sequences through the layers they lack, and the full head.

    A last token that no draft step ran goes through its sequence's exit layer first; from there all rows of the sequence go
    on. What was copied starts here. A draft that ended in an error is left out.
    """
    sound = [draft for draft in drafts if draft.error is None]
    last = runner.model.num_layers
    start = 0
    for stop in (*sorted({draft.exit_layer for draft in sound if draft.exit_layer}), last):
        for draft in sound:
            if draft.exit_layer <= start:  # its rows join here
                draft.rows.first = 0
        rows = [draft.rows for draft in sound if draft.rows.first < draft.rows.end]
        if rows:
            runner.run(rows, start, stop, "full" if stop == last else None)
        start = stop


def accept(runner: Runner, draft: Draft) -> RoundResult:
    """Which drafts are accepted, and the token that follows.

    An error of the policy, or of a processor here, concerns this sequence alone.
    """
    if draft.error is not None:
        return RoundResult.broken(draft.error)
    try:
        verification = _verification(draft)
        is_spoilt = verification.failure is not None and _spoilt(draft, verification)
    except Exception as error:
        return RoundResult.broken(without_traceback(error))
    return _plain_result(runner, draft) if is_spoilt else _result(draft, verification)


@dataclass(slots=True, kw_only=True, eq=False)
class Verification:
    """The verdict on one draft.

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


def verify_greedy(sampler: Sampler, logits: Tensor, tokens: Tensor, length: int, drafts: Sequence[int]) -> Verification:
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
                failure = without_traceback(error)
                chosen.append(NO_TOKEN)
                values.append(0.0)
                break
            row_best = row.max(dim=-1)
            (token,), ((value,),) = read_rows(row_best.indices, row_best.values.unsqueeze(0))
            chosen.append(token)
            values.append(value)
            if index < len(drafts) and chosen[index] != drafts[index]:
                break
    return verify_outputs(chosen, values, length, drafts, failure)


def verify_outputs(
    chosen: list[int], values: Sequence[float], length: int, drafts: Sequence[int], failure: Exception | None = None
) -> Verification:
    """Do the same from each row's argmax and its logit. failure: why the last row has none."""
    sound = len(chosen) - (failure is not None)
    accepted = accept_greedy(drafts[:sound], chosen)
    for index, value in enumerate(values[: accepted + 1]):
        if value != value:
            accepted, failure = index, non_finite(f"position {length + index}")
            break
    return Verification(num_accepted=accepted, block=chosen[: accepted + 1], failure=failure, target_tokens=chosen)


def verify_sampled(
    sampler: Sampler,
    logits: Tensor,
    tokens: Tensor,
    length: int,
    drafts: Sequence[int],
    q: Tensor,
    num_copied: int = 0,
) -> Verification:
    """Speculative sampling of one round (`selfspec.engine.accept`); arguments as in `verify_greedy`.

    q: float32 [k, vocab], contiguous. num_copied: how many of the drafts were copied, all or none. A copied token counts
        as the only one that could have been drafted, and its row of q may be overwritten.
    """
    found = sampler.accept(logits, tokens, length, drafts, q, num_copied)
    if found is not None:
        return Verification(
            num_accepted=found.num_accepted,
            block=[*drafts[: found.num_accepted], NO_TOKEN if found.token is None else found.token],
            failure=non_finite(f"position {length + found.num_accepted}") if found.token is None else None,
            target_tokens=[],
            p=found.p,
            acceptance=tuple(found.rates if found.token is not None else found.rates[: found.num_accepted]),
        )
    for row, copied in enumerate(drafts[:num_copied]):
        q[row].zero_()
        q[row, copied] = 1.0
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
                failure = without_traceback(error)
                rows.append(torch.full_like(logits[:1], torch.nan))  # accepts nothing
            if index < num_drafts and not bounds[index] < float(rows[index][0, drafts[index]]):
                break
        p = torch.cat(rows)
    known = min(p.shape[0], num_drafts)
    accepted, weights = accept_sampled(p, q[:known], drafted[:known], uniforms[:known], sampler.residual)
    token = NO_TOKEN
    if failure is None:
        try:
            token = sampler.draw(weights, f"position {length + accepted}")
        except NonFiniteLogitsError as error:
            failure = without_traceback(error)
    rates = acceptance_probabilities(p, q[:known], drafted[:known]).tolist() if known else []
    return Verification(
        num_accepted=accepted,
        block=[*drafts[:accepted], token],
        failure=failure,
        target_tokens=[],
        p=p,
        acceptance=tuple(rates[: accepted + (failure is None)]),
    )


def _verification(draft: Draft) -> Verification:
    seq_round, rows, drafts = draft.seq_round, draft.rows, draft.tokens
    sampler, logits = seq_round.sampler, rows.logits
    if logits is None:
        chosen, values = [output.token for output in rows.outputs], [output.logit for output in rows.outputs]
        return verify_outputs(chosen, values, seq_round.length, drafts)
    if not sampler.do_sample:
        return verify_greedy(sampler, logits, seq_round.tokens, seq_round.length, drafts)
    q = draft.q[: len(drafts)] if drafts else logits[:0]
    return verify_sampled(sampler, logits, seq_round.tokens, seq_round.length, drafts, q, draft.num_copied)


def _spoilt(draft: Draft, verification: Verification) -> bool:
    """Whether a row that only drafts reached may be why verification failed.

    Earlier rows mask a row that overflows, but 0 times NaN is NaN. A sampled round cannot be done again: its random numbers
    are drawn.
    """
    logits = draft.rows.logits
    if draft.stop_cause == "none" or draft.seq_round.sampler.do_sample:
        return False
    return logits is None or bool(logits[verification.num_accepted].isnan().any())


def _plain_result(runner: Runner, draft: Draft) -> RoundResult:
    """Run the round once more, without drafts."""
    seq_round = draft.seq_round
    seq_round.cache.roll_back(seq_round.length - 1)
    plain = Draft(replace(seq_round, exit_layer=None, max_speculations=0, copied=()), draft.buffers)
    verify(runner, [plain])
    return accept(runner, plain)


def _result(draft: Draft, verification: Verification) -> RoundResult:
    seq_round = draft.seq_round
    target: Tensor | None = None
    if seq_round.learns and verification.p is not None:
        target = verification.p.argmax(dim=-1)
    elif seq_round.learns:
        target = to_device(
            torch.tensor(verification.target_tokens, dtype=torch.long, device="cpu"), seq_round.tokens.device
        )
    return RoundResult(
        draft_tokens=tuple(draft.tokens),
        num_accepted=verification.num_accepted,
        block=verification.block,
        target_tokens=target,
        p=verification.p,
        stop_cause=draft.stop_cause,
        confidences=draft.confidences,
        acceptance_probabilities=None if draft.stop_cause == "none" else verification.acceptance,
        failure=verification.failure,
        dropped_token=draft.dropped_token,
        num_copied=draft.num_copied,
    )
