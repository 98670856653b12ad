"""What is read from logits that are there: how sure a row is, its distribution after the warpers, and draws from it.

PyTorch's operators take longer for this than a small model's layers do for the row: `multinomial` makes a random number for
every token of the vocabulary, and top-p sorts them all.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from ctypes import addressof, byref, c_double, c_int64
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerskip_models.choices import Choices, Detail, empty_choices
from layerskip_models.kernels import library
from layerskip_models.kernels.library import Drafts

_CHUNK, _CHUNKS = 256, 256  # head.h


@dataclass(frozen=True, slots=True)
class Warp:
    """transformers' warpers in their order. top_k: 0 for every token. top_p: 1 for every token."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


def takes(weights: Tensor) -> bool:
    """Return whether the functions here take this tensor, [.., vocab]: float32 on the CPU, each row without gaps."""
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


def draw(weights: Tensor, uniform: float) -> int | None:
    """Draw the token that a number in [0, 1) selects: each with the probability of its share of the weights' sum.

    weights: [vocab], unnormalised, as `takes` says. None if their sum is 0, infinite or NaN. Raises ValueError for other
    tensors.
    """
    chosen = library.kernels()
    if chosen is None or weights.dim() != 1 or not takes(weights):
        raise ValueError(f"cannot draw from {weights.dtype} {list(weights.shape)} on {weights.device}")
    token = chosen.draw(weights.data_ptr(), weights.shape[0], uniform)
    return None if token < 0 else token


def sample(logits: Tensor, warp: Warp, uniform: float, out: Tensor) -> int | None:
    """`distribute` and `draw` for one row, in one call. logits, out: [1, vocab], as `takes` says.

    Raises ValueError for other tensors.
    """
    vocab = logits.shape[-1]
    if logits.shape != (1, vocab) or out.shape != (1, vocab) or not (takes(logits) and takes(out)):
        raise ValueError(f"cannot draw from {list(logits.shape)} logits, with {list(out.shape)} probabilities")
    reached = c_double()
    _, token = _accept(logits, warp, Drafts(reached=addressof(reached)), uniform, out, None)
    return token


@functools.cache
def _array(kind: type, count: int) -> Any:
    """Make the type of an array, once: each leaves a circle of objects behind, for Python's collector to find."""
    return kind * count  # type: ignore[operator]


@dataclass(frozen=True, slots=True, eq=False)
class Accepted:
    """What sampling says of a round's drafts.

    token: drawn after the accepted ones; None where there is nothing to draw from. p: float32 [num_accepted + 1, vocab], the
    target's distributions up to the token's. reached: for each of these rows, the chance that its text is accepted.
    """

    num_accepted: int
    token: int | None
    p: Tensor
    reached: list[float]


def accept_drafts(
    logits: Tensor,
    warp: Warp,
    drafts: Sequence[int],
    q: Tensor,
    uniforms: Sequence[float],
    uniform: float,
    *,
    copied: bool = False,
) -> Accepted:
    """Judge drafts as `selfspec.engine.accept` does, from the target's logits, and draw the token after them, in one call.

    logits: [k + 1, vocab]. drafts: k tokens. q: [k, vocab], contiguous, as `takes` says; not read if they were copied.
    uniforms: k float32 numbers in [0, 1), and one for the draw.
    Raises ValueError for other shapes, and for tokens that are not in the vocabulary.
    """
    vocab, count = logits.shape[-1], len(drafts)
    fits = logits.shape == (count + 1, vocab) and takes(logits)
    fits = fits and (copied or not count or (q.shape == (count, vocab) and takes(q) and q.is_contiguous()))
    fits = fits and len(uniforms) == count and all(0 <= token < vocab for token in drafts)
    if not fits:
        raise ValueError(f"cannot judge {count} drafts, {list(q.shape)}, by logits {list(logits.shape)}")
    p = torch.empty(count + 1, vocab, dtype=torch.float32, device="cpu")
    left = torch.empty(vocab, dtype=torch.float32, device="cpu") if count else None
    tokens, numbers, reached = (
        _array(c_int64, count)(*drafts),
        _array(c_double, count)(*uniforms),
        _array(c_double, count + 1)(1.0),
    )
    described = Drafts(count, copied, addressof(tokens), q.data_ptr(), addressof(numbers), addressof(reached))
    kept, token = _accept(logits, warp, described, uniform, p, left)
    return Accepted(kept, token, p[: kept + 1], reached[: kept + 1])


def _accept(
    logits: Tensor, warp: Warp, drafts: Drafts, uniform: float, p: Tensor, left: Tensor | None
) -> tuple[int, int | None]:
    """Return how many drafts are accepted, and the token that is drawn then. left: scratch, [vocab], if there are drafts."""
    chosen, vocab = library.kernels(), logits.shape[-1]
    assert chosen is not None
    candidates = torch.empty(vocab if warp.top_p < 1 else 0, dtype=torch.int64, device="cpu")
    accepted = c_int64()
    token = chosen.accept(
        logits.data_ptr(),
        logits.stride(0),
        vocab,
        warp.temperature,
        warp.top_k or vocab,
        warp.top_p,
        byref(drafts),
        uniform,
        p.data_ptr(),
        candidates.data_ptr(),
        None if left is None else left.data_ptr(),
        addressof(accepted),
    )
    return accepted.value, None if token < 0 else token
