"""Refusing prompts that are far too long before all of them is made into tokens."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from selfspec.engine.request import ContextLengthError, check_context

_USUAL = 8
"""Characters of a token, generously: a text of fewer for each position of the context is made into tokens at once."""


class PromptBounds:
    """most_tokens: of a prompt and its new tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, most_tokens: int) -> None:
        self._tokenizer, self.most_tokens = tokenizer, most_tokens

    def check(self, texts: Sequence[str]) -> None:
        """Raises ContextLengthError for texts that together have more than twice as many tokens as are possible.

        They are counted piece by piece, which is right but for a token or two at the cuts.
        """
        if sum(map(len, texts)) <= _USUAL * self.most_tokens:
            return
        piece = max(1024, _USUAL * self.most_tokens // 2)
        count = 0
        for text in texts:
            for start in range(0, len(text), piece):
                part = text[start : start + piece]
                count += len(self._tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"])
                if count > 2 * self.most_tokens:
                    raise ContextLengthError(count, 1, self.most_tokens)

    def check_room(self, num_prompt: int, max_new_tokens: int) -> None:
        """Raises ContextLengthError for a prompt that leaves too little room."""
        check_context(num_prompt, max_new_tokens, self.most_tokens)
