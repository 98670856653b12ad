"""The first captured rounds of a model are compared with the same passes run eagerly, so that a fault is found at once.

What is compared is what later tokens depend on: logits of the rows whose tokens are committed, their tokens when greedy, and
the keys and values that they left in the cache.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.fork_safe import fork_safe
from layerskip_models.kv_cache import KVCache
from selfspec.engine.runners.choice import CaptureError

CHECKED = 2
"""Rounds of each kind, speculative and plain, that are compared per model and process. The first is captured while it runs,
the second replays it."""

_BOUNDS = {torch.float64: 1e-5, torch.float32: 1e-2}
_HALF_PRECISION_BOUND = 0.2
"""Largest difference of a row that rounding explains, as a share of the row's norm: another order of summation, in as many
layers as a model has, with TensorFloat-32 if that is on. Logits are float32 whatever the model's dtype. A row at a wrong
position, or of another token, differs by about its own norm."""

_lock = fork_safe(threading.Lock())
_checked: WeakKeyDictionary[LayerSkipModel, Counter[str]] = WeakKeyDictionary()


def due(model: LayerSkipModel, kind: str) -> bool:
    """Whether a round of this kind is still to be compared."""
    counts = _checked.get(model)
    return (0 if counts is None else counts[kind]) < CHECKED


def check(
    model: LayerSkipModel,
    cache: KVCache,
    kind: str,
    tokens: Tensor,
    position: int,
    logits: Tensor,
    chosen: Sequence[int],
) -> None:
    """Run rows eagerly and compare; they count as checked if they agree. The cache then holds the eager keys and values.

    tokens: int64 [rows], what the rows were run on, the first at `position`. logits: float32 [rows, vocab], captured. chosen:
    the tokens taken from the rows as their argmax; empty where processors or sampling had a say.
    Raises CaptureError, which says what differs.
    """
    end = position + tokens.numel()
    written = [kept[layer].clone() for kept in _rows(cache, position, end) for layer in range(model.num_layers)]
    cache.declare(position)
    hidden = model.run_layers(model.embed(tokens), 0, model.num_layers, cache)
    expected = model.logits(hidden)
    bound = _BOUNDS.get(model.dtype, _HALF_PRECISION_BOUND)
    differences = {"logits": _difference(logits, expected)}
    eager = [kept[layer] for kept in _rows(cache, position, end) for layer in range(model.num_layers)]
    differences["keys and values"] = max(_difference(ours, theirs) for ours, theirs in zip(written, eager))
    if chosen:
        rows = expected[: len(chosen)]
        best = rows.amax(dim=-1)
        taken = rows.gather(-1, torch.tensor(chosen, dtype=torch.long, device="cpu").to(rows.device).unsqueeze(-1))
        differences["the tokens chosen"] = _difference(taken, best.unsqueeze(-1), rows)
    worst = max(differences, key=lambda name: differences[name])
    if not differences[worst] <= bound:  # NaN included
        raise CaptureError(
            f"in a {kind} at position {position}, {worst} differ from the eager ones by {differences[worst]:.2g} of their "
            "size"
        )
    with _lock:
        _checked.setdefault(model, Counter())[kind] += 1


def _rows(cache: KVCache, position: int, end: int) -> tuple[Tensor, Tensor]:
    """Keys and values of these positions, [layers, rows, num_kv_heads * head_dim] each."""
    keys, values = cache.keys[..., position:end], cache.values[:, :, position:end]
    return keys.permute(0, 3, 1, 2).flatten(2), values.transpose(1, 2).flatten(2)


def _difference(ours: Tensor, theirs: Tensor, size: Tensor | None = None) -> float:
    """Find the largest difference of any row as a share of the row's norm in `size`, or in `theirs`; equal numbers differ by
    0, NaN and NaN as well."""
    ours, theirs = ours.double(), theirs.double()
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    norm = (theirs if size is None else size.double()).norm(dim=-1)
    gap = torch.where(same, 0.0, ours - theirs).norm(dim=-1)
    # Where nothing differs nothing is divided, be the norm 0 or infinite.
    share = torch.where(gap == 0, 0.0, gap / norm)
    return float(share.nan_to_num(nan=torch.inf).amax())
