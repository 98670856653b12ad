"""The tokenizer that a GGUF file describes, built so that it splits text as llama.cpp does.

Byte-level vocabularies ("gpt2") are split by regular expressions, which the file names in `tokenizer.ggml.pre`. Where
llama.cpp has adapted a model's own expression to its matcher, the model's own one is here. SentencePiece vocabularies
("llama") have their spaces written as U+2581, with one in front of a text and after every special token, unless the file
says otherwise.
Names of models whose architecture is not run are left out.
Source: llama.cpp, src/llama-vocab.cpp, for names, expressions, and what is assumed where a key is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerskip_models.checkpoints.gguf_reader import GgufReader
from layerskip_models.checkpoints.typed_fields import is_int

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Types of tokens that are looked for in the text before it is split."""
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_SENTENCEPIECE_IDS = {"bos_token": 1, "eos_token": 2, "unk_token": 0}

_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_CASED_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA_3 = rf"{_ENDING}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN_2 = rf"{_ENDING}|{_WORD}|\p{{N}}|{_REST}"
_GPT_4O = rf"{_CASED[0]}{_ENDING}?|{_CASED[1]}{_ENDING}?|\p{{N}}{{1,3}}|{_CASED_REST}"
_ASIAN = "[一-龥ࠀ-一가-퟿]+"
_PUNCTUATION = r"\p{P}\$\+<=>\^~\|"
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ"
    "-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ"
    "-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)

_SPLITS: dict[str, tuple[str, ...]] = {
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": (_LLAMA_3,),
    "smaug-bpe": (_LLAMA_3,),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 hunyuan megrez solar-open grok-2": (_QWEN_2,),
    "ufakzeka": (rf"{_WORD}|\p{{N}}|{_REST}",),
    "seed-coder": (rf"{_ENDING}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}",),
    "minicpm5": (r"\p{N}{1,3}", rf"{_ENDING}|{_WORD}|\p{{N}}+|{_REST}"),
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en": (_GPT_2,),
    "jina-v2-code roberta-bpe mpt olmo jais trillion exaone4 granite-docling": (_GPT_2,),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": (r"\p{N}", _GPT_2),
    "default": (rf"[{_PUNCTUATION}]+", _GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "deepseek-llm": (
        r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _ASIAN, r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}"),
    "viking": (r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"),
    "tekken": (rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_CASED_REST}",),
    "gpt-4o kanana2 talkie granite-embed-multi-97m": (_GPT_4O,),
}  # fmt: skip
SPLITS = {name: split for names, split in _SPLITS.items() for name in names.split()}
"""The expressions of each name. A text is split by the first, the pieces by the second, and so on."""
_WHOLE_WORDS_FIRST = frozenset({*next(iter(_SPLITS)).split(), "tekken", "minicpm5", "granite-embed-multi-97m"})
"""Names with which a piece that is a token by itself is taken whole, whatever the merges make of it."""
_BEGINS = frozenset({*next(iter(_SPLITS)).split(), "tekken"})
"""Names with which a text begins with BOS if the file does not say."""


def build_tokenizer(path: Path, reader: GgufReader) -> PreTrainedTokenizerBase:
    """Build the tokenizer of a file. Raises ValueError, which begins with what the file has, if none that is known."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    kind = reader.value("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"has a tokenizer of the kind {kind!r}, and 'gpt2' and 'llama' are read")
    tokens = [token or f"[EMPTY_{place}]" for place, token in enumerate(_list(reader, "tokens", str))]
    types = [1] * len(tokens)
    if "tokenizer.ggml.token_type" in reader.keys:
        types = _list(reader, "token_type", int, len(tokens))
    if len({*tokens}) < len(tokens):
        raise ValueError("has two tokens of one spelling")
    ids = {} if kind == "gpt2" else {**_SENTENCEPIECE_IDS}
    ids |= {name: reader.value(f"tokenizer.ggml.{key}_token_id", ids.get(name)) for name, key in _NAMED.items()}
    named = {name: tokens[i] for name, i in ids.items() if is_int(i) and 0 <= i < len(tokens)}
    pre = reader.value("tokenizer.ggml.pre", "default") if kind == "gpt2" else None
    backend: Tokenizer = _byte_level(reader, tokens, pre) if pre is not None else _sentencepiece(reader, tokens, named)
    strips = any(name in str(reader.value("general.name", "")).lower() for name in ("phi-3", "phi3"))
    special = {token for token, own in zip(tokens, types) if own in (_UNKNOWN, _CONTROL)}
    found = [
        AddedToken(token, normalized=False, special=token in special, rstrip=strips and token not in _UNSTRIPPED)
        for token, own in zip(tokens, types)
        if token in special or own == _USER_DEFINED
    ]
    backend.add_tokens(found)
    adds = {
        f"add_{name}": bool(reader.value(f"tokenizer.ggml.add_{name}", default)) and name in named
        for name, default in (("bos_token", kind == "llama" or pre in _BEGINS), ("eos_token", False))
    }
    template = reader.value("tokenizer.chat_template")
    made = PreTrainedTokenizerFast(
        tokenizer_object=_Uncopied(backend),
        clean_up_tokenization_spaces=False,
        **({"chat_template": template} if isinstance(template, str) else {}),
        **{"bos_token": None, "eos_token": None, **named, **adds},
    )
    made.name_or_path = str(path)  # not above: transformers would ask the hub for a model of that name
    return made


@dataclass(frozen=True, slots=True)
class _Uncopied:
    """A tokenizer that transformers' copy of it takes over: copying means writing all of it as JSON and reading that."""

    backend: Any

    def __deepcopy__(self, memo: object) -> Any:
        return self.backend


_UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")
"""Tokens of Phi-3 after which a space stays; all its other special tokens take the spaces that follow them."""


def _byte_level(reader: GgufReader, tokens: Sequence[str], pre: object) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    if not isinstance(pre, str) or pre not in SPLITS:
        raise ValueError(f"has a vocabulary that is split by the name {pre!r} (tokenizer.ggml.pre), which is not known")
    vocab = {token: place for place, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab, _merges(reader), ignore_merges=pre in _WHOLE_WORDS_FIRST))
    splits = [pre_tokenizers.Split(Regex(one), "isolated") for one in SPLITS[pre]]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, last])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(reader: GgufReader, tokens: Sequence[str], named: dict[str, str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers.tokenization_utils_base import generate_merges

    vocab = {token: place for place, token in enumerate(tokens)}
    scores = _list(reader, "scores", (int, float), len(tokens))
    merges = generate_merges(vocab, dict(zip(tokens, scores)))
    backend = Tokenizer(models.BPE(vocab, merges, unk_token=named.get("unk_token"), fuse_unk=True, byte_fallback=True))
    leads = bool(reader.value("tokenizer.ggml.add_space_prefix", True))
    first = [normalizers.Prepend(_SPACE)] if leads else []
    backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", _SPACE)])
    last = [decoders.Strip(" ", 1, 0)] if leads else []
    steps = decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last
    backend.decoder = decoders.Sequence([*steps])
    return backend


def _merges(reader: GgufReader) -> list[tuple[str, str]]:
    merges = _list(reader, "merges", str)
    pairs = [(merge[:at], merge[at + 1 :]) for merge in merges if (at := merge.find(" ", 1)) > 0]
    if len(pairs) < len(merges):
        wrong = next(merge for merge in merges if " " not in merge[1:])
        raise ValueError(f"has the merge {wrong!r}, which is no pair of tokens")
    return pairs


def _list(reader: GgufReader, name: str, kind: type | tuple[type, ...], length: int | None = None) -> list[Any]:
    """Read a list of the tokenizer's. length: that of the vocabulary, which it must have."""
    found = reader.value(f"tokenizer.ggml.{name}")
    if not isinstance(found, list) or not all(issubclass(one, kind) for one in {*map(type, found)}):
        raise ValueError(f"lacks the list tokenizer.ggml.{name}, or has other values there")
    if length is not None and len(found) != length:
        raise ValueError(f"has {len(found)} values in tokenizer.ggml.{name} for {length} tokens")
    return found
