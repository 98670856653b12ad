from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, SequenceBiasLogitsProcessor

from policies import RoundRecord
from selfspec import SelfSpecGenerator
from selfspec.detokenize import DraftStreamer, IncrementalDecoder, TextStreamer, token_sources
from tiny_llama import tiny_llama


def byte_level_tokenizer():
    """As Llama 3 and the demo model have it: a character may be split between tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["der Käse, die Äpfel, 数学 und 数字 " * 4], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def byte_fallback_tokenizer():
    """As Llama 2 has it: words with a space in front, bytes for what is unknown, the text's first space stripped."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "▁be", "a", "b", "é", "."]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


TOKENIZERS = {"byte_level": byte_level_tokenizer(), "byte_fallback": byte_fallback_tokenizer()}


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


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_pieces_of_any_tokens_add_up(kind, data):
    """Tokens that are no text at all, special ones among them, as a model may write them."""
    tokenizer = TOKENIZERS[kind]
    frequent = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(["a", "b"]), len(tokenizer) - 1]
    if kind == "byte_fallback":
        frequent += tokenizer.convert_tokens_to_ids(["▁", "▁a", "<0xC3>", "<0xA9>", "é"])
    token = st.one_of(st.sampled_from(frequent), st.integers(0, len(tokenizer) - 1))
    tokens = data.draw(st.lists(token, max_size=24))
    decoder = IncrementalDecoder(tokenizer)
    out = pieces(decoder, tokens, data.draw(st.lists(st.integers(0, 24))))
    assert "".join(out) + decoder.finish() == tokenizer.decode(tokens, skip_special_tokens=True)


@given(data=st.data())
def test_pieces_are_what_the_tokens_add_to_the_prompts_text(data):
    """With the space between them, which decoding the tokens alone strips; after a special token there is none."""
    tokenizer = TOKENIZERS["byte_fallback"]
    tokens = st.lists(
        st.sampled_from(tokenizer.convert_tokens_to_ids(["▁", "▁a", "▁be", "a", "b", "é", "."])), max_size=24
    )
    prompt, new = data.draw(tokens), data.draw(tokens)
    before, whole = (tokenizer.decode(ids) for ids in (prompt, [*prompt, *new]))
    decoder = IncrementalDecoder(tokenizer, prompt)
    out = pieces(decoder, new, data.draw(st.lists(st.integers(0, 24))))
    if any(
        token != tokenizer.convert_tokens_to_ids("▁") for token in prompt[-16:]
    ):  # else nothing of the prompt is text
        assert "".join(out) + decoder.finish() == whole[len(before) :]
    anew = IncrementalDecoder(tokenizer, [*prompt, tokenizer.eos_token_id])
    assert anew.push(new) + anew.finish() == tokenizer.decode(new)


def cleaning_tokenizers():
    """Whose decoders take spaces out before punctuation."""
    words = [".", ",", "'", "n", "t", "s", "ve", "a", "he", "?", "!"]
    scored = [("▁", -1.0), ("▁▁", -3.0), *((f"▁{w}", -1.0) for w in words), *((w, -2.0) for w in words)]
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), *scored], 0, False))
    unigram.decoder = decoders.Metaspace()
    names = ["[UNK]", *words, *(f"##{word}" for word in words)]
    wordpiece = Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    wordpiece.decoder = decoders.WordPiece()
    return [
        PreTrainedTokenizerFast(tokenizer_object=made, unk_token=unk, clean_up_tokenization_spaces=True)
        for made, unk in ((unigram, "<unk>"), (wordpiece, "[UNK]"))
    ]


@pytest.mark.parametrize("tokenizer", cleaning_tokenizers(), ids=["unigram", "wordpiece"])
@given(data=st.data())
def test_pieces_of_a_text_that_loses_spaces_add_up(tokenizer, data):
    tokens = data.draw(st.lists(st.integers(1, len(tokenizer) - 1), max_size=24))
    decoder = IncrementalDecoder(tokenizer)
    out = pieces(decoder, tokens, data.draw(st.lists(st.integers(0, 24))))
    assert "".join(out) + decoder.finish() == tokenizer.decode(tokens, skip_special_tokens=True)


def test_a_character_waits_for_its_last_byte_and_nothing_else_waits():
    tokenizer = TOKENIZERS["byte_level"]
    decoder = IncrementalDecoder(tokenizer)
    first, *rest = tokenizer("ñ")["input_ids"]
    assert len(rest) == 1
    a = tokenizer.convert_tokens_to_ids("a")
    assert [decoder.push([a]), decoder.push([first]), decoder.push(rest), decoder.push([a])] == ["a", "", "ñ", "a"]


def test_a_run_of_bytes_goes_on_behind_a_special_token():
    """A run of bytes that is no text as a whole becomes replacement characters, the bytes before the special token, too."""
    tokenizer = TOKENIZERS["byte_fallback"]
    first, end, second = tokenizer.convert_tokens_to_ids(["<0x00>", "</s>", "<0xC3>"])
    decoder = IncrementalDecoder(tokenizer)
    out = [decoder.push([first, end]), decoder.push([second])]
    assert "".join(out) + decoder.finish() == tokenizer.decode([first, end, second], skip_special_tokens=True)


def test_a_finished_decoder_starts_anew():
    tokenizer = TOKENIZERS["byte_level"]
    decoder = IncrementalDecoder(tokenizer)
    first, last = tokenizer("ñ")["input_ids"]
    decoder.push([first])
    assert decoder.finish() == "\N{REPLACEMENT CHARACTER}"
    assert decoder.push([first, last]) == "ñ"


def record(drafts, accepted, tokens, copied=0):
    return RoundRecord(
        index=0,
        num_committed_before=3,
        exit_layer=1 if drafts else None,
        max_speculations=len(drafts),
        draft_tokens=drafts,
        num_accepted=accepted,
        tokens=tokens,
        loaded_layers=4,
        stop_cause="cap" if drafts else "none",
        num_copied=copied,
    )


@pytest.mark.parametrize(
    ("drafts", "accepted", "tokens", "fates"),
    [
        ((5, 6, 7), 1, (5, 9), [(5, "accepted"), (6, "rejected"), (7, "rejected"), (9, "corrected")]),
        ((5, 6), 2, (5, 6, 9), [(5, "accepted"), (6, "accepted"), (9, "bonus")]),
        ((5, 6), 0, (9,), [(5, "rejected"), (6, "rejected"), (9, "corrected")]),
        ((), 0, (9,), [(9, "target")]),
        ((5, 6, 7), 2, (5,), [(5, "accepted")]),  # a stop inside the accepted drafts
        ((5, 6), 2, (5, 6), [(5, "accepted"), (6, "accepted")]),  # a stop at the last of them: no bonus
    ],
)
def test_fates_of_a_round(drafts, accepted, tokens, fates):
    assert token_sources(record(drafts, accepted, tokens)) == fates


@pytest.mark.parametrize(
    ("accepted", "tokens", "fates"),
    [
        (3, (5, 6, 7, 9), ["copied", "copied", "copied", "bonus"]),
        (2, (5, 6, 9), ["copied", "copied", "rejected", "corrected"]),
        (1, (5, 9), ["copied", "rejected", "rejected", "corrected"]),
        (3, (5,), ["copied"]),  # a stop inside the copy
    ],
)
def test_fates_of_a_round_that_copied_three_tokens(accepted, tokens, fates):
    shown = token_sources(record((5, 6, 7), accepted, tokens, copied=3))
    assert [fate for _, fate in shown] == fates
    assert [token for token, fate in shown if fate != "rejected"] == [*tokens]


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
    tokenizer = TOKENIZERS["byte_level"]
    generator = SelfSpecGenerator(tiny_llama(vocab_size=len(tokenizer)), tokenizer)
    calls = []
    streamer = TextStreamer(tokenizer, lambda text: None, lambda: calls.append(torch.is_inference_mode_enabled()))
    with pytest.raises(ValueError, match="exit_layer"):
        generator.generate("a", streamer=streamer, policy="ls:4-2", max_new_tokens=3)
    assert calls == []
    generator.generate("a", streamer=streamer, max_new_tokens=3)
    assert calls == [False]


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_long_runs_of_incomplete_bytes_add_up(kind, data):
    tokenizer = TOKENIZERS[kind]
    if kind == "byte_level":
        whole, broken = tokenizer("数é a")["input_ids"], tokenizer("数")["input_ids"][:-1]
        few = [*whole, *broken, *broken, tokenizer.eos_token_id]
    else:
        few = tokenizer.convert_tokens_to_ids(
            ["<0xE6>", "<0x95>", "<0xB0>", "<0xC3>", "<0xC3>", "a", "▁a", "▁", "</s>"]
        )
    # Each run of one token, so that many in a row are likely.
    runs = data.draw(st.lists(st.tuples(st.sampled_from(few), st.integers(1, 40)), max_size=6))
    tokens = [token for token, count in runs for _ in range(count)]
    decoder = IncrementalDecoder(tokenizer)
    out = [decoder.push([token]) for token in tokens]
    assert "".join(out) + decoder.finish() == tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("kind", "token"),
    [("byte_level", "<|end|>"), ("byte_level", "Ã"), ("byte_fallback", "<0xC3>"), ("byte_fallback", "</s>")],
)
def test_a_token_costs_the_same_however_many_came_before(kind, token, monkeypatch):
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
    for _ in range(1000):
        decoder.push([number])
    assert decoded < 200 * 1000  # all of them each time would be half a million


def test_pieces_are_certain_before_a_long_run_ends():
    """Bytes that are no text, one after the other: their replacement characters do not wait for the end."""
    tokenizer = TOKENIZERS["byte_level"]
    (number,) = tokenizer.convert_tokens_to_ids(["Ã"])
    decoder = IncrementalDecoder(tokenizer)
    assert len("".join(decoder.push([number]) for _ in range(100))) > 80
