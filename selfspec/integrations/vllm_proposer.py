"""Copied drafts for vLLM: a proposer for its method `custom_class`, made of our index of earlier text.

    vllm serve MODEL --speculative-config '{"method": "custom_class",
        "model": "selfspec.integrations.vllm_proposer.CopyProposer", "num_speculative_tokens": 10}'

It sees tokens only, so it needs no weights and no second cache. vLLM verifies what it proposes, with its own rule.

Source of the interface: vLLM 0.33.0, `create_custom_proposer` in vllm/v1/spec_decode/custom_class_proposer.py and its caller,
`propose_draft_token_ids` in vllm/v1/worker/gpu_model_runner.py. vLLM calls it experimental. Nothing of vLLM is imported here,
and it has not been run inside vLLM: the tests call it as that version does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from policies.copying import SHORTEST
from selfspec.cache.copy_index import CopyIndex

_TAIL = 8
"""Tokens that are compared before two whole texts are."""


class _SpeculativeConfig(Protocol):
    num_speculative_tokens: int


class _ModelConfig(Protocol):
    max_model_len: int


class VllmConfig(Protocol):
    """What is read of vLLM's configuration."""

    speculative_config: _SpeculativeConfig
    model_config: _ModelConfig


class _Text:
    """A request's text as far as it was read, and the index of it."""

    def __init__(self, tokens: NDArray[np.int32]) -> None:
        self.index = CopyIndex()
        self.index.read(torch.from_numpy(tokens.astype(np.int64)))
        self._tokens = tokens.copy()

    def begins(self, tokens: NDArray[np.int32]) -> bool:
        """Whether these tokens begin with all of this text."""
        count = len(self.index)
        return (
            count <= len(tokens)
            and np.array_equal(self._tokens[max(count - _TAIL, 0) : count], tokens[max(count - _TAIL, 0) : count])
            and np.array_equal(self._tokens[:count], tokens[:count])
        )

    def read_on(self, tokens: NDArray[np.int32]) -> None:
        """Take in what follows. tokens: of the whole text, int32 [n]."""
        count = len(self.index)
        if len(tokens) > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * len(tokens))  # room to grow: one copy for many rounds
        self._tokens[count : len(tokens)] = tokens[count:]
        for token in tokens[count:].tolist():
            self.index.append(token)


class CopyProposer:
    """Proposes what followed the longest earlier match of each text's end.

    vLLM moves requests between rows and names none of them, so a text is known by its tokens: what was read of it is looked
    for in the same row first, then in the others. A request that is not found, because it is new or was begun again, is read
    from its first token.

    shortest_match: the shortest match that is copied from, in tokens, at least 2. To change it, name a subclass in
        --speculative-config.
    """

    shortest_match: ClassVar[int] = SHORTEST

    def __init__(self, vllm_config: VllmConfig) -> None:
        if self.shortest_match < SHORTEST:
            raise ValueError(f"shortest_match must be at least {SHORTEST}, got {self.shortest_match}")
        self._num_speculative_tokens = vllm_config.speculative_config.num_speculative_tokens
        self._max_model_len = vllm_config.model_config.max_model_len
        self._texts: dict[int, _Text] = {}

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft tokens of each request, up to `num_speculative_tokens`; none where nothing matches.

        sampled_token_ids: of each request, the tokens that the last pass has committed; none while its prompt is read.
        num_tokens_no_spec: [requests or more], how many tokens each has, these included.
        token_ids_cpu: [requests or more, max_model_len], the tokens.
        slot_mappings: not used. It is where vLLM puts keys and values.
        """
        left, self._texts = self._texts, {}
        drafts: list[list[int]] = []
        for row, sampled in enumerate(sampled_token_ids):
            tokens = token_ids_cpu[row, : int(num_tokens_no_spec[row])]
            room = self._max_model_len - len(tokens)
            if not sampled or room <= 0:
                drafts.append([])
                continue
            text = self._texts[row] = _taken(left, row, tokens) or _Text(tokens)
            text.read_on(tokens)
            match = text.index.match
            copies = match is not None and match.length >= self.shortest_match
            drafts.append(text.index.continuation(min(self._num_speculative_tokens, room)) if copies else [])
        return drafts


def _taken(left: dict[int, _Text], row: int, tokens: NDArray[np.int32]) -> _Text | None:
    """Take the text that these tokens continue out of those that are left; None if there is none."""
    for place in (row, *left):
        if place in left and left[place].begins(tokens):
            return left.pop(place)
    return None
