"""Matrices in the GGUF types that the `gguf` package reads and does not write: each number to the nearest that its group has.

llama.cpp searches longer for scales, so its files are nearer to the weights; what they take to multiply is the same.
Source: gguf's `quants.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from layerskip_models.checkpoints.gguf_blocks import IQ4_NUMBERS

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def _quotient(of: Floats, by: Floats) -> Floats:
    """0 where it is divided by 0."""
    return np.divide(of, by, out=np.zeros_like(of), where=by != 0)


def _half(numbers: Floats) -> tuple[Bytes, Floats]:
    """float16 numbers as bytes, [.., 2 for each], and what they stand for."""
    halves = numbers.astype(np.float16)
    return halves.view(np.uint8), halves.astype(np.float32)


def _nibbles(q: Bytes) -> Bytes:
    """[.., 2 n] as n bytes: the first half in the low four bits."""
    low, high = np.split(q, 2, axis=-1)
    return (low | high << 4).astype(np.uint8)


def _with_minima(x: Floats, most: int) -> tuple[Bytes, Bytes]:
    """x: [blocks, 8, 32]. The head of a Q4_K or Q5_K block, and numbers of 0 to `most`."""
    low = np.maximum(-x.min(axis=2, keepdims=True), 0)
    step = (x.max(axis=2, keepdims=True) + low) / most
    d, scale = _half(step.max(axis=1) / 63)
    m, least = _half(low.max(axis=1) / 63)
    scales = np.rint(_quotient(step, np.broadcast_to(scale[:, None], step.shape))).clip(0, 63).astype(np.uint8)
    minima = np.rint(_quotient(low, np.broadcast_to(least[:, None], low.shape))).clip(0, 63).astype(np.uint8)
    q = np.rint(_quotient(x + least[:, None] * minima, np.broadcast_to(scale[:, None] * scales, x.shape)))
    (s, s_last), (t, t_last) = (np.split(one[..., 0], 2, axis=1) for one in (scales, minima))
    six_bits = s | s_last >> 4 << 6, t | t_last >> 4 << 6, (s_last & 15) | (t_last & 15) << 4
    return np.concatenate((d, m, *six_bits), axis=1), q.clip(0, most).astype(np.uint8)


def _q4_k(x: Floats) -> Bytes:
    head, q = _with_minima(x.reshape(-1, 8, 32), 15)
    return np.concatenate((head, _nibbles(q.reshape(-1, 4, 64)).reshape(-1, 128)), axis=1)


def _q5_k(x: Floats) -> Bytes:
    head, q = _with_minima(x.reshape(-1, 8, 32), 31)
    high = (q >> 4 << np.arange(8, dtype=np.uint8)[:, None]).sum(axis=1, dtype=np.uint8)
    return np.concatenate((head, high, _nibbles((q & 15).astype(np.uint8).reshape(-1, 4, 64)).reshape(-1, 128)), axis=1)


def _q6_k(x: Floats) -> Bytes:
    x = x.reshape(-1, 16, 16)
    step = np.abs(x).max(axis=2, keepdims=True) / 31
    d, scale = _half(step.max(axis=1) / 127)
    scales = np.rint(_quotient(step, np.broadcast_to(scale[:, None], step.shape))).clip(0, 127)
    q = np.rint(_quotient(x, np.broadcast_to(scale[:, None] * scales, x.shape))).clip(-32, 31) + 32
    parts = q.astype(np.uint8).reshape(-1, 2, 4, 32)
    low = _nibbles((parts & 15).astype(np.uint8).reshape(-1, 2, 128)).reshape(-1, 128)
    high = (parts >> 4 << np.array([[0], [2], [4], [6]], np.uint8)).sum(axis=2, dtype=np.uint8).reshape(-1, 64)
    return np.concatenate((low, high, scales[..., 0].astype(np.int8).view(np.uint8), d), axis=1)


def _iq4_nl(x: Floats) -> Bytes:
    x = x.reshape(-1, 32)
    d, scale = _half(np.abs(x).max(axis=1, keepdims=True) / -IQ4_NUMBERS[0])
    middles = (np.array(IQ4_NUMBERS[1:]) + np.array(IQ4_NUMBERS[:-1])) / 2
    q = np.searchsorted(middles, _quotient(x, np.broadcast_to(scale, x.shape))).astype(np.uint8)
    return np.concatenate((d, _nibbles(q)), axis=1)


QUANTISERS: dict[str, Callable[[Floats], Bytes]] = {"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl}


def in_blocks(weight: Floats, kind: str) -> Bytes:
    """Pack a matrix [out, in], in: a multiple of 256 (IQ4_NL: 32), as uint8 [out, bytes of a row]. kind: of `QUANTISERS`."""
    return QUANTISERS[kind](weight).reshape(len(weight), -1)
