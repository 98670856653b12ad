"""Texts as they come: `generator.stream`, which may be left whenever the reader likes, streamers, and pieces of text."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import SequenceBiasLogitsProcessor, StoppingCriteriaList

from byte_tokenizers import CLEANING, TOKENIZERS
from callbacks import StopAt
from layerskip_models import from_transformers
from records import finished
from selfspec import SelfSpecGenerator
from selfspec.detokenize import DraftStreamer, IncrementalDecoder, SourcedText, TextStreamer, token_sources
from selfspec.engine.policy_store import lend
from tiny_llama import tiny_llama, tiny_tokenizer

PROMPT = [5, 1, 7]


@pytest.fixture
def speaking() -> SelfSpecGenerator:
    return SelfSpecGenerator(from_transformers(tiny_llama(seed=3), layout="plain"), tiny_tokenizer(), policy="ls:2-4")


@pytest.fixture
def engine(speaking: SelfSpecGenerator) -> SelfSpecGenerator:
    """Without a tokenizer."""
    return SelfSpecGenerator(speaking.model, policy="ls:2-4")


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 3}, {"max_new_tokens": 1}, {"policy": "ar"}])
def test_pieces_add_up_to_what_generate_returns(
    options: dict[str, Any], engine: SelfSpecGenerator, speaking: SelfSpecGenerator
) -> None:
    options = {"max_new_tokens": 25, **options}
    expected = speaking.generate(PROMPT, **options)
    stream = engine.stream(PROMPT, **options)
    ids = list(stream)
    assert [token for piece in ids for token in piece] == expected.new_tokens
    texts = list(speaking.stream(PROMPT, **options))
    assert all(ids) and all(texts)
    assert "".join(map(str, texts)) == expected.text
    assert stream.result is not None
    assert stream.result.new_tokens == expected.new_tokens
    assert stream.result.stop_reason == "length"
    assert list(stream) == []


def test_arguments_are_checked_before_anything_is_read(engine: SelfSpecGenerator) -> None:
    with pytest.raises(ValueError, match="max_new_tokens"):
        engine.stream(PROMPT, max_new_tokens=0)
    for name, message in (("streamer", "takes no streamer"), ("max_tokens", "no argument"), ("prompts", "no argument")):
        with pytest.raises(TypeError, match=message):
            engine.stream(PROMPT, **{name: None})


@pytest.mark.parametrize("way", ["break", "exception", "close", "with"])
def test_leaving_early_ends_the_generation(way: str, engine: SelfSpecGenerator) -> None:
    """Nothing runs behind what was read; the runner, and the policy itself, serve the next call."""
    full = engine.generate(PROMPT, max_new_tokens=50)
    counting = StopAt(99)
    options: dict[str, Any] = {"max_new_tokens": 50, "stopping_criteria": StoppingCriteriaList([counting])}
    read: list[int] = []

    def reading(stream: Any) -> None:
        for piece in stream:
            read.extend(piece)
            if len(read) > 8:
                if way == "exception":
                    raise KeyError
                return

    stream = engine.stream(PROMPT, **options)
    with pytest.raises(KeyError) if way == "exception" else nullcontext(), stream if way == "with" else nullcontext():
        reading(stream)
    if way == "close":
        stream.close()
    assert stream.result is None
    del stream
    gc.collect()
    assert read == full.new_tokens[: len(read)]
    assert len(counting.seen) == len(read) < 50
    assert engine.generate(PROMPT, max_new_tokens=50).new_tokens == full.new_tokens


def test_a_stream_that_is_kept_has_its_policy_until_it_is_closed(engine: SelfSpecGenerator) -> None:
    policy = engine.policy
    with engine.stream(PROMPT, max_new_tokens=50) as stream:
        for _ in stream:
            break
        with lend(policy) as loan:
            assert loan.policy is not policy
    for _ in stream:
        pytest.fail("a closed stream has no pieces")
    with lend(policy) as loan:
        assert loan.policy is policy


def test_what_is_between_pieces_runs_in_the_callers_mode(engine: SelfSpecGenerator) -> None:
    """A loop may train on what it reads, make calls of its own, and read two streams in turns."""
    prompts = [PROMPT, [9, 2]]
    expected = [engine.generate(prompt, max_new_tokens=25).new_tokens for prompt in prompts]
    streams = [engine.stream(prompt, max_new_tokens=25) for prompt in prompts]
    found: list[list[int]] = [[], []]
    for _ in range(25):
        for text, stream in zip(found, streams):
            text += next(stream, [])
            assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        assert engine.generate(PROMPT, max_new_tokens=25).new_tokens == expected[0]
    assert found == expected


def test_an_error_in_a_round_ends_the_stream(engine: SelfSpecGenerator) -> None:
    failing = StoppingCriteriaList([StopAt(9, KeyError("a criterion's own fault"))])
    stream = engine.stream(PROMPT, max_new_tokens=25, stopping_criteria=failing)
    with pytest.raises(KeyError, match="own fault"):
        list(stream)
    assert list(stream) == []
    assert stream.result is None


def pieces(decoder, tokens, cuts):
    bounds = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    return [decoder.push(tokens[a:b]) for a, b in pairwise(bounds)]


@given(text=st.text(), cuts=st.lists(st.integers(0, 60)))
def test_pieces_of_a_text_add_up_and_hold_whole_characters(text, cuts):
    tokenizer = TOKENIZERS["byte_level"]
    tokens = tokenizer(text)["input_ids"]
    decoder = IncrementalDecoder(tokenizer)
    out = pieces(decoder, tokens, cuts)
    assert "".join(out) + decoder.finish() == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert "\N{REPLACEMENT CHARACTER}" not in "".join(out)
        assert "".join(out) == text  # a complete text has nothing held back


@given(data=st.data())
def test_pieces_are_what_the_tokens_add_to_the_prompts_text(data):
    """With the space between them, which decoding the tokens alone strips; after a special token there is none."""
    tokenizer = TOKENIZERS["byte_fallback"]
    space, *others = tokenizer.convert_tokens_to_ids(["▁", "▁a", "▁be", "a", "b", "é", "."])
    tokens = st.lists(st.sampled_from([space, *others]), max_size=24)
    prompt, new = data.draw(tokens), data.draw(tokens)
    before, whole = (tokenizer.decode(ids) for ids in (prompt, [*prompt, *new]))
    decoder = IncrementalDecoder(tokenizer, prompt)
    out = pieces(decoder, new, data.draw(st.lists(st.integers(0, 24))))
    if any(token != space for token in prompt[-16:]):  # else nothing of the prompt is text
        assert "".join(out) + decoder.finish() == whole[len(before) :]
    anew = IncrementalDecoder(tokenizer, [*prompt, tokenizer.eos_token_id])
    assert anew.push(new) + anew.finish() == tokenizer.decode(new)


FREQUENT = {
    "byte_level": ["<|end|>", "a", "b", "Ã", "æ"],
    "byte_fallback": ["</s>", "a", "b", "▁", "▁a", "<0x00>", "<0xC3>", "<0xA9>", "<0xE6>", "<0x95>", "<0xB0>", "é"],
}


@pytest.mark.parametrize("kind", [*TOKENIZERS, *CLEANING])
@given(data=st.data())
def test_pieces_of_any_tokens_add_up(kind, data):
    """Tokens that are no text at all, special ones among them, many of them over and over again."""
    tokenizer = {**TOKENIZERS, **CLEANING}[kind]
    token = st.integers(0 if kind in TOKENIZERS else 1, len(tokenizer) - 1)
    if kind in FREQUENT:
        token = st.one_of(st.sampled_from(tokenizer.convert_tokens_to_ids(FREQUENT[kind])), token)
    count = st.one_of(st.just(1), st.integers(1, 40)) if kind in TOKENIZERS else st.just(1)
    runs = data.draw(st.lists(st.tuples(token, count), max_size=24))
    tokens = [token for token, count in runs for _ in range(count)]
    decoder = IncrementalDecoder(tokenizer)
    out = pieces(decoder, tokens, data.draw(st.one_of(st.lists(st.integers(0, 24)), st.just(range(len(tokens))))))
    assert "".join(out) + decoder.finish() == tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("pieces", ["▁a ▁' ▁' ▁▁", "n ▁' ▁ ,", "! ▁ ▁' ▁s", "n ▁▁ ' ▁ve ,", "s ##? a n ' t he"])
def test_spaces_that_a_later_token_takes_out(pieces):
    tokenizer = CLEANING["wordpiece" if "##" in pieces else "unigram"]
    tokens = tokenizer.convert_tokens_to_ids(pieces.split(" "))
    decoder = IncrementalDecoder(tokenizer)
    assert "".join(decoder.push([token]) for token in tokens) + decoder.finish() == tokenizer.decode(tokens)


@pytest.mark.parametrize(
    ("drafts", "copied", "accepted", "tokens", "fates"),
    [
        ((5, 6, 7), 0, 1, (5, 9), "5 accepted, 6 rejected, 7 rejected, 9 corrected"),
        ((5, 6), 0, 2, (5, 6, 9), "5 accepted, 6 accepted, 9 bonus"),
        ((5, 6), 0, 0, (9,), "5 rejected, 6 rejected, 9 corrected"),
        ((), 0, 0, (9,), "9 target"),
        ((5, 6, 7), 0, 2, (5,), "5 accepted"),  # a stop inside the accepted drafts
        ((5, 6), 0, 2, (5, 6), "5 accepted, 6 accepted"),  # a stop at the last of them: no bonus
        ((5, 6, 7), 3, 3, (5, 6, 7, 9), "5 copied, 6 copied, 7 copied, 9 bonus"),
        ((5, 6, 7), 3, 2, (5, 6, 9), "5 copied, 6 copied, 7 rejected, 9 corrected"),
        ((5, 6, 7), 3, 1, (5, 9), "5 copied, 6 rejected, 7 rejected, 9 corrected"),
        ((5, 6, 7), 3, 3, (5,), "5 copied"),  # a stop inside the copy
    ],
)
def test_fates_of_a_round(drafts, copied, accepted, tokens, fates):
    made = finished(len(drafts), accepted)
    found = token_sources(replace(made, draft_tokens=drafts, tokens=tokens, num_copied=copied))
    assert ", ".join(f"{token} {fate}" for token, fate in found) == fates


def test_pieces_are_taken_in_their_order():
    """However many characters at a time. Rejected drafts go with what stands before them."""
    pieces = SourcedText()
    for text, source in (("abc", "accepted"), ("x", "rejected"), ("de", "bonus")):
        pieces.add(text, source)
    assert pieces.take(2) == [("ab", "accepted")]
    assert pieces.take(2) == [("c", "accepted"), ("x", "rejected"), ("d", "bonus")]
    assert pieces.take(9) == [("e", "bonus")]


def test_streamers_write_what_the_result_holds_and_fates_match_the_statistics():
    tokenizer = TOKENIZERS["byte_level"]
    generator = SelfSpecGenerator(tiny_llama(vocab_size=len(tokenizer), max_position_embeddings=256, seed=3), tokenizer)
    options = {"max_new_tokens": 80, "policy": "ls:1-3", "eos_token_id": []}

    plain, written = [], []
    generator.generate("Äpfel", streamer=TextStreamer(tokenizer, plain.append), **options)
    streamer = DraftStreamer(tokenizer, lambda text, fate: written.append((text, fate)))
    result = generator.generate("Äpfel", streamer=streamer, trace=True, **options)

    assert "".join(plain) == result.text
    assert "".join(text for text, fate in written if fate != "rejected") == result.text
    assert {fate for _, fate in written} == {"target", "accepted", "corrected", "bonus", "rejected"}
    fates = [fate for round_ in result.trace for _, fate in token_sources(round_)]
    assert fates.count("accepted") == result.stats.num_accepted
    assert fates.count("accepted") + fates.count("rejected") == result.stats.num_drafted


def test_a_stream_has_the_space_behind_the_prompt_and_the_results_text_has_not():
    tokenizer = TOKENIZERS["byte_fallback"]
    prompt, time = tokenizer.convert_tokens_to_ids(["▁a", "▁be"])
    model = tiny_llama(vocab_size=len(tokenizer), seed=3)
    generator = SelfSpecGenerator(model, tokenizer, "ls:1-3")
    options = {"max_new_tokens": 4, "logits_processor": [SequenceBiasLogitsProcessor([[[time], 1e4]])]}
    written = []
    result = generator.generate([prompt], streamer=TextStreamer(tokenizer, written.append), **options)
    assert result.text == "be be be be"
    assert "".join(written) == "".join(generator.stream([prompt], **options)) == " be be be be"


def test_on_start_is_called_for_a_valid_call_only():
    generator = SelfSpecGenerator(tiny_llama(), tiny_tokenizer())
    calls = []
    streamer = TextStreamer(tiny_tokenizer(), str, lambda: calls.append(torch.is_inference_mode_enabled()))
    with pytest.raises(ValueError, match="exit_layer"):
        generator.generate("a", streamer=streamer, policy="ls:4-2", max_new_tokens=3)
    assert calls == []
    generator.generate("a", streamer=streamer, max_new_tokens=3)
    assert calls == [False]


@pytest.mark.parametrize(
    ("kind", "token"),
    [("byte_level", "<|end|>"), ("byte_level", "Ã"), ("byte_fallback", "<0xC3>"), ("byte_fallback", "</s>")],
)
def test_a_token_costs_the_same_however_many_came_before(kind, token, monkeypatch):
    """Bytes that are no text are certain before their run ends: replacement characters do not wait for it."""
    tokenizer = TOKENIZERS[kind]
    decoded = 0
    decode = tokenizer.decode

    def counting(tokens, **options):
        nonlocal decoded
        decoded += len(tokens)
        return decode(tokens, **options)

    monkeypatch.setattr(tokenizer, "decode", counting)
    decoder = IncrementalDecoder(tokenizer)
    (number,) = tokenizer.convert_tokens_to_ids([token])
    text = "".join(decoder.push([number]) for _ in range(1000))
    assert len(text) > 980 or token != "Ã"
    assert decoded < 200 * 1000  # all of them each time would be half a million
