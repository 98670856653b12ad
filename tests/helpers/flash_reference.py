"""A slow implementation of PyTorch's flash attention operator on the CPU, where PyTorch has none: for tests.

It is registered for the operator itself, so the very call that is made on CUDA is made here, is noted by the stand-in for
graphs as one operation, and reads lengths and pages when it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def flash_attention_on_cpu() -> Iterator[list[int]]:
    """Within it the operator runs on the CPU. Yields the number of rows of each call so far."""
    calls: list[int] = []

    def run(query: Tensor, *args: object, **options: object) -> tuple[Tensor, ...]:
        calls.append(query.shape[0])
        return _flash_attention(query, *args, **options)  # type: ignore[arg-type]

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", run, "CPU")
    try:
        yield calls
    finally:
        library._destroy()


def _flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor,
    num_splits: int | None = None,
) -> tuple[Tensor, ...]:
    """Refuses what the CUDA operator refuses, and whatever the captured passes have no use for."""
    (total, heads, dim), (num_pages, page, kv_heads, _) = query.shape, key.shape
    texts = cum_seq_q.numel() - 1
    assert key.shape == value.shape == (num_pages, page, kv_heads, dim)
    assert page % 256 == 0 and dim % 8 == 0 and dim <= 256 and heads % kv_heads == 0
    assert query.dtype == key.dtype == value.dtype
    for numbers, shape in (
        (cum_seq_q, (texts + 1,)), (cum_seq_k, (texts + 1,)), (seqused_k, (texts,)), (block_table, (texts, num_pages)),
    ):  # fmt: skip
        assert numbers.dtype == torch.int32 and numbers.shape == shape and numbers.is_contiguous()
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert dropout_p == 0 and not return_debug_mask and alibi_slopes is None and scale is None
    assert texts == 1 or num_splits == 1  # with more splits only the first text is right
    bounds = cum_seq_q.tolist()
    assert bounds[-1] == total
    left, right = (-1 if size is None else size for size in (window_size_left, window_size_right))
    if is_causal:
        right = 0
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = torch.full_like(query, torch.nan, memory_format=torch.contiguous_format)
    for text in range(texts):
        rows, used = query[bounds[text] : bounds[text + 1]], seqused_k.tolist()[text]
        assert rows.shape[0] <= max_q and used <= max_k and used <= num_pages * page
        pages = block_table[text].tolist()
        keys, values = (torch.cat([stored[at] for at in pages])[:used].to(wide) for stored in (key, value))
        own = torch.arange(rows.shape[0]).unsqueeze(1) + (used - rows.shape[0])  # aligned at the end
        places = torch.arange(used)
        hidden = torch.zeros(rows.shape[0], used, dtype=torch.bool)
        if right >= 0:
            hidden |= places > own + right
        if left >= 0:
            hidden |= places < own - left
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            scores = rows[:, head].to(wide) @ keys[:, kv_head].T * dim**-0.5
            shares = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
            out[bounds[text] : bounds[text + 1], head] = (shares @ values[:, kv_head]).to(query.dtype)
    state = torch.zeros(2, dtype=torch.uint64)
    return out, torch.zeros(heads, total), state, state[0].clone(), torch.zeros(0, dtype=query.dtype)
