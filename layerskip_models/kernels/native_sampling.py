"""What is read from logits that are there: how sure a row is, its distribution after the warpers, and draws from it.

PyTorch's operators take longer for this than a small model's layers do for the row: `multinomial` makes a random number for
every token of the vocabulary, and top-p sorts them all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from layerskip_models.choices import Choices, Detail, empty_choices
from layerskip_models.kernels import library

_CHUNK, _CHUNKS = 256, 256  # head.h


@dataclass(frozen=True, slots=True)
class Warp:
    """transformers' warpers in their order. top_k: 0 for every token. top_p: 1 for every token."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


def takes(weights: Tensor) -> bool:
    """Whether the functions here take this tensor, [rows, vocab] or [vocab]: float32 on the CPU, each row without gaps."""
    return (
        weights.dtype is torch.float32
        and weights.is_cpu
        and weights.stride(-1) == 1
        and weights.numel() > 0
        and library.kernels() is not None
    )


def look(logits: Tensor, detail: Detail) -> Choices:
    """`choices_of`, to the bits that a pass gives which does not store its logits. logits: [rows, vocab], as `takes` says.

    Raises ValueError for other tensors.
    """
    chosen = library.kernels()
    if chosen is None or logits.dim() != 2 or not (takes(logits) and logits.is_contiguous()):
        raise ValueError(f"cannot look at {logits.dtype} {list(logits.shape)} on {logits.device}")
    rows, vocab = logits.shape
    choices = empty_choices(rows, detail)
    room = torch.empty(vocab // _CHUNKS + 2 * _CHUNK, dtype=torch.float32, device="cpu")
    results = choices.tokens.data_ptr(), choices.numbers.data_ptr()
    chosen.look(logits.data_ptr(), rows, vocab, room.data_ptr(), detail != "token", *results)
    return choices


def distribute(logits: Tensor, warp: Warp, out: Tensor) -> None:
    """Probabilities after the warpers, row by row. logits, out: [rows, vocab]; both as `takes` says, in different memory.

    A row without a distribution (NaN, an infinite logit, nothing but masked tokens) becomes NaN. Raises ValueError if `out`
    does not fit.
    """
    if out.shape != logits.shape or not (takes(logits) and takes(out)):
        raise ValueError(
            f"cannot write the distributions of {list(logits.shape)} logits to {out.dtype} {list(out.shape)}"
        )
    chosen = library.kernels()
    assert chosen is not None
    vocab = logits.shape[-1]
    top_k = warp.top_k or vocab
    candidates = torch.empty(vocab if warp.top_p < 1 else 0, dtype=torch.int64, device="cpu")
    row, to, step, step_to = logits.data_ptr(), out.data_ptr(), 4 * logits.stride(0), 4 * out.stride(0)
    for index in range(logits.shape[0]):
        chosen.distribute(
            row + index * step,
            vocab,
            warp.temperature,
            top_k,
            warp.top_p,
            to + index * step_to,
            candidates.data_ptr(),
        )


def remainder(p: Tensor, q: Tensor) -> Tensor:
    """max(0, p - q), [vocab]; p where that is 0 everywhere. Raises ValueError for tensors that `takes` refuses."""
    chosen = library.kernels()
    if chosen is None or p.shape != q.shape or p.dim() != 1 or not (takes(p) and takes(q)):
        raise ValueError(f"cannot subtract {q.dtype} {list(q.shape)} from {p.dtype} {list(p.shape)}")
    weights = torch.empty_like(p)
    chosen.residual(p.data_ptr(), q.data_ptr(), p.shape[0], weights.data_ptr())
    return weights


def draw(weights: Tensor, uniform: float) -> int | None:
    """The token that a number in [0, 1) selects: each with the probability of its share of the weights' sum.

    weights: [vocab], unnormalised, as `takes` says. None if their sum is 0, infinite or NaN. Raises ValueError for other
    tensors.
    """
    chosen = library.kernels()
    if chosen is None or weights.dim() != 1 or not takes(weights):
        raise ValueError(f"cannot draw from {weights.dtype} {list(weights.shape)} on {weights.device}")
    token = chosen.draw(weights.data_ptr(), weights.shape[0], uniform)
    return None if token < 0 else token
