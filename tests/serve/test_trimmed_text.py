"""Text cut before stop strings, in whatever pieces it comes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import StoppingCriteria

from selfspec.serve.trimmed_text import StopTexts, TrimmedText
from test_streaming import TOKENIZERS
from tiny_llama import VOCAB_SIZE, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
STOPS = st.lists(st.text("ab c.\n", min_size=1, max_size=4), max_size=3)
BLOCKS = st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4), max_size=8)


@given(stops=STOPS, blocks=BLOCKS)
def test_pieces_are_the_text_before_the_first_stop(stops: list[str], blocks: list[list[int]]) -> None:
    """The tokens end, as the engine's do, with the one that completes a stop string."""
    tokens = [token for block in blocks for token in block]
    ends = (n for n in range(len(tokens)) if any(stop in TOKENIZER.decode(tokens[:n]) for stop in stops))
    tokens = tokens[: next(ends, len(tokens))]
    text = TrimmedText(TOKENIZER, stops)
    pieces, left = [], tokens
    for block in blocks:
        pieces.append(text.push(left[: len(block)]))
        left = left[len(block) :]
    pieces.append(text.finish())
    whole = TOKENIZER.decode(tokens)
    places = [place for stop in stops if (place := whole.find(stop)) >= 0]
    assert "".join(pieces) == whole[: min(places, default=len(whole))]
    assert text.ended == bool(places)
    at_once = TrimmedText(TOKENIZER, stops)
    assert at_once.push(tokens) + at_once.finish() == "".join(pieces)


def test_what_may_become_a_stop_is_held_back() -> None:
    text = TrimmedText(TOKENIZER, ["be.", "."])
    a, be, dot = TOKENIZER.convert_tokens_to_ids(["a", " be", "."])
    assert text.push([a]) == "a"
    assert text.push([be]) == " "
    assert text.push([a]) == "bea"
    assert text.push([be]) == " "
    assert not text.ended
    assert text.push([dot, a]) == ""
    assert text.ended
    assert text.finish() == ""


def stopped(criterion: StoppingCriteria, tokens: list[int], prompt: int) -> int | None:
    """How many tokens the text has when the criterion ends it."""
    lengths = range(prompt + 1, len(tokens) + 1)
    return next((n for n in lengths if bool(criterion(torch.tensor([tokens[:n]]), torch.empty(0)))), None)


@pytest.mark.parametrize("stop", ["A", "\n", "a\n", "é"])
def test_a_stop_of_byte_tokens_ends_the_text_at_its_last_byte(stop: str) -> None:
    """And no token later, though more bytes might have made another text of them."""
    tokenizer = TOKENIZERS["byte_fallback"]
    names = [
        "a",
        "<0x42>",
        *("a" if one == "a" else f"<0x{byte:02X}>" for one in stop for byte in one.encode()),
        "b",
        "b",
    ]
    tokens = tokenizer.convert_tokens_to_ids(names)
    assert stopped(StopTexts(tokenizer, [stop], 1), tokens, 1) == len(tokens) - 2
    text = TrimmedText(tokenizer, [stop])
    assert text.push(tokens[:-2]) + text.finish() == "aB"


def test_a_stop_is_found_where_tokens_are_shown_again() -> None:
    """A round that breaks off has shown tokens that are then not committed, or are shown once more."""
    a, be, dot, space = TOKENIZER.convert_tokens_to_ids(["a", " be", ".", " "])
    criterion = StopTexts(TOKENIZER, ["be."], 1)
    shown = lambda tokens: bool(criterion(torch.tensor([tokens]), torch.empty(0)))  # noqa: E731
    assert not shown([space, a])
    assert not shown([space, a, be])
    assert not shown([space, a, a])
    assert not shown([space, a, a, dot])
    assert not shown([space, a, a])
    assert not shown([space, a, a, be])
    assert shown([space, a, a, be, dot])
