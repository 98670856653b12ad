"""Text cut before stop strings, in whatever pieces it comes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import StoppingCriteria

from byte_tokenizers import TOKENIZERS
from running_server import ask, running_server
from selfspec import SelfSpecGenerator
from selfspec.detokenize import skipped_tokens
from selfspec.serve.processors import Stops, StopTexts, TrimmedText
from tiny_llama import VOCAB_SIZE, tiny_llama, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
STOPS = st.lists(st.text("ab c.\n", min_size=1, max_size=4), max_size=3)
BLOCKS = st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4), max_size=8)


@given(stops=STOPS, blocks=BLOCKS)
def test_pieces_are_the_text_before_the_first_stop(stops: list[str], blocks: list[list[int]]) -> None:
    """The tokens end, as the engine's do, with the one that completes a stop string."""
    tokens = [token for block in blocks for token in block]
    ends = (n for n in range(len(tokens)) if any(stop in TOKENIZER.decode(tokens[:n]) for stop in stops))
    tokens = tokens[: next(ends, len(tokens))]
    text = TrimmedText(TOKENIZER, Stops(stops))
    pieces, left = [], tokens
    for block in blocks:
        pieces.append(text.push(left[: len(block)]))
        left = left[len(block) :]
    pieces.append(text.finish())
    whole = TOKENIZER.decode(tokens)
    places = [place for stop in stops if (place := whole.find(stop)) >= 0]
    assert "".join(pieces) == whole[: min(places, default=len(whole))]
    assert text.ended == bool(places) and (text.found is None or whole.startswith(text.found, min(places)))
    at_once = TrimmedText(TOKENIZER, Stops(stops))
    assert at_once.push(tokens) + at_once.finish() == "".join(pieces)


def test_what_may_become_a_stop_is_held_back() -> None:
    text = TrimmedText(TOKENIZER, Stops(["be.", "."]))
    a, be, dot = TOKENIZER.convert_tokens_to_ids(["a", " be", "."])
    assert text.push([a]) == "a"
    assert text.push([be]) == " "
    assert text.push([a]) == "bea"
    assert text.push([be]) == " "
    assert not text.ended
    assert text.push([dot, a]) == ""
    assert text.ended
    assert text.finish() == ""


def test_a_stop_may_have_special_tokens_which_an_answer_does_not_show() -> None:
    tokenizer = tiny_tokenizer()
    a, be = tokenizer.convert_tokens_to_ids(["a", " be"])
    names = ("<|im_end|>", "<|im_start|>", "<|other|>")
    tokenizer.add_special_tokens({"additional_special_tokens": [*names]})
    end, begin, other = map(int, tokenizer.convert_tokens_to_ids([*names]))
    special = skipped_tokens(tokenizer)
    tokens = [a, begin, be, other, a, end, begin, a]
    for stop, shown, length in (
        ("<|im_end|>", "a bea", 6), ("<|im_end|><|im_start|>", "a bea", 7), ("<|im_start|>a", "a bea", 8),
        ("ea", "a b", 5), ("<|im_end|>a", "a bea", 8), ("<|im_end|> ", "a beaa", None), ("<|other|>", "a be", 4),
    ):  # fmt: skip
        stops = Stops([stop], special=special)
        assert stopped(StopTexts(tokenizer, stops, 0), tokens, 0) == length
        text = TrimmedText(tokenizer, stops)
        assert "".join(text.push([token]) for token in tokens[:length]) + text.finish() == shown
        assert (text.ended, text.found) == (length is not None, stop if length else None)


def stopped(criterion: StoppingCriteria, tokens: list[int], prompt: int) -> int | None:
    """How many tokens the text has when the criterion ends it."""
    lengths = range(prompt + 1, len(tokens) + 1)
    return next((n for n in lengths if bool(criterion(torch.tensor([tokens[:n]]), torch.empty(0)))), None)


@pytest.mark.parametrize("stop", ["A", "\n", "a\n", "é"])
def test_a_stop_of_byte_tokens_ends_the_text_at_its_last_byte(stop: str) -> None:
    """And no token later, though more bytes might have made another text of them."""
    tokenizer = TOKENIZERS["byte_fallback"]
    spelled = ["a" if one == "a" else f"<0x{byte:02X}>" for one in stop for byte in one.encode()]
    names = ["a", "<0x42>", *spelled, "b", "b"]
    tokens = tokenizer.convert_tokens_to_ids(names)
    assert stopped(StopTexts(tokenizer, Stops([stop]), 1), tokens, 1) == len(tokens) - 2
    text = TrimmedText(tokenizer, Stops([stop]))
    assert text.push(tokens[:-2]) + text.finish() == "aB"


def test_a_stop_may_begin_with_the_space_behind_the_prompt() -> None:
    """Which is there only if the text is decoded after its prompt: SentencePiece tokenizers strip a text's first space."""
    tokenizer = TOKENIZERS["byte_fallback"]
    a, be, b = tokenizer.convert_tokens_to_ids(["▁a", "▁be", "b"])
    assert stopped(StopTexts(tokenizer, Stops([" be"]), 1), [a, be, b], 1) == 2
    text = TrimmedText(tokenizer, Stops(["b"]), prompt=[a])
    assert text.push([be]) + text.finish() == " "


def test_a_completion_has_the_space_behind_its_prompt() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    a, be = tokenizer.convert_tokens_to_ids(["▁a", "▁be"])
    generator = SelfSpecGenerator(tiny_llama(vocab_size=len(tokenizer), seed=3), tokenizer, "ls:1-3")
    asked = {"prompt": [a], "max_tokens": 2, "temperature": 0, "logit_bias": {str(be): 100}}
    with running_server(generator, served_name="m") as server:

        def choice(**more: Any) -> Any:
            return json.loads(ask(server, "POST", "/v1/completions", {**asked, **more})[1])["choices"][0]

        assert choice()["text"] == " be be"
        assert choice(echo=True)["text"] == "a be be"
        assert (choice(stop=[" be"])["text"], choice(stop=[" be"])["finish_reason"]) == ("", "stop")
        assert choice(logprobs=1)["logprobs"]["text_offset"] == [0, 3]


def test_a_stop_is_found_where_tokens_are_shown_again() -> None:
    """A round that breaks off has shown tokens that are then not committed, or are shown once more."""
    a, be, dot, space = TOKENIZER.convert_tokens_to_ids(["a", " be", ".", " "])
    criterion = StopTexts(TOKENIZER, Stops(["be."]), 1)
    shown = lambda tokens: bool(criterion(torch.tensor([tokens]), torch.empty(0)))  # noqa: E731
    assert not shown([space, a])
    assert not shown([space, a, be])
    assert not shown([space, a, a])
    assert not shown([space, a, a, dot])
    assert not shown([space, a, a])
    assert not shown([space, a, a, be])
    assert shown([space, a, a, be, dot])
