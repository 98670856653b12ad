"""Hypothesis strategies: models, prompts, generation settings; distributions p and q."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from tiny_llama import VOCAB_SIZE

POOL_SIZE = 48

tokens = st.integers(0, VOCAB_SIZE - 1)
prompts = st.one_of(
    st.lists(tokens, min_size=1, max_size=3),
    st.lists(tokens, min_size=4, max_size=14),
    st.builds(lambda part, times: part * times, st.lists(tokens, min_size=2, max_size=4), st.integers(2, 4)),
)


processor_options = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.7, 1.2, 2.0]),
        "no_repeat_ngram_size": st.integers(1, 3),
        "min_new_tokens": st.integers(1, 8),
        "bad_words_ids": st.lists(st.lists(tokens, min_size=1, max_size=2), min_size=1, max_size=3),
        "suppress_tokens": st.lists(tokens, min_size=1, max_size=4, unique=True),
        "begin_suppress_tokens": st.lists(tokens, min_size=1, max_size=4, unique=True),
        "sequence_bias": st.dictionaries(st.tuples(tokens), st.sampled_from([-3.0, 2.0]), min_size=1, max_size=3).map(
            lambda biases: [[list(ids), bias] for ids, bias in biases.items()]
        ),
        "exponential_decay_length_penalty": st.just((3, 1.3)),
        "eos_token_id": st.lists(tokens, min_size=1, max_size=2, unique=True),
    },
)


@st.composite
def distributions(draw: st.DrawFn, size: int) -> Tensor:
    """Float64 [size], sums to 1: with zeros and ties often, one-hot sometimes, and any spread of magnitudes."""
    kind = draw(st.sampled_from(["weights", "small integers", "one-hot"]))
    if kind == "one-hot":
        return torch.nn.functional.one_hot(torch.tensor(draw(st.integers(0, size - 1))), size).double()
    if kind == "small integers":
        weights = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size).filter(any))
        return _normalised([float(w) for w in weights])
    exponents = draw(st.lists(st.floats(-30, 0), min_size=size, max_size=size))
    return _normalised([10.0**exponent for exponent in exponents])


def _normalised(weights: list[float]) -> Tensor:
    values = torch.tensor(weights, dtype=torch.float64)
    return values / values.sum()


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """(p, q) over the same vocabulary of 2 to 8 tokens; equal in one case of four."""
    size = draw(st.integers(2, 8))
    p = draw(distributions(size))
    return p, p.clone() if draw(st.integers(0, 3)) == 0 else draw(distributions(size))
