"""Shared by llama.cpp and its forks: their batches, and the name of an engine on a GGUF file of our weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# What a matrix's inputs are rounded to, as outputs are judged by; None: another model than the full weights.
_ARITHMETIC = {"F16": torch.float16, "BF16": torch.bfloat16}


def names_of(program: str, kind: str) -> dict[str, Any]:
    """name, label, weights and arithmetic (see `TimedEngine`) of a program on our weights written as `kind`."""
    arithmetic = _ARITHMETIC.get(kind)
    return {
        "name": f"{program}:{kind}",
        "label": f"{program} {kind}",
        "weights": f"{program} {kind}" if arithmetic is None else None,  # which rounds rows as well
        "arithmetic": arithmetic,
    }


def fill_batch(batch: Any, rows: Sequence[tuple[int, list[int], int]]) -> list[int]:
    """Fill a `llama_batch` with (text, tokens, position of the first) of each text. Returns where each text's last row is."""
    batch.n_tokens = 0
    places = []
    for text, ids, position in rows:
        for offset, token in enumerate(ids):
            row = batch.n_tokens
            batch.token[row], batch.pos[row] = token, position + offset
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, text
            batch.logits[row] = offset == len(ids) - 1
            batch.n_tokens += 1
        places.append(batch.n_tokens - 1)
    return places
