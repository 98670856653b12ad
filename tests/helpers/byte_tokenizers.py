"""Tokenizers whose tokens are bytes, or whose decoders take spaces out: the text of a token depends on its neighbours."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
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


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2 has it: words with a space in front, bytes for what is unknown, the text's first space stripped."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "▁be", "a", "b", "é", "."]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


TOKENIZERS = {"byte_level": byte_level_tokenizer(), "byte_fallback": byte_fallback_tokenizer()}


def cleaning_tokenizers() -> list[PreTrainedTokenizerFast]:
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


CLEANING = dict(zip(("unigram", "wordpiece"), cleaning_tokenizers()))
