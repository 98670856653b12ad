"""What keeping the index of copied drafts costs for each committed token, on texts of several kinds and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from random import Random
from statistics import median
from time import perf_counter

import torch

from policies.copying import LENGTH
from selfspec.cache.copy_index import CopyIndex

COMMITTED = 2000
"""Tokens that are committed one by one behind a prompt."""


def texts(length: int, words: Sequence[int], seed: int = 0) -> dict[str, list[int]]:
    """Token ids of three kinds: ordinary text, one long repetition, and tokens at random."""
    random = Random(seed)
    total = length + COMMITTED
    part = [random.randrange(32000) for _ in range(500)]
    return {
        "ordinary text": [*islice(cycle(words), total)],
        "repetition": (part * (total // len(part) + 1))[:total],
        "random tokens": [random.randrange(32000) for _ in range(total)],
    }


def microseconds_per_token(text: Sequence[int]) -> tuple[float, float]:
    """(For each token of the prompt, for each committed one) with a look at the match, and a copy where there is one."""
    index = CopyIndex()
    start = perf_counter()
    index.read(torch.tensor(text[:-COMMITTED]))
    prompt = perf_counter() - start
    taken = []
    for first in range(len(text) - COMMITTED, len(text), 100):
        start = perf_counter()
        for token in text[first : first + 100]:
            if index.match is not None:
                index.continuation(LENGTH)
            index.append(token)
        taken.append((perf_counter() - start) / 100)
    return 1e6 * prompt / (len(text) - COMMITTED), 1e6 * median(taken)
