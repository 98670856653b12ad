"""Tokenizers of GGUF files: ids of tokenizers made by hand of the same vocabulary."""

from __future__ import annotations

import gc
import json
from functools import cache
from pathlib import Path
from threading import current_thread
from typing import Any, cast

import pytest
from huggingface_hub import HfApi
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

import gguf_models
from layerskip_models import load_tokenizer
from layerskip_models.checkpoints import gguf_checkpoint
from layerskip_models.checkpoints.loading import begin_tokenizer

TEXTS = (
    "",
    "def f(x):\n    return x[1:] + 1234567  # it's\n\n\n\tif x != 'a':\n        pass\n",
    "\n\n1. One\n2. Two\n\n   3. Three:  a =  12,  b=3.14159, 1,000,000 and 12345678901",
    "I'll say it's OK, they've DON'T we'd i'm; 'tis o'Clock",
    "Äpfel, señor Ñandú à la carte: ça coûte 12 € — naïve “quotes” … ½ ² Ⅷ",
    "e\u0301 a\u030a n\u0303 हिन्दी ภาษาไทย עִבְרִית العربية، كتاب۔",
    "你好，世界！こんにちは カタカナ 한국어 123個 ａｂｃ。ㄅㄆㄇ",
    "🦙🦙 😀👩‍👩‍👧 a🦙b 🇫🇷!!! ??? ... <=> $5 + 3% `code` a|b ^~",
    "  two   three    four\t\ttabs \n \n  \r\n\r\n\u00a0x \u3000y   ",
    "camelCase HTTPServer XMLHttpRequest iPhone McDonald ABCdefGHI snake_case/path.py\n/\n",
    "<|begin|>system\n you<|end|> <tag>thinking</tag>\n<|begin|>  hi",
)
CONTROL = ("<|begin|>", "<|end|>")


@cache
def byte_level() -> tuple[list[str], list[str]]:
    """Tokens and merges that were learned without any split, so that every split leaves other tokens."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    pieces = [text[i : i + 12] for text in TEXTS[:-1] for i in range(len(text))]
    learner.train_from_iterator(
        pieces, trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, show_progress=False)
    )
    found = json.loads(learner.to_str())["model"]
    tokens = sorted(found["vocab"], key=found["vocab"].get)
    return [*tokens, *CONTROL, "<tag>"], [" ".join(pair) for pair in found["merges"]]


def write_byte_level(path: Path, pre: str | None, **keys: Any) -> Path:
    tokens, merges = byte_level()
    types = [3 if token in CONTROL else 4 if token == "<tag>" else 1 for token in tokens]
    own = {"model": "gpt2", "tokens": tokens, "merges": merges, "token_type": types, "bos_token_id": len(tokens) - 3}
    own |= {"eos_token_id": len(tokens) - 2, **({} if pre is None else {"pre": pre}), **keys}
    gguf_models.write(path, "llama", {f"tokenizer.ggml.{name}": value for name, value in own.items()}, {})
    return path


def by_hand(*splits: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """A tokenizer of this vocabulary with the splits as original tokenizer.json files have them."""
    tokens, merges = byte_level()
    vocab = {token: place for place, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab, [tuple(merge.split(" ")) for merge in merges]))
    made.pre_tokenizer = pre_tokenizers.Sequence([*splits])
    made.add_special_tokens([*CONTROL])
    made.add_tokens(["<tag>"])
    return made


def split(pattern: str, behaviour: str = "isolated") -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behaviour)


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
DIGITS = pre_tokenizers.Digits(individual_digits=True)
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BY_HAND = {
    "gpt-2": (WORDS,),
    "olmo": (WORDS,),
    "smollm": (DIGITS, WORDS),
    "starcoder": (DIGITS, WORDS),
    "llama-bpe": (split(LLAMA_3), BYTES),
    "smaug-bpe": (split(LLAMA_3), BYTES),
    "qwen2": (split(LLAMA_3.replace("{1,3}", "")), BYTES),
    "deepseek-coder": (
        split("[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), split("[一-龥ࠀ-一가-퟿]+"), DIGITS, BYTES,
    ),
    "viking": (split(" ?[^(\\s|.,!?…。，、।۔،)]+"), DIGITS, BYTES),
}  # fmt: skip


@pytest.mark.parametrize("pre", BY_HAND)
def test_ids_are_those_of_the_models_own_split(pre: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_byte_level(tmp_path / "m.gguf", pre, add_bos_token=False))
    expected = by_hand(*BY_HAND[pre])
    if pre == "llama-bpe":
        expected.model.ignore_merges = True
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == expected.encode(text).ids, text
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_what_a_name_decides_besides_its_split(tmp_path: Path) -> None:
    """BOS at the beginning, and whether a word that is a token is taken whole; the file's own word on BOS goes before."""
    tokens, merges = byte_level()
    whole = "HTTPServerPath"
    words = {"tokens": [*tokens, whole], "token_type": [1] * (len(tokens) + 1), "merges": merges}
    for pre, begins, takes_whole in (("llama-bpe", True, True), ("smaug-bpe", False, False), ("minicpm5", False, True)):
        path = write_byte_level(tmp_path / "m.gguf", pre, **words)
        ids = load_tokenizer(path)(whole)["input_ids"]
        assert (ids[0] == len(tokens) - 3) == begins
        assert (ids[-1] == len(tokens)) == takes_whole
        for says in (True, False):
            ids = load_tokenizer(write_byte_level(path, pre, add_bos_token=says, add_eos_token=says))("a")["input_ids"]
            assert (len(ids) == 3) == says
    tokenizer = load_tokenizer(write_byte_level(path, "llama-bpe", bos_token_id=9_999_999))
    assert tokenizer.bos_token is None and len(tokenizer("a")["input_ids"]) == 1


def test_a_tokenizer_is_built_without_asking_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers does where a vocabulary is large and the file's path looks like a name on the hub."""
    tokens = [*byte_level()[0], *(f"[PAD{place}]" for place in range(100_000))]
    write_byte_level(tmp_path / "m.gguf", "qwen2", tokens=tokens, token_type=[1] * len(tokens))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(HfApi, "model_info", lambda self, name: pytest.fail(f"asked for {name}"))
    tokenizer = load_tokenizer("m.gguf")
    assert len(tokenizer) == len(tokens) and tokenizer.name_or_path == "m.gguf"


def test_a_thread_builds_it_beside_the_weights_and_pythons_collector_works_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_checkpoint, "build_tokenizer", lambda *_: (current_thread().name, gc.isenabled()))
    begun = begin_tokenizer(write_byte_level(tmp_path / "model.gguf", "qwen2"))
    name, collects = cast("tuple[str, bool]", begun())
    assert name.startswith("tokenizer")
    assert not collects
    assert gc.isenabled()
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(OSError, match="copy or download it again"):
        begin_tokenizer(tmp_path / "empty.gguf")()


def test_special_tokens_need_not_be_spelled_in_bytes(tmp_path: Path) -> None:
    """As DeepSeek's, which would become tokens that the model does not have."""
    tokens, _ = byte_level()
    renamed = [*tokens[:-3], "<｜begin▁of▁sentence｜>", *tokens[-2:]]
    path = write_byte_level(tmp_path / "m.gguf", "deepseek-r1-qwen", tokens=renamed, add_bos_token=True)
    tokenizer = load_tokenizer(path)
    assert len(tokenizer) == len(tokens)
    ids = tokenizer("<｜begin▁of▁sentence｜>a<|end|>", add_special_tokens=False)["input_ids"]
    assert ids == [len(tokens) - 3, tokens.index("a"), len(tokens) - 2]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a"
    assert {*ids} & {*tokenizer.all_special_ids} == {ids[0], ids[2]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": "no-such-name"}, "split by the name 'no-such-name'"),
        ({"model": "rwkv"}, "of the kind 'rwkv'"),
        ({"token_type": [1, 1]}, "has 2 values in tokenizer.ggml.token_type for"),
        ({"merges": ["ab"]}, "the merge 'ab'"),
        ({"merges": [""]}, "the merge ''"),
        ({"pre": ["gpt-2"]}, r"split by the name \['gpt-2'\]"),
        ({"merges": ["a nosuchtoken"]}, "cannot be built"),
        ({"tokens": ["a", "a"]}, "two tokens of one spelling"),
    ],
    ids=str,
)
def test_a_tokenizer_that_is_not_known_is_refused_with_the_remedy(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write_byte_level(tmp_path / "m.gguf", **{"pre": "gpt-2", **change})
    if "tokens" in change:
        path = write_byte_level(path, "gpt-2", tokens=["a", "a"], token_type=[1, 1])
    with pytest.raises(FileNotFoundError, match=f"{message}.*: put the tokenizer.json of the original") as caught:
        load_tokenizer(path)
    assert "\n" not in str(caught.value)


def write_sentencepiece(path: Path, name: str = "a model", **keys: Any) -> tuple[Path, Tokenizer]:
    """A file, and the tokenizer that its vocabulary makes by hand, with a space before every text."""
    words = [text[i : i + 9].replace(" ", "▁") for text in TEXTS[:-1] for i in range(len(text))]
    learner = Tokenizer(models.BPE())
    learner.train_from_iterator(words, trainers.BpeTrainer(vocab_size=900, show_progress=False))
    found = json.loads(learner.to_str())["model"]
    learned = sorted({"▁", *found["vocab"]}, key=lambda token: found["vocab"].get(token, -1))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned, *CONTROL]
    types = [2, 3, 3, *[6] * 256, *[1] * len(learned), 3, 3]
    own = {"model": "llama", "tokens": tokens, "token_type": types, "scores": [-float(i) for i in range(len(tokens))]}
    own = {f"tokenizer.ggml.{key}": value for key, value in {**own, **keys}.items()}
    gguf_models.write(path, "llama", {"general.name": name, **own}, {})
    vocab = {token: place for place, token in enumerate(tokens)}
    merges = [tuple(pair) for pair in found["merges"]]
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    leads = [normalizers.Prepend("▁")] if keys.get("add_space_prefix", True) else []
    made.normalizer = normalizers.Sequence([*leads, normalizers.Replace(" ", "▁")])
    made.add_special_tokens(["<unk>", "<s>", "</s>", *CONTROL])
    return path, made


@pytest.mark.parametrize("leads", [True, False])
def test_sentencepiece_with_and_without_a_space_before_the_text(leads: bool, tmp_path: Path) -> None:
    path, expected = write_sentencepiece(tmp_path / "m.gguf", add_space_prefix=leads)
    tokenizer = load_tokenizer(path)
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert ids == [1, *expected.encode(text).ids], text
        if not set(CONTROL) & {*tokenizer.convert_ids_to_tokens(ids)}:
            assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")


def test_special_tokens_of_phi_3_take_the_spaces_behind_them(tmp_path: Path) -> None:
    for name, same in (("Phi-3 mini", True), ("another", False)):
        tokenizer = load_tokenizer(write_sentencepiece(tmp_path / "m.gguf", name)[0])
        left, right = (tokenizer(text)["input_ids"] for text in ("<|end|>\nhi", "<|end|>hi"))
        assert (left == right) == same
