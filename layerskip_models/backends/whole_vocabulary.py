"""Embedding, last norm and head where one process and one device hold all of them."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip_models.choices import Choices, Detail, choices_in_pieces
from layerskip_models.decoder_layer import Linear
from layerskip_models.kernels.native_linear import NativeLinear
from layerskip_models.norm import RMSNorm


class WholeVocabulary:
    """`VocabularyBackend` on one device. embedding: [vocab, hidden], perhaps in fewer bits than dtype."""

    def __init__(self, embedding: Tensor, norm: RMSNorm, dtype: torch.dtype) -> None:
        self.size = embedding.shape[0]
        self._embedding, self._norm, self._dtype = embedding, norm, dtype

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self._embedding).to(self._dtype)

    def embed_one(self, token: int) -> Tensor:
        # Copies only if the embedding is kept in fewer bits.
        return self._embedding[token : token + 1].to(self._dtype).contiguous()

    def logits(self, head: Linear, hidden: Tensor) -> Tensor:
        if isinstance(head, NativeLinear):
            return head.of_normalised(self._norm, hidden)
        return head(self._norm(hidden)).float()

    def choices(self, head: Linear, hidden: Tensor, detail: Detail) -> Choices:
        if isinstance(head, NativeLinear):
            return head.choices_of_normalised(self._norm, hidden, detail)
        return choices_in_pieces(hidden, self.size, partial(self.logits, head), detail)
