"""A frozen model as exit adapters learn from it: its hidden states over texts, and its norm and head.

Weights of frozen models are laid out for decoding, in many ways, and PyTorch cannot differentiate through our kernels. So the
norm and the head are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.kv_cache import KVCache
from layerskip_models.prefill import PromptPiece, read_pieces
from selfspec.exits.training_texts import TrainingText

_CPU_LOGITS, _GPU_LOGITS = 1 << 20, 1 << 26  # numbers of one chunk's logits: 4 MB, or 256 MB


@dataclass(frozen=True, slots=True, eq=False)
class ExitRows:
    """All rows of some texts, one text behind the other. The last row of a text predicts nothing in it.

    states: [rows, depths, hidden]. positions: int64 [rows], in the row's own text. scored: int64 [n], ascending, the rows
    that predict a token that counts. labels: int64 [n], those tokens. own: bool [n], True where the model wrote it itself.
    """

    states: Tensor
    scored: Tensor
    labels: Tensor
    own: Tensor
    positions: Tensor

    def before(self, distance: Tensor) -> tuple[Tensor, Tensor]:
        """Find the rows `distance`, int64 [n], before the scored ones in the same text: indices, and which there are."""
        there = distance <= self.positions[self.scored]
        return torch.where(there, self.scored - distance, 0), there

    def stretches(self) -> Tensor:
        """Give the scored rows the numbers, from 0, of the stretches without gaps that they form: int64 [n]."""
        return torch.cat([self.scored.new_zeros(1), (self.scored.diff() != 1).long()])[: len(self.scored)].cumsum(0)


@torch.no_grad()
def exit_rows(model: LayerSkipModel, texts: Sequence[TrainingText], depths: Sequence[int]) -> ExitRows:
    """Run texts through the model in one pass, each with attention of its own. depths: whose states are kept, ascending."""
    sizes = [len(text.tokens) for text in texts]
    states = torch.empty(sum(sizes), len(depths), model.hidden_size, dtype=model.dtype, device=model.device)
    counts = torch.zeros(len(states), dtype=torch.bool)  # by token
    pieces, first = [], 0
    for text, size, part in zip(texts, sizes, states.split(sizes)):
        for start, end in text.scored:
            counts[first + max(start, 1) : first + end] = True  # nothing predicts the first token of a text
        first += size

        def watch(first: int, layers_done: int, hidden: Tensor, part: Tensor = part) -> None:
            if layers_done in depths:
                part[first : first + hidden.shape[0], depths.index(layers_done)] = hidden

        pieces.append(PromptPiece(torch.tensor(text.tokens, device=model.device), KVCache(model, size), size, watch))
    read_pieces(model, pieces, model.num_layers)
    scored = counts.nonzero().flatten() - 1
    tokens = torch.cat([piece.tokens for piece in pieces])
    own = torch.tensor([text.own for text in texts]).repeat_interleave(torch.tensor(sizes))
    positions = torch.cat([torch.arange(size) for size in sizes])
    scored, own, positions = (tensor.to(model.device) for tensor in (scored, own[scored], positions))
    return ExitRows(states, scored, tokens[scored + 1], own, positions)


class FrozenHead:
    """RMSNorm and head of a model, copied in float32: vocab * hidden numbers. chunk_rows: whose logits may exist at once."""

    @torch.no_grad()
    def __init__(self, model: LayerSkipModel) -> None:
        head: Any = model.head
        device, norm = model.device, model.final_norm
        self.eps = norm.eps
        self.weight = (head.weight.float() * norm.scale.float()).to(device)  # the norm's weight is in it
        self.bias = None if head.bias is None else head.bias.float().clone().to(device)
        self.chunk_rows = max((_CPU_LOGITS if device.type == "cpu" else _GPU_LOGITS) // model.vocab_size, 32)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> float32 [rows, vocab]."""
        return F.linear(F.rms_norm(hidden.float(), hidden.shape[-1:], None, self.eps), self.weight, self.bias)
