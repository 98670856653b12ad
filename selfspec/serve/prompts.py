"""Prompts that are far too long are refused before all of their text is tokenised."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from selfspec.engine.request import ContextLengthError
from selfspec.messages import check_characters

_USUAL = 8
"""A generous number of characters per token. Texts with fewer per position of the context are tokenised at once."""


def check_length(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_tokens: int) -> None:
    """Raise ContextLengthError for texts that together have more than twice as many tokens as are possible.

    They are counted piece by piece, which is right except for a token or two at the cuts. Raises ValueError for half a
    character, which no tokenizer takes.
    """
    for text in texts:
        check_characters(text, "the text")
    if sum(map(len, texts)) <= _USUAL * max_tokens:
        return
    piece = max(1024, _USUAL * max_tokens // 2)
    count = 0
    for text in texts:
        for start in range(0, len(text), piece):
            part = text[start : start + piece]
            count += len(tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"])
            if count > 2 * max_tokens:
                raise ContextLengthError(count, 1, max_tokens)
