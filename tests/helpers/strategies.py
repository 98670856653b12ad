"""Hypothesis strategies: models, prompts, generation settings; distributions p and q."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from policies import Policy
from scripted_policies import ScriptedExit, StopAtTokens, StopBelow
from tiny_llama import VOCAB_SIZE

POOL_SIZE = 48
MAX_LENGTH = 9

tokens = st.integers(0, VOCAB_SIZE - 1)
prompts = st.one_of(
    st.lists(tokens, min_size=1, max_size=3),
    st.lists(tokens, min_size=4, max_size=14),
    st.builds(lambda part, times: part * times, st.lists(tokens, min_size=2, max_size=4), st.integers(2, 4)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyCase:
    """One prompt for one model.

    options: GenerationConfig fields. stop_at: a stop to be made from the model's own text, so that it is met: an EOS
    list or a stop string, and the position at which it lies. lengths: one per exit layer. stopping: a rule that ends
    drafts of these lengths, or "named": a policy of EVERY_POLICY instead of them.
    """

    model: int
    prompt: list[int]
    max_new_tokens: int
    options: dict[str, Any]
    stop_at: tuple[Literal["eos_token_id", "stop_strings"], int] | None
    lengths: list[int]
    stopping: float | tuple[int, ...] | Literal["named"] | None

    def __post_init__(self) -> None:
        if "min_new_tokens" in self.options:  # transformers warns of one that the budget cannot meet
            self.options["min_new_tokens"] = min(self.options["min_new_tokens"], self.max_new_tokens)
        if self.options.get("no_repeat_ngram_size") == 1:  # every token once: there must be enough of them
            banned = sum(len(self.options.get(name, ())) for name in ("suppress_tokens", "bad_words_ids"))
            if len(set(self.prompt)) + self.max_new_tokens + banned >= VOCAB_SIZE:
                self.options["no_repeat_ngram_size"] = 2
        if "exponential_decay_length_penalty" in self.options:  # it favours the EOS token, so there must be one
            self.options.setdefault("eos_token_id", [3])

    @property
    def num_layers(self) -> int:
        """Layers of that model of the pool."""
        return 2 + self.model % 6

    def policy(self, exit_layer: int) -> Policy:
        """The policy for one exit layer: its length, and the case's stopping rule."""
        rule: StopBelow | StopAtTokens | None = None
        if isinstance(self.stopping, float):
            rule = StopBelow(self.stopping)
        elif isinstance(self.stopping, tuple):
            rule = StopAtTokens(self.stopping)
        return Policy(ScriptedExit([(exit_layer, self.lengths[exit_layer - 1])]), rule)


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
_nothing: st.SearchStrategy[dict[str, Any]] = st.just({})

greedy_cases = st.builds(
    GreedyCase,
    model=st.integers(0, POOL_SIZE - 1),
    prompt=prompts,
    max_new_tokens=st.one_of(st.integers(1, 10), st.integers(8, 20)),
    options=st.one_of(_nothing, processor_options),
    stop_at=st.one_of(st.none(), st.tuples(st.sampled_from(["eos_token_id", "stop_strings"]), st.integers(1, 12))),
    lengths=st.lists(st.integers(0, MAX_LENGTH), min_size=6, max_size=6),
    stopping=st.one_of(
        st.none(),
        st.sampled_from([0.2, 0.4, 0.6]),
        st.tuples(tokens, tokens, tokens),
        st.just("named"),
        st.just("named"),
    ),
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
