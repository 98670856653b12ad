"""The second of two stages: layers [E, L) and the head judge the rows that the first stage drafted from.

Verification of n drafts takes the n rows before them: draft i is judged by p_i. There is no row behind the last draft, so
if all are accepted no bonus token is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.kernels.native_steps import STEP_ROWS, NativeSteps
from layerskip_models.kv_cache import KVCache
from selfspec.accept import residual
from selfspec.judge import Verdict, judge_choices, judge_greedy
from selfspec.parallel.lead_choice import Lead
from selfspec.parallel.overlap_timing import LONGEST
from selfspec.parallel.stage_messages import DraftedRow, as_tensor
from selfspec.request import Request
from selfspec.sampling import NonFiniteLogitsError, Sampler
from selfspec.stop_conditions import StopReason


@dataclass(slots=True, kw_only=True, eq=False)
class Judgement:
    """accepted: drafts that hold. token: in the place of the first that does not, None if all do or there is a failure.

    failure: why there is no such token. rows: how many drafts were judged, of those that were given.
    """

    rows: int
    accepted: int
    token: int | None = None
    failure: Exception | None = None


class StagedText:
    """A text while it is decoded: its committed tokens, and the rows of its last layers.

    length: committed tokens. num_new: of them, generated. waiting: drafts that have come and were not judged yet.
    rejections: how often the drafter was told of a token that it had not drafted. lead: that it was told of last.
    """

    def __init__(self, model: LayerSkipModel, request: Request) -> None:
        self.request = request
        self.sampler = Sampler(request.processors, request.generator)
        self.length = request.prompt.numel()
        self.cache = KVCache(model, self.length + request.stops.max_new_tokens + LONGEST)
        self.num_new = self.rejections = 0
        self.lead: Lead = (1, 1)
        self.waiting: list[DraftedRow] = []
        self.stop_reason: StopReason | None = None
        # int64 [1, capacity], for stopping criteria; and the same for processors, where the model is.
        self._on_host = torch.zeros(1, self.cache.max_length + 1, dtype=torch.long, device="cpu")
        self.tokens = self._on_host if model.device.type == "cpu" else self._on_host.to(model.device)
        self.write(0, request.prompt.tolist())

    @property
    def left(self) -> int:
        """Tokens that may still be committed."""
        return self.request.stops.max_new_tokens - self.num_new

    def write(self, position: int, tokens: Sequence[int]) -> None:
        """Put tokens, committed or drafted, into the text."""
        self._on_host[0, position : position + len(tokens)] = torch.tensor(tokens, dtype=torch.long, device="cpu")
        if self.tokens is not self._on_host:
            self.tokens[0, position : position + len(tokens)] = self._on_host[0, position : position + len(tokens)]

    def commit(self, block: list[int], failure: Exception | None = None) -> list[int]:
        """Commit tokens up to the first stop in them, and return these. Raises a failure behind them if there is no stop."""
        self.write(self.length, block)
        count, self.stop_reason = self.request.stops.first_stop(block, self._on_host, self.length, self.num_new)
        if failure is not None and self.stop_reason is None:
            raise failure
        self.length += count
        self.num_new += count
        self.cache.roll_back(self.length - 1)
        return block[:count]


class VerifyingStage:
    """Reads and judges rows of one text after the other. For one thread."""

    def __init__(self, model: LayerSkipModel) -> None:
        self.model = model
        self._steps: NativeSteps | None = model.steps()

    def read(self, text: StagedText, states: Tensor) -> Tensor:
        """The next rows of a prompt, [rows, hidden], through the layers. Returns the logits of the last one, [1, vocab]."""
        hidden = self.model.run_layers(states, 0, self.model.num_layers, text.cache)
        return self.model.logits(hidden[-1:])

    def judge(self, text: StagedText, rows: Sequence[DraftedRow]) -> Judgement:
        """Which drafts hold. The text has their tokens behind its committed ones afterwards."""
        text.write(text.length, [row.token for row in rows])
        found = self._judge(text, rows, text.length)
        kept = found.accepted
        if isinstance(found.failure, NonFiniteLogitsError) and len(rows) > kept + 1:
            # A row that overflows may spoil rows before it, behind whose mask it is. Plain decoding would not have seen it.
            text.cache.roll_back(text.length - 1 + kept)
            again = self._judge(text, rows[kept : kept + 1], text.length + kept)
            found = Judgement(rows=kept + 1, accepted=kept + again.accepted, token=again.token, failure=again.failure)
        return found

    def _judge(self, text: StagedText, rows: Sequence[DraftedRow], length: int) -> Judgement:
        """The same for a text whose first `length` tokens hold."""
        model, sampler = self.model, text.sampler
        drafts = [row.token for row in rows]
        x = as_tensor(np.stack([row.hidden for row in rows]), model.dtype, model.device)
        cache_rows = ((text.cache, len(rows)),)
        if not sampler.do_sample and not sampler.processors:
            if self._steps is not None and len(rows) <= STEP_ROWS:
                chosen, values = self._steps.rows(x.contiguous(), cache_rows, 0, model.num_layers)
            else:
                choices = model.choices(model.run_layers(x, 0, model.num_layers, cache_rows))
                chosen, values = choices.tokens.tolist(), choices.logits.tolist()
            return _without_bonus(judge_choices(chosen, values, length, drafts[:-1]), drafts)
        logits = model.logits(model.run_layers(x, 0, model.num_layers, cache_rows))
        if not sampler.do_sample:
            return _without_bonus(judge_greedy(sampler, logits, text.tokens, length, drafts[:-1]), drafts)
        return _judge_sampled(sampler, logits, text.tokens, length, rows)


def _without_bonus(verdict: Verdict, drafts: Sequence[int]) -> Judgement:
    """drafts: all of them, of which the verdict knows all but the last: what follows those is the last, or its correction."""
    found = Judgement(rows=len(drafts), accepted=verdict.num_accepted, failure=verdict.failure)
    if found.failure is None:
        token = verdict.block[-1]
        if token == drafts[found.accepted]:
            found.accepted += 1
        else:
            found.token = token
    return found


def _judge_sampled(
    sampler: Sampler, logits: Tensor, tokens: Tensor, length: int, rows: Sequence[DraftedRow]
) -> Judgement:
    """Row by row, up to the first rejection: the numbers drawn then do not depend on how many rows came together."""
    for index, row in enumerate(rows):
        assert row.q is not None
        try:
            p = sampler.probabilities(logits[index : index + 1], tokens, length + index)[0]
            q = as_tensor(row.q, p.dtype, p.device)
            if not bool(sampler.uniforms(1, p.device)[0] * q[row.token] < p[row.token]):
                token = sampler.draw(residual(p, q), f"position {length + index}")
                return Judgement(rows=len(rows), accepted=index, token=token)
        except Exception as error:
            return Judgement(rows=len(rows), accepted=index, failure=error)
    return Judgement(rows=len(rows), accepted=len(rows))
