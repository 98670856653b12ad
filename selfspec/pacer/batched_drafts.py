"""Drafts from many positions of one text at once: what training data for Pacer is made with.

The engine drafts one row at a time, which keeps no hardware busy when a long draft from *every* position is wanted. Here all
positions of a text take a step together: they share the text's KV cache, each sees as much of it as was committed at its
position, and keeps the rows of its own draft beside it. The tests hold it to the engine, draft by draft.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from layerskip_models.kv_cache import KVCache
from layerskip_models.model import LayerSkipModel
from selfspec.pacer.network import FEATURES, draft_features


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drafts:
    """Greedy drafts, one per position, row after row: draft i has lengths[i] rows.

    tokens: int64 [rows]. hidden: [rows, hidden], the exit hidden state of the row that produced each token.
    features: float32 [rows, FEATURES]. lengths: int64 [drafts], at least 1 each.
    """

    tokens: Tensor
    hidden: Tensor
    features: Tensor
    lengths: Tensor


def draft_side_by_side(
    model: LayerSkipModel,
    cache: KVCache,
    text: Tensor,
    positions: Sequence[int],
    *,
    exit_layer: int,
    window: int,
    behind: int | None = None,
    eos: Collection[int] = (),
) -> Drafts:
    """Draft greedily, as the engine does, from several beginnings of one text.

    text: int64 [n]; the cache holds its rows 0 .. n-2 at least, of layers [0, exit_layer). positions: draft i starts when
    positions[i] tokens are committed, 1 <= positions[i] < n. window: most tokens of a draft; it never reaches past the text's
    end, ends with a drafted token of `eos`, and goes on for `behind` tokens behind its first mismatch with the text (None: to
    the end).
    """
    starts = torch.tensor(positions, device=model.device)
    room = (text.numel() - starts).clamp(max=window)
    longest, count = int(room.max()), len(positions)
    own = torch.empty(
        2, exit_layer, count, model.num_kv_heads, longest, model.head_dim, dtype=model.dtype, device=model.device
    )
    tokens = torch.zeros(count, longest, dtype=torch.long, device=model.device)
    hidden_states = torch.empty(count, longest, model.hidden_size, dtype=model.dtype, device=model.device)
    features = torch.empty(count, longest, len(FEATURES), dtype=torch.float32, device=model.device)
    end = text.numel() - 1
    context = [(cache.keys[layer, ..., :end], cache.values[layer, :, :end]) for layer in range(exit_layer)]
    unseen = torch.arange(end, device=model.device) >= (starts - 1).unsqueeze(1)  # [drafts, end]
    stops = torch.tensor(sorted(eos), device=model.device)

    lengths = room.clone()
    going = torch.arange(count, device=model.device)  # drafts that are not over; `own` has their rows only
    current = text[starts - 1]
    for step in range(longest):
        rotary = model.rotary[starts[going] - 1 + step]
        attention = _SideBySide(context, own, step, unseen[going], rotary)
        x = model.walk(model.embed(current), 0, exit_layer, attention)
        logits = model.draft_logits(model.at_exit(x, exit_layer))
        current = logits.argmax(dim=-1)
        tokens[going, step], hidden_states[going, step], features[going, step] = current, x, draft_features(logits)

        over = torch.isin(current, stops)
        lengths[going[over]] = step + 1
        if behind is not None:
            wrong = (current != text[starts[going] + step]) & (lengths[going] == room[going])
            lengths[going[wrong]] = torch.minimum(room[going[wrong]], torch.tensor(step + 1 + behind))
        keep = lengths[going] > step + 1
        if not bool(keep.any()):
            break
        if not bool(keep.all()):
            going, current, own = going[keep], current[keep], own[:, :, keep]
    kept = torch.arange(longest, device=model.device) < lengths.unsqueeze(1)
    return Drafts(tokens=tokens[kept], hidden=hidden_states[kept], features=features[kept], lengths=lengths)


class _SideBySide:
    """Attention of one row of each draft: to what its draft may see of the text, and to its own draft so far.

    context: keys [kv_heads, head_dim, end] and values [kv_heads, end, head_dim] of the text, layer by layer. own: keys and
    values of the drafts, [2, layers, drafts, kv_heads, steps, head_dim]. unseen: bool [drafts, end].
    """

    def __init__(
        self, context: Sequence[tuple[Tensor, Tensor]], own: Tensor, step: int, unseen: Tensor, rotary: Tensor
    ) -> None:
        self._context, self._own, self._step, self._unseen = context, own, step, unseen
        self.rotary = rotary

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        (keys, values), (own_keys, own_values), step = self._context[layer], self._own[:, layer], self._step
        own_keys[:, :, step], own_values[:, :, step] = key, value
        rows, end, kv_heads = key.shape[0], keys.shape[-1], key.shape[1]
        query = rearrange(query, "rows (kv group) dim -> rows kv group dim", kv=kv_heads) * query.shape[-1] ** -0.5
        shared = rearrange(query, "rows kv group dim -> kv (rows group) dim") @ keys
        shared = rearrange(shared, "kv (rows group) end -> rows kv group end", rows=rows)
        shared = shared.masked_fill(self._unseen[:, None, None, :], -torch.inf)
        private = query @ own_keys[:, :, : step + 1].mT  # [rows, kv_heads, group, step + 1]
        weights = torch.cat([shared, private], dim=-1).softmax(dim=-1)
        of_text = rearrange(weights[..., :end], "rows kv group end -> kv (rows group) end") @ values
        attended = rearrange(of_text, "kv (rows group) dim -> rows kv group dim", rows=rows)
        attended = attended + weights[..., end:] @ own_values[:, :, : step + 1]
        return rearrange(attended, "rows kv group dim -> rows (kv group dim)")


def accepted_counts(drafts: Drafts, text: Tensor, positions: Sequence[int]) -> Tensor:
    """How many tokens of each draft come before its first mismatch with the text, int64 [drafts]."""
    counts = []
    for draft, start in zip(drafts.tokens.split(drafts.lengths.tolist()), positions):
        equal = draft == text[start : start + draft.numel()]
        counts.append(int(F.pad(equal.long(), (0, 1)).argmin()))
    return torch.tensor(counts)
