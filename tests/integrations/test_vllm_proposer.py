"""The proposer for vLLM, called as vLLM 0.33.0 calls it; vLLM itself is not installed here.

`Batch` has what the caller sees of vLLM's persistent batch: rows of tokens and how many are filled. When a request has ended,
the last one moves into its row.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerskip_models import DEMO_PATH
from selfspec import SelfSpecGenerator
from selfspec.cache.copy_index import CopyIndex
from selfspec.integrations.vllm_proposer import CopyProposer

MAX_LEN = 64


def config(drafts: int = 5, max_len: int = MAX_LEN) -> Any:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=drafts, model="x.Y", method="custom_class"),
        model_config=SimpleNamespace(max_model_len=max_len),
    )


class Batch:
    """Rows beyond `names` hold what was there before, as vLLM's do."""

    def __init__(self, rows: int, max_len: int = MAX_LEN) -> None:
        self.tokens = np.full((rows, max_len), 7, dtype=np.int32)
        self.counts = np.full(rows, 3, dtype=np.int32)
        self.names: list[int] = []

    def add(self, name: int, prompt: list[int]) -> None:
        self.tokens[len(self.names), : len(prompt)] = prompt
        self.counts[len(self.names)] = len(prompt)
        self.names.append(name)

    def end(self, row: int) -> None:
        last = len(self.names) - 1
        self.tokens[row], self.counts[row] = self.tokens[last], self.counts[last]
        self.names[row] = self.names[last]
        self.names.pop()

    def commit(self, sampled: list[list[int]]) -> None:
        for row, new in enumerate(sampled):
            self.tokens[row, self.counts[row] : self.counts[row] + len(new)] = new
            self.counts[row] += len(new)

    def text(self, row: int) -> list[int]:
        return self.tokens[row, : self.counts[row]].tolist()


def expected(text: list[int], most: int) -> list[int]:
    """Of a fresh index, which has its own tests."""
    index = CopyIndex()
    index.read(torch.tensor(text))
    return index.continuation(min(most, MAX_LEN - len(text)))


def test_what_followed_the_same_tokens_is_proposed() -> None:
    batch, proposer = Batch(4), CopyProposer(config(drafts=3))
    batch.add(0, [5, 6, 8, 9, 1, 2, 5])
    batch.add(1, [1, 2, 3, 4])
    batch.add(2, [4, 4, 2])  # its prompt is still being read
    sampled = [[6], [9], []]
    batch.commit(sampled)
    assert proposer.propose(sampled, batch.counts, batch.tokens, slot_mappings={}) == [[8, 9, 1], [], []]


STEPS = st.lists(
    st.tuples(
        st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=4, max_size=4),  # what each row commits
        st.sampled_from(["", "", "end", "add", "swap"]),
        st.integers(0, 3),
    ),
    max_size=14,
)


@given(steps=STEPS)
def test_a_text_is_known_wherever_it_moves(steps: list[tuple[list[list[int]], str, int]]) -> None:
    """Whatever ends, begins or moves, each row's proposal is that of an index that has read just this row's text."""
    batch, proposer = Batch(4), CopyProposer(config())
    batch.add(0, [0, 1, 2, 0, 1])
    batch.add(1, [0, 1, 2, 0, 1])  # the same prompt twice
    for committed, change, row in steps:
        if change == "end" and batch.names:
            batch.end(row % len(batch.names))
        elif change == "add" and len(batch.names) < 4:
            batch.add(len(batch.names), [row, 1, row, 1, 2])
        elif change == "swap" and len(batch.names) > 1:
            pair = [0, 1 + row % (len(batch.names) - 1)]
            batch.tokens[pair], batch.counts[pair] = batch.tokens[pair[::-1]], batch.counts[pair[::-1]]
        sampled = [new[: MAX_LEN - int(count)] for new, count, _ in zip(committed, batch.counts, batch.names)]
        batch.commit(sampled)
        found = proposer.propose(sampled, batch.counts, batch.tokens)
        assert found == [expected(batch.text(place), 5) if new else [] for place, new in enumerate(sampled)]


def test_texts_are_read_once_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real = CopyIndex.read
    monkeypatch.setattr(CopyIndex, "read", lambda self, tokens: (read.append(len(tokens)), real(self, tokens))[1])
    batch, proposer = Batch(3), CopyProposer(config())
    batch.add(0, [0, 1, 2])
    batch.add(1, [3, 1, 2])
    batch.add(2, [4, 1, 2])
    for step in range(4):
        if step == 2:
            batch.end(0)  # the third moves into the first row
        sampled = [[step] for _ in batch.names]
        batch.commit(sampled)
        proposer.propose(sampled, batch.counts, batch.tokens)
    assert read == [4, 4, 4]
    batch.tokens[0, 1] = 9  # another text in this row
    proposer.propose([[1], [1]], batch.counts, batch.tokens)
    assert read == [4, 4, 4, 7]
    assert len(proposer._texts) == 2


def test_it_stops_at_the_longest_text() -> None:
    batch, proposer = Batch(1), CopyProposer(config(drafts=10))
    batch.add(0, ([1, 2] * MAX_LEN)[: MAX_LEN - 3])
    batch.commit([[2]])
    assert proposer.propose([[2]], batch.counts, batch.tokens) == [[1, 2]]
    batch.commit([[1, 2]])
    assert proposer.propose([[1, 2]], batch.counts, batch.tokens) == [[]]


def test_a_longer_match_may_be_asked_for() -> None:
    class Careful(CopyProposer):
        shortest_match = 4

    class Careless(CopyProposer):
        shortest_match = 1

    batch = Batch(1)
    batch.add(0, [5, 6, 8, 9, 5, 6])
    arguments = [[6]], batch.counts, batch.tokens
    assert CopyProposer(config()).propose(*arguments) == [[8, 9, 5, 6, 8]]
    assert Careful(config()).propose(*arguments) == [[]]
    with pytest.raises(ValueError, match="shortest_match must be at least 2, got 1"):
        Careless(config())


def test_verified_as_vllm_does_the_text_is_the_models_own() -> None:
    """Greedy: a draft stands as long as it is the model's own next token, and the token after it is the model's."""
    generator = SelfSpecGenerator.from_pretrained(DEMO_PATH)
    prompt = generator.tokenizer("def add(a, b):\n    return a + b\n\ndef add(a, b):\n")["input_ids"]
    own = generator.generate(
        torch.tensor(prompt), max_new_tokens=40, do_sample=False, eos_token_id=[], policy="ar"
    ).new_tokens
    text = [*prompt, *own]
    batch, proposer = Batch(1, 256), CopyProposer(config(max_len=256))
    batch.add(0, prompt)
    sampled, passes = [[own[0]]], 1
    batch.commit(sampled)
    while batch.counts[0] < len(text):
        (draft,) = proposer.propose(sampled, batch.counts, batch.tokens)
        rest = text[int(batch.counts[0]) :]
        kept = next((place for place, (a, b) in enumerate(zip(draft, rest)) if a != b), min(len(draft), len(rest)))
        sampled, passes = [rest[: kept + 1]], passes + 1
        batch.commit(sampled)
    assert batch.text(0) == text
    assert passes < len(own)
