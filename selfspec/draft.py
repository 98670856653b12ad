"""Step 2 of a round: the first layers draft tokens, one row at a time, until the cap or the policy says stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.preverifier import draft_features
from policies import ContextStates, DraftRow, Needs, Policy
from policies.records import StopCause
from selfspec.kv_cache import KVCache
from selfspec.sampling import NonFiniteLogitsError, Sampler, confidences, entropies

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
        self._q = torch.empty(0, dtype=torch.float32, device=model.device)  # [rows, vocab]

    def _reserve(self, rows: int, do_sample: bool) -> None:
        model = self._model
        if self._hidden.shape[0] < rows:
            self._hidden = torch.empty(rows, model.hidden_size, dtype=model.dtype, device=model.device)
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
    ) -> Draft:
        """Draft up to `max_speculations` >= 1 tokens after the text.

        tokens: int64 [1, capacity]; the first `length` are committed, the last of them is `pending`; drafts are written
            behind them. length - 1 rows of the cache are valid.
        capture: called as capture(first_row, layers_done, hidden) for every layer and row run here.
        context: what rows are shown of the text, if the policy asked for it.
        """
        model, stopping = self._model, policy.stopping
        self._reserve(max_speculations + 1, sampler.do_sample)
        drafts: list[int] = []
        seen: list[float] = []
        num_rows = 0
        stop_cause: StopCause = "cap"
        dropped: int | None = None
        token = pending
        while True:
            position = length - 1 + num_rows
            watch = None if capture is None else partial(capture, num_rows)
            hidden = model.run_layers(model.embed_one(token), 0, exit_layer, cache, position, watch)
            self._hidden[num_rows] = hidden[0]
            num_rows += 1
            logits = model.draft_logits(hidden)
            row = _look(len(drafts), exit_layer, position, logits, self._hidden[num_rows - 1], needs, context)
            if _unusable(row):
                stop_cause = "before_draw"
                break
            if row.confidence is not None:
                seen.append(row.confidence)
            if stopping is not None and stopping.stop_before_draw(row):
                stop_cause = "before_draw"
                dropped = None if sampler.do_sample else self._pick(logits, tokens, length, len(drafts), sampler)
                break
            picked = self._pick(logits, tokens, length, len(drafts), sampler)
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

    def _pick(self, logits: Tensor, tokens: Tensor, length: int, index: int, sampler: Sampler) -> int | None:
        """Token d_{index+1}: the argmax after processors, or a draw from q, which is kept.

        None where the row gives none: nothing can be drawn from it, or a processor refuses the text. That text holds drafts,
        so plain decoding may never come to it. The draft then ends, which depends on nothing that is drawn later, and
        verification looks at the same row if it is ever committed.
        """
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


def _look(
    num_drafted: int,
    exit_layer: int,
    position: int,
    logits: Tensor,
    hidden: Tensor,
    needs: Needs,
    context: ContextStates | None,
) -> DraftRow:
    """The row with what the policy asked to see. hidden: [hidden], the row's own place in the buffer."""
    return DraftRow(
        num_drafted=num_drafted,
        exit_layer=exit_layer,
        position=position,
        confidence=float(confidences(logits)[0]) if needs.confidence else None,
        entropy=float(entropies(logits)[0]) if needs.entropy else None,
        exit_hidden=hidden if needs.exit_hidden else None,
        features=draft_features(logits)[0] if needs.features else None,
        context=context,
    )


def _unusable(row: DraftRow) -> bool:
    """Whether a policy would be shown NaN. The draft then ends without asking it."""
    if row.confidence is not None and row.confidence != row.confidence:
        return True
    if row.entropy is not None and row.entropy != row.entropy:
        return True
    return row.features is not None and bool(row.features.isnan().any())
