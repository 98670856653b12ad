"""The batches of llama.cpp and its forks, which have the same C structure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


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
