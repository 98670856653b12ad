"""A draft head over the likeliest tokens only: which tokens, what it foretells, and what it costs.

Verification uses the whole head, so the text would stay what it is; a token outside of these rows is never drafted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.backends.whole_vocabulary import WholeVocabulary
from layerskip_models.linear import LAYOUTS, Layout
from layerskip_models.norm import RMSNorm
from policies import CostModel, MeasuredCost, tokens_per_cost
from selfspec.analysis.replay import GRID_LENGTHS, AgreementTrace, replay
from selfspec.engine.torch_mode import engine_mode
from selfspec.exits.frozen_head import FrozenHead

_REPEATS = 40
_ROWS_AT_ONCE = 256


def likeliest(answers: Sequence[Sequence[int]], number: int, vocab_size: int) -> Tensor:
    """int64 [number], ascending: the tokens that occur most in these answers.

    Of equals those with the lowest ids, which a BPE tokenizer merged first because they were frequent in its own texts.
    """
    counts = Counter(token for answer in answers for token in answer)
    return torch.tensor(sorted(sorted(range(vocab_size), key=lambda token: (-counts[token], token))[:number]))


def coverage(answers: Sequence[Sequence[int]], rows: Tensor) -> float:
    """Share of the answers' tokens that are among these."""
    held = {*rows.tolist()}
    tokens = [token for answer in answers for token in answer]
    return sum(token in held for token in tokens) / max(len(tokens), 1)


def tokens_of(head: FrozenHead, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
    """The likeliest of these tokens, of all if rows is None, int64 [n]. hidden: an exit's states, adapted, [n, hidden]."""
    if rows is None:
        rows = torch.arange(head.vocab_size)
    weight, bias = head.weight[rows].float(), 0.0 if head.bias is None else head.bias[rows]
    normed = F.rms_norm(hidden.float(), (head.size,), eps=head.eps)
    return rows[torch.cat([(F.linear(part, weight) + bias).argmax(-1) for part in normed.split(_ROWS_AT_ONCE)])]


def head_seconds(head: FrozenHead, model: LayerSkipModel, sizes: Sequence[int]) -> list[float]:
    """Seconds of norm, head and choice for one row, for heads of these numbers of rows, stored in 8 bits. They take turns.

    The least counts, since a busy machine only ever adds.
    """
    layout: Layout = "int8" if model.kernels is not None else "plain"
    norm = RMSNorm(torch.ones(head.size), head.eps)
    vocabulary = WholeVocabulary(head.weight, norm, torch.float32)
    linears = [LAYOUTS[layout](head.weight[:size].float(), None) for size in sizes]
    row = torch.randn(1, head.size, generator=torch.Generator().manual_seed(0))
    taken: list[list[float]] = [[] for _ in sizes]
    with engine_mode(model.device), model.on_one_team():
        for repeat in range(_REPEATS + 2):
            for linear, times in zip(linears, taken):
                start = perf_counter()
                vocabulary.choices(linear, row, "confidence").tokens.tolist()
                if repeat > 1:
                    times.append(perf_counter() - start)
    return [min(times) for times in taken]


def least_of(calibrations: Sequence[MeasuredCost]) -> MeasuredCost:
    """The least of each time over several calibrations of one model: other programs only ever add."""
    first = calibrations[0]
    layers, heads = (
        tuple(map(min, zip(*(getattr(one, name) for one in calibrations))))
        for name in ("layer_seconds", "head_seconds")
    )
    step = min(one.layer_seconds[0] + one.head_seconds[0] + one.draft_seconds for one in calibrations)
    return replace(
        first,
        layer_seconds=layers,
        head_seconds=heads,
        draft_seconds=max(step - layers[0] - heads[0], -0.9 * heads[0]),
        adapter_seconds=tuple(
            (layer, min(dict(one.adapter_seconds)[layer] for one in calibrations)) for layer, _ in first.adapter_seconds
        ),
    )


def with_draft_head(cost: MeasuredCost, whole: float, smaller: float) -> CostModel:
    """What rounds would cost if drafts were chosen with a smaller head. whole, smaller: of `head_seconds`.

    Only the ratio is used, so that all prices are of the same measurement.
    """
    saved = cost.head_seconds[0] * (1 - smaller / whole)
    return replace(cost, draft_seconds=cost.draft_seconds - saved)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """An exit at its best draft length. gain: tokens per cost over plain decoding's. accepted: of a round's drafts."""

    num_speculations: int
    gain: float
    accepted: float


def best_replayed(traces: Sequence[AgreementTrace], exit_layer: int, cost: CostModel) -> Setting:
    """The best of `GRID_LENGTHS` over all of these texts."""
    found = []
    for length in GRID_LENGTHS:
        rounds = [replay(trace, exit_layer, length) for trace in traces]
        tokens, spent = sum(one.num_tokens for one in rounds), sum(one.cost(cost) for one in rounds)
        accepted = sum(sum(one.accepted) for one in rounds) / max(sum(one.rounds for one in rounds), 1)
        found.append(Setting(num_speculations=length, gain=tokens / spent * cost.autoregressive(), accepted=accepted))
    return max(found, key=lambda setting: setting.gain)


def gain_at(acceptance: float, exit_layer: int, cost: CostModel) -> float:
    """Tokens per cost over plain decoding's at the best length, if each draft has this chance (DEL eq. 1)."""
    rates = (tokens_per_cost(acceptance, exit_layer, length, cost) for length in GRID_LENGTHS)
    return cost.autoregressive() * max(rates)


def agreement_needed(exit_layer: int, cost: CostModel, gain: float) -> float | None:
    """The acceptance at which `gain_at` is this much; None if even 1 does not reach it."""
    if gain_at(1.0, exit_layer, cost) < gain:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if gain_at(middle, exit_layer, cost) >= gain else (middle, high)
    return high
