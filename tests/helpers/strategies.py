"""Hypothesis strategies: models, prompts and generation settings."""

from __future__ import annotations

from hypothesis import strategies as st

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
