"""Steps 3 and 4 of a round: the full model looks at all rows at once, and its verdict is read row by row.

Plain decoding never sees a row after a rejected draft or after a stop, so nothing that is wrong with such a row may break a
call: logits that hold NaN, a sampled row in which every token is masked, or a logits processor that raises. So rows to which
plain decoding cannot come are not processed one by one at all. A row without a distribution ends the draft. It is handed on
as a `failure` if all before it is accepted. That is raised only if no stop condition ends the text before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from layerskip_models.transfer import read_rows
from selfspec.engine.accept import accept_copied, accept_greedy, accept_sampled, acceptance_probabilities, reach
from selfspec.engine.draft import Draft
from selfspec.engine.results import without_traceback
from selfspec.engine.runners.runner import Runner
from selfspec.engine.sampling import NonFiniteLogitsError, non_finite

NO_TOKEN = 0
"""Stands where a row gave no token; it is never committed."""


def verify(runner: Runner, drafts: Sequence[Draft]) -> None:
    """Run all rows of all sequences through the layers they lack, and the full head.

    A last token that no draft step ran goes through its sequence's exit layer first; from there all rows of the sequence go
    on. What was copied starts here. A draft that ended in an error is left out.
    """
    unbroken = [draft for draft in drafts if draft.error is None]
    last, start = runner.model.num_layers, 0
    for stop in (*sorted({draft.verified_from for draft in unbroken if draft.verified_from}), last):
        for draft in unbroken:
            if draft.verified_from <= start:  # its rows join here
                draft.first = 0
        running = [draft for draft in unbroken if draft.first < draft.end]
        if running:
            runner.run(running, start, stop, "full" if stop == last else None)
        start = stop


def accept(runner: Runner, draft: Draft) -> None:
    """Decide which drafts are accepted, and the token that follows.

    An error of the policy, or of a processor here, concerns this sequence alone.
    """
    if draft.error is not None:
        return
    _judge(draft)
    # A row that overflows has weight 0 for the rows before it, but 0 times NaN is NaN: a rejected draft may be why the round
    # failed, so it is done once more without drafts. Not when sampling, since its random numbers are drawn.
    if draft.failure is None or draft.stop_cause == "none" or draft.sequence.samples:
        return
    if draft.logits is None or bool(draft.logits[draft.num_accepted].isnan().any()):
        draft.drop_drafts()
        verify(runner, [draft])
        _judge(draft)


def _judge(draft: Draft) -> None:
    try:
        if draft.logits is None:
            chosen, values = [output.token for output in draft.outputs], [output.logit for output in draft.outputs]
            _accept_choices(draft, chosen, values, None)
        elif draft.sequence.samples:
            _judge_sampled(draft, draft.logits)
        else:
            _judge_greedy(draft, draft.logits)
    except Exception as error:
        draft.error = without_traceback(error)


def _accept_choices(draft: Draft, chosen: list[int], values: Sequence[float], failure: Exception | None) -> None:
    """Accept the longest prefix of drafts that the full model chooses itself, and take its next choice.

    chosen, values: each row's argmax and its logit. failure: why the last of these rows has none.
    """
    num_judged = len(chosen) - (failure is not None)
    accepted = accept_greedy(draft.rows[1 : 1 + num_judged], chosen)
    for index, value in enumerate(values[: accepted + 1]):
        if value != value:
            accepted, failure = index, non_finite(f"position {draft.sequence.length + index}")
            break
    draft.num_accepted, draft.block, draft.failure = accepted, chosen[: accepted + 1], failure
    draft.target_tokens = chosen


def _judge_greedy(draft: Draft, logits: Tensor) -> None:
    """Process the rows, and accept what the full model then chooses."""
    sequence, drafts = draft.sequence, draft.tokens
    sampler, tokens, length = sequence.sampler, sequence.tokens, sequence.length
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
            if index < len(drafts) and token != drafts[index]:
                break
    _accept_choices(draft, chosen, values, failure)


def _judge_sampled(draft: Draft, logits: Tensor) -> None:
    """Judge a sampled round, by one native call where our kernels can, else by the functions of `accept.py`."""
    sequence, drafts, copied = draft.sequence, draft.tokens, draft.num_copied > 0
    sampler, tokens, length = sequence.sampler, sequence.tokens, sequence.length
    num_drafts = len(drafts)
    if sequence.observes.rejected_rows:
        draft.target_tokens = logits.argmax(dim=-1).tolist()
    q = sequence.q[: max(num_drafts, draft.num_q)]
    found = sampler.accept(logits, tokens, length, drafts, q[:num_drafts], copied=copied)
    if found is not None:
        draft.num_accepted, draft.p = found.num_accepted, found.p
        draft.failure = None if found.token is not None else non_finite(f"position {length + found.num_accepted}")
        _set_sampled(draft, found.token, q, found.reached)
        return
    drafted = tokens[0, length : length + num_drafts]
    uniforms = sampler.uniforms(num_drafts, drafted.device)
    failure: Exception | None = None
    if sampler.prefix_free:
        p = sampler.probabilities(logits, tokens, length)
    else:
        rows: list[Tensor] = []
        for index in range(num_drafts + 1):
            try:
                rows.append(sampler.probabilities(logits[index : index + 1], tokens, length + index))
            except Exception as error:
                failure = without_traceback(error)
                rows.append(torch.full_like(logits[:1], torch.nan))
            # Plain decoding cannot come to the next row, or it is certain not to count.
            if index < num_drafts and not (uniforms[index] if copied else 0) < float(rows[index][0, drafts[index]]):
                break
        p = torch.cat(rows)
    if copied:
        reached = [1.0]
        accepted, weights = accept_copied(p, drafted, uniforms)
    else:
        reached = reach(p, q, drafted)
        accepted, weights = accept_sampled(p, q, reached, uniforms)
    failure, token = failure if accepted == p.shape[0] - 1 else None, None
    if failure is None:
        try:
            token = sampler.draw(weights, f"position {length + accepted}")
        except NonFiniteLogitsError as error:
            failure = without_traceback(error)
    draft.num_accepted, draft.failure, draft.p = accepted, failure, p
    _set_sampled(draft, token, q, reached)


def _set_sampled(draft: Draft, token: int | None, q: Tensor, reached: Sequence[float]) -> None:
    """Write down what is committed, and the chance that each row's token had, if the policy learns from that."""
    accepted, p = draft.num_accepted, draft.p
    draft.block = [*draft.rows[1 : 1 + accepted], NO_TOKEN if token is None else token]
    rows = min(accepted + (draft.failure is None), draft.num_q)
    if draft.confidences is not None and p is not None:
        draft.rates = tuple(acceptance_probabilities(p[:rows], q[:rows], reached[:rows]).tolist())
