"""Text on disk -> documents -> a byte-level BPE tokenizer and one packed stream of token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from layerskip_models.text_files import open_text
from layerskip_models.training.settings import DEFAULT_EXCLUDES, DataSource

END_OF_TEXT = "<|endoftext|>"
ALL = 2.0
"""The share of held-out documents that holds out every one."""
MAX_DOCUMENT_CHARS = 20_000  # longer texts (books) are cut at paragraphs: shuffled, and held out, in pieces

# One digit a piece; a word or a run of signs with the space before it; a run of white space but for the space that
# belongs to the next word, so that a line break and the indentation after it can become one token.
_PIECES = r"\p{N}| ?[\p{L}\p{M}_]+| ?[^\s\p{L}\p{M}\p{N}_]+|\s+(?!\S)|\s+"


def read_documents(path: Path, exclude: Sequence[str] = DEFAULT_EXCLUDES) -> Iterator[str]:
    """Documents of a .txt, .txt.gz or .py file, or of all such files under a folder, in the order of their paths.

    A text file's documents are separated by lines that hold only <|endoftext|>; a .py file is one document. Documents
    over MAX_DOCUMENT_CHARS are cut at paragraphs or lines. exclude: names of folders and files under `path` to leave
    out, * and ? standing for anything. Files that are not valid UTF-8 are left out when found in a folder, and are an
    error when named.
    Raises ValueError for a file of another kind.
    """
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            parts = file.relative_to(path).parts
            if _is_text(file) and file.is_file() and not any(fnmatch(part, out) for part in parts for out in exclude):
                with suppress(UnicodeDecodeError):
                    yield from read_documents(file)
        return
    if not _is_text(path):
        raise ValueError(f"data must be .txt, .txt.gz or .py files, or folders of them; got {str(path)!r}")
    with open_text(path) as stream:
        text = stream.read().replace("\r\n", "\n")
    for document in [text] if path.suffix == ".py" else text.split(f"\n{END_OF_TEXT}\n"):
        stripped = document.removeprefix(f"{END_OF_TEXT}\n").removesuffix(f"\n{END_OF_TEXT}").strip("\n")
        if stripped.strip():
            yield from split_document(stripped + "\n", MAX_DOCUMENT_CHARS)


def _is_text(path: Path) -> bool:
    return path.suffix in (".txt", ".py") or path.name.endswith(".txt.gz")


def split_document(text: str, max_chars: int) -> Iterator[str]:
    """Cut a text into pieces of at most max_chars, at a paragraph, line or word break in a piece's second half."""
    start = 0
    while len(text) - start > max_chars:
        half, limit = start + max_chars // 2 + 1, start + max_chars
        found = ((text.rfind(mark, half, limit), mark) for mark in ("\n\n", "\n", " "))
        end = next((place + len(mark) for place, mark in found if place >= 0), limit)
        yield text[start:end]
        start = end
    yield text[start:]


def is_held_out(document: str, fraction: float) -> bool:
    """Tell whether a document is kept for evaluation: a hash of its text decides, so place and seed do not matter."""
    digest = hashlib.sha256(document.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on documents: any text round-trips, digits stay single, <|endoftext|> is the EOS token.

    No normaliser, no prefix space, no cleaning-up when decoding. vocab_size counts the 256 bytes and the EOS token.
    Raises ValueError when vocab_size < 257, or when the text is too short to learn that many tokens.
    """
    if vocab_size < 257:
        raise ValueError(f"vocab_size must be at least 257 (256 bytes and {END_OF_TEXT}), got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(_PIECES), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: dict[str, Any] = {"special_tokens": [END_OF_TEXT], "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(documents, trainers.BpeTrainer(vocab_size=vocab_size, **options))
    found = tokenizer.get_vocab_size()
    if found < vocab_size:
        raise ValueError(f"vocab_size {vocab_size} is more than this text gives ({found} tokens): lower it or add text")
    options = {"eos_token": END_OF_TEXT, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def split_sources(
    sources: Sequence[DataSource], exclude: Sequence[str], holdout_fraction: float
) -> tuple[list[tuple[float, list[str]]], list[str]]:
    """Return (weight, training documents) of each source, and all held-out ones. Raises ValueError for an empty source."""
    train: list[tuple[float, list[str]]] = []
    held_out: list[str] = []
    for source in sources:
        documents = list(read_documents(source.path, exclude))
        if not documents:
            raise ValueError(f"data path holds no text: {str(source.path)!r} (looked for .txt, .txt.gz and .py files)")
        train.append((source.weight, [text for text in documents if not is_held_out(text, holdout_fraction)]))
        held_out.extend(text for text in documents if is_held_out(text, holdout_fraction))
    return train, held_out


def pack_streams(
    train: Sequence[tuple[float, Sequence[str]]], held_out: Sequence[str], tokenizer: PreTrainedTokenizerBase, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokenise, repeat or thin out by weight, shuffle and join, EOS after each: training and held-out, uint32 [tokens]."""
    rng = np.random.default_rng(seed)
    documents: list[np.ndarray] = []
    for weight, texts in train:
        encoded = _encode(texts, tokenizer)
        whole, rest = divmod(weight, 1.0)
        documents += encoded * int(whole)
        documents += [encoded[index] for index in rng.permutation(len(encoded))[: round(rest * len(encoded))]]
    empty = np.zeros(0, np.uint32)
    shuffled = [documents[index] for index in rng.permutation(len(documents))]
    kept = _encode([held_out[index] for index in rng.permutation(len(held_out))], tokenizer)
    return np.concatenate([empty, *shuffled]), np.concatenate([empty, *kept])


def _encode(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    """Return the token ids of each text and EOS, uint32."""
    if not texts:
        return []
    ids = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return [np.array([*row, tokenizer.eos_token_id], dtype=np.uint32) for row in ids]


def block(stream: np.ndarray, indices: Iterable[int], length: int) -> Tensor:
    """Rows `indices` of the stream cut into blocks: int64 [rows, length + 1], neighbours sharing one token."""
    rows = [stream[index * length : index * length + length + 1] for index in indices]
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def num_blocks(stream: np.ndarray, length: int) -> int:
    """Count the blocks of length + 1 tokens that `block` can cut from the stream."""
    return max(len(stream) - 1, 0) // length


def block_order(step: int, batch_size: int, available: int, seed: int) -> list[int]:
    """List the indices of the blocks of one step: all blocks in a shuffled order, then in another, and so on.

    A function of its arguments alone, so that a resumed run goes on with the data that the killed one would have had.
    """
    places = (divmod(position, available) for position in range(step * batch_size, (step + 1) * batch_size))
    return [int(_permutation(seed, epoch, available)[offset]) for epoch, offset in places]


@lru_cache(maxsize=1)
def _permutation(seed: int, epoch: int, available: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch, available)).permutation(available)
