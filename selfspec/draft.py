"""Step 2 of a round: the first layers draft tokens, one row at a time, until the cap or the policy says stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.choices import Detail, Look, choices_of
from layerskip_models.kernels.native_steps import NativeSteps
from policies import ContextStates, DraftRow, Needs, Policy
from policies.records import StopCause
from selfspec.kv_cache import KVCache
from selfspec.sampling import NonFiniteLogitsError, Sampler

NOTHING = Look(-1, math.nan)
Capture = Callable[[int, int, Tensor], None]
"""capture(first_row, layers_done, hidden [rows, hidden]): sees every hidden state of a round as it is computed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draft:
    """What drafting hands to verification.

    tokens: the kept drafts d_1..d_k.
    exit_hidden: [k+1, hidden], output of layer E for the rows pending, d_1..d_k.
    num_rows: how many of these rows were run: k+1 if drafting stopped before a draw, else k (the last is then unset).
    q: float32 [k, vocab], the distributions the drafts were drawn from; None when greedy.
    confidences: of every row looked at that has one, if the policy asked for them.
    dropped_token: what a greedy draft would have taken from the row that a policy stopped before.
    """

    tokens: list[int]
    exit_hidden: Tensor
    num_rows: int
    q: Tensor | None
    confidences: tuple[float, ...] | None
    stop_cause: StopCause
    dropped_token: int | None = None


class Drafter:
    """Runs draft steps; owns the buffers that steps write their rows to, so that the loop allocates no large tensor."""

    def __init__(self, model: LayerSkipModel) -> None:
        self._model = model
        self._hidden = torch.empty(0, dtype=model.dtype, device=model.device)  # [rows, hidden]
        self._rows: Sequence[Tensor] = ()
        self._q = torch.empty(0, dtype=torch.float32, device=model.device)  # [rows, vocab]

    def _reserve(self, rows: int, do_sample: bool) -> None:
        model = self._model
        if self._hidden.shape[0] < rows:
            self._hidden = torch.empty(rows, model.hidden_size, dtype=model.dtype, device=model.device)
            self._rows = self._hidden.unbind(0)
        if do_sample and self._q.shape[0] < rows:
            self._q = torch.empty(rows, model.vocab_size, dtype=torch.float32, device=model.device)

    def draft(
        self,
        tokens: Tensor,
        length: int,
        pending: int,
        *,
        exit_layer: int,
        max_speculations: int,
        cache: KVCache,
        sampler: Sampler,
        policy: Policy,
        needs: Needs,
        eos: frozenset[int],
        capture: Capture | None = None,
        context: ContextStates | None = None,
        steps: NativeSteps | None = None,
        memory: Tensor | None = None,
    ) -> Draft:
        """Draft up to `max_speculations` >= 1 tokens after the text.

        tokens: int64 [1, capacity]; the first `length` are committed, the last of them is `pending`; drafts are written
            behind them. length - 1 rows of the cache are valid.
        capture: called as capture(first_row, layers_done, hidden) for every layer and row run here.
        context: what rows are shown of the text, if the policy asked for it.
        steps: single calls for whole steps on this cache; greedy, without processors, and `capture` is not used.
        memory: [layers, rows, hidden], gets every layer's output for every row run in steps.
        """
        model, stopping = self._model, policy.stopping
        self._reserve(max_speculations + 1, sampler.do_sample)
        unprocessed = not sampler.do_sample and not sampler.processors
        detail = _detail(needs)
        drafts: list[int] = []
        seen: list[float] = []
        num_rows = 0
        stop_cause: StopCause = "cap"
        dropped: int | None = None
        token = pending
        while True:
            position = length - 1 + num_rows
            own = self._rows[num_rows]
            logits: Tensor | None = None
            if steps is not None:
                place = None if memory is None else (memory, num_rows)
                look = steps.token(token, position, exit_layer, own, head="draft", detail=detail, record=place)
                assert look is not None
            else:
                watch = None if capture is None else partial(capture, num_rows)
                hidden = model.run_layers(model.embed_one(token), 0, exit_layer, cache, position, watch)
                own.copy_(hidden[0])
                if unprocessed:
                    look = Look.first(model.draft_choices(hidden, detail))
                else:
                    logits = model.draft_logits(hidden)
                    look = NOTHING if detail == "token" else Look.first(choices_of(logits, detail))
            num_rows += 1
            row = _row(len(drafts), exit_layer, position, look, own, needs, context)
            if _unusable(row):
                stop_cause = "before_draw"
                break
            if row.confidence is not None:
                seen.append(row.confidence)
            if stopping is not None and stopping.stop_before_draw(row):
                stop_cause = "before_draw"
                if not sampler.do_sample:
                    dropped = self._pick(look, logits, tokens, length, len(drafts), sampler)
                break
            picked = self._pick(look, logits, tokens, length, len(drafts), sampler)
            if picked is None:
                stop_cause = "before_draw"
                break
            token = picked
            tokens[0, length + len(drafts)] = token
            drafts.append(token)
            if token in eos:
                stop_cause = "eos"
                break
            if stopping is not None and stopping.stop_after_draw(row, token):
                stop_cause = "after_draw"
                break
            if len(drafts) == max_speculations:
                break
        return Draft(
            tokens=drafts,
            exit_hidden=self._hidden[: len(drafts) + 1],
            num_rows=num_rows,
            q=self._q[: len(drafts)] if sampler.do_sample else None,
            confidences=tuple(seen) if needs.confidence else None,
            stop_cause=stop_cause,
            dropped_token=dropped,
        )

    def _pick(
        self, look: Look, logits: Tensor | None, tokens: Tensor, length: int, index: int, sampler: Sampler
    ) -> int | None:
        """Token d_{index+1}: the argmax after processors, or a draw from q, which is kept.

        logits: None if there is nothing to process and the argmax will do.
        None where the row gives none: nothing can be drawn from it, or a processor refuses the text. That text holds drafts,
        so plain decoding may never come to it. The draft then ends, which depends on nothing that is drawn later, and
        verification looks at the same row if it is ever committed.
        """
        if logits is None:
            return look.token
        try:
            processed = sampler.process(logits, tokens, length + index)
        except Exception:
            return None
        if not sampler.do_sample:
            return int(processed.argmax())  # of NaN, too: a greedy draft is a guess, which verification judges
        q = self._q[index]
        torch.softmax(processed[0], dim=-1, out=q)
        try:
            return sampler.draw(q, f"draft position {length + index}")
        except NonFiniteLogitsError:
            return None


def _detail(needs: Needs) -> Detail:
    """What to compute of every row for a policy that needs this."""
    if needs.entropy or needs.features:
        return "all"
    return "confidence" if needs.confidence else "token"


def _row(
    num_drafted: int,
    exit_layer: int,
    position: int,
    look: Look,
    hidden: Tensor,
    needs: Needs,
    context: ContextStates | None,
) -> DraftRow:
    """The row with what the policy asked to see. hidden: [hidden], the row's own place in the buffer."""
    return DraftRow(
        num_drafted=num_drafted,
        exit_layer=exit_layer,
        position=position,
        confidence=look.confidence if needs.confidence else None,
        entropy=look.entropy if needs.entropy else None,
        exit_hidden=hidden if needs.exit_hidden else None,
        features=_features(look, hidden.device) if needs.features else None,
        context=context,
    )


def _features(look: Look, device: torch.device) -> Tensor:
    """What `draft_features` computes from logits."""
    p = look.confidence
    return torch.tensor([math.log(p) if p > 0 else p, look.margin, look.entropy], dtype=torch.float32, device=device)


def _unusable(row: DraftRow) -> bool:
    """Whether a policy would be shown NaN. The draft then ends without asking it."""
    if row.confidence is not None and row.confidence != row.confidence:
        return True
    if row.entropy is not None and row.entropy != row.entropy:
        return True
    return row.features is not None and bool(row.features.isnan().any())
