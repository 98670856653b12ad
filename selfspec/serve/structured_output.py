"""Text that follows a JSON schema or another grammar, with speculation: llguidance says which tokens may come next.

The mask is a pure function of the generated tokens, so drafts and verified rows are masked alike, and the output follows the
model's distribution under the schema. The matcher keeps its state between calls, and rolls it back to where two texts part,
so that a rejected draft costs nothing extra.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from layerskip_models.fork_safe import fork_safe
from selfspec.detokenize import skipped_tokens
from selfspec.serve.schema_check import LIMITS, Grammar, compile_grammar, compiled_form, one_line


class GrammarError(ValueError):
    """A grammar became too complex during a text, or the text does not follow it."""


class Vocabulary:
    """A tokenizer's tokens as bytes, computed when first needed: a large vocabulary takes about a second.

    eos: ids that end a text. size: of the model's vocabulary, which may be larger than the tokenizer's. special: tokens that
    no answer shows, with their texts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int, eos: Sequence[int]) -> None:
        self.size = size
        self._tokenizer, self._eos = tokenizer, [*eos]
        self.special = skipped_tokens(tokenizer)
        self._lock = fork_safe(threading.Lock())
        self._made: LLTokenizer | None = None
        self._names: dict[int, dict[str, Any]] = {}

    def name_of(self, token: int) -> dict[str, Any]:
        """Return the fields of a token in a chat's log-probabilities: its text and its bytes."""
        if token not in self._names:
            raw = self.bytes_of(token)
            self._names[token] = {"token": raw.decode("utf-8", errors="replace"), "bytes": [*raw]}
        return self._names[token]

    def bytes_of(self, token: int) -> bytes:
        return self._get().decode_bytes([token])

    def special_id(self, text: str) -> int | None:
        """Find the id of a text that llguidance takes for special, as any added <...>, and knows by its id; else None."""
        token = self._tokenizer.convert_tokens_to_ids(text)
        known = isinstance(token, int) and token != self._tokenizer.unk_token_id
        return token if known and self._get().is_special_token(token) else None

    def matcher(self, schema: Grammar) -> LLMatcher:
        """Make a fresh matcher for JSON that follows a schema, or for text that follows a grammar.

        Raises ValueError for an invalid schema, or one that llguidance does not support. A schema from an untrusted client
        must pass `selfspec.serve.schema_check` first, because the compiler can end the process.
        """
        if not self._eos:
            raise ValueError("text of a given form needs a model with an end-of-sequence token")
        grammar = compile_grammar(compiled_form(schema))
        matcher = LLMatcher(self._get(), grammar, limits=LLParserLimits(**LIMITS), log_level=0)
        if matcher.is_error():
            raise ValueError(f"the schema cannot be used: {one_line(matcher.get_error())}")
        return matcher

    def _get(self) -> LLTokenizer:
        with self._lock:
            if self._made is None:
                eos: Any = self._eos or None
                self._made = from_tokenizer(self._tokenizer, n_vocab=self.size, eos_token=eos)
            return self._made


class GrammarProcessor(LogitsProcessor):
    """Allows only tokens after which the text can still become one that follows the grammar. For one text.

    matcher: a fresh one, which is copied. Copies share one budget of `schema_check.LIMITS`, so a text that finds it used up
    goes on with a matcher of its own. Raises GrammarError for a text that does not follow the grammar or exceeds these.
    """

    def __init__(self, vocabulary: Vocabulary, schema: Grammar, matcher: LLMatcher, prompt_length: int) -> None:
        self._made_of, self._is_copy = (vocabulary, schema), True
        self._matcher = matcher.deep_copy()
        self._prompt_length, self._vocab_size = prompt_length, vocabulary.size
        self._taken: list[int] = []
        self._mask = torch.zeros((vocabulary.size + 31) // 32, dtype=torch.int32, device="cpu")
        self._bits = torch.arange(32, dtype=torch.int32, device="cpu")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids: int64 [1, n]. scores: [1, vocab]. Returns the scores with -inf for forbidden tokens."""
        try:
            self._go_to(input_ids[0, self._prompt_length :].tolist())
            size = self._mask.numel() * self._mask.element_size()
            self._matcher.unsafe_compute_mask_ptr(self._mask.data_ptr(), size)
            self._check()
        except GrammarError:  # a matcher is useless after one
            vocabulary, schema = self._made_of
            self._matcher, self._taken = vocabulary.matcher(schema), []
            if not self._is_copy:
                raise
            self._is_copy = False
            return self(input_ids, scores)
        allowed = ((self._mask.unsqueeze(-1) >> self._bits) & 1).flatten()[: self._vocab_size].bool()
        return scores.masked_fill(~allowed.to(scores.device), float("-inf"))

    def _go_to(self, tokens: list[int]) -> None:
        common = 0
        while common < min(len(self._taken), len(tokens)) and self._taken[common] == tokens[common]:
            common += 1
        if common < len(self._taken):
            self._matcher.rollback(len(self._taken) - common)
            del self._taken[common:]
        following = tokens[common:]
        count = self._matcher.try_consume_tokens(following)
        self._taken += following[:count]
        if count < len(following):
            self._check()
            raise GrammarError("the text has left the grammar")

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"the schema is too complex for this text: {one_line(self._matcher.get_error())}")
