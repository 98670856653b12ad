"""A decoding pass in one call of our own kernels: embed tokens, run some layers, pick tokens with the head.

With a small model, Python's operators between two passes took as long as a layer or two. So everything that does not change
is set up once here, not at every step. Results are bit-identical to those of separate calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import addressof, c_float, c_int64
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from layerskip_models.choices import Detail, HeadOutput
from layerskip_models.kernels import library
from layerskip_models.kernels.library import IN_ROWS, KINDS, Matrix
from layerskip_models.kernels.native_layers import NativeLayers, Workspace
from layerskip_models.kernels.native_linear import MAX_ROWS, NativeLinear, check_rows, pointer
from layerskip_models.kv_cache import CacheRows
from layerskip_models.norm import RMSNorm

_EMBEDDINGS = (torch.float32, torch.bfloat16, torch.float16)
STEP_ROWS = 64
"""Most rows of a step. Kept small, because the scratch lives as long as the `NativeForward`."""


class Adapted(Protocol):
    """An exit's adapter: its inner width, and where its `AdapterWeights` are; None if they run on PyTorch's operators."""

    rank: int

    @property
    def address(self) -> int | None: ...


_NONE: Mapping[int, Adapted] = MappingProxyType({})


class NativeForward:
    """Steps for one caller at a time, over texts in any KV caches. float32 on a CPU.

    embedding: [vocab, hidden]; a tensor is contiguous. rotary: returns the model's table, which may have grown. adapters: by
    exit layer, applied before the draft head. Raises RuntimeError if any of these does not run on our kernels.
    """

    def __init__(
        self,
        layers: NativeLayers,
        *,
        embedding: Tensor | NativeLinear,
        norm: RMSNorm,
        head: NativeLinear,
        draft_head: NativeLinear,
        rotary: Callable[[], Tensor],
        adapters: Mapping[int, Adapted] = _NONE,
    ) -> None:
        chosen, factors = library.kernels(), norm.factors
        if chosen is None or factors is None or (isinstance(embedding, Tensor) and embedding.dtype not in _EMBEDDINGS):
            raise RuntimeError("no native steps here")
        assert STEP_ROWS <= MAX_ROWS
        if any(adapter.address is None for adapter in adapters.values()):
            raise RuntimeError("no native steps with adapters that run on PyTorch's operators")
        self._layers, self._heads = layers, {"full": head, "draft": draft_head}
        self._adapters = dict(adapters)
        widest = max((adapter.rank for adapter in adapters.values()), default=0)
        size = STEP_ROWS * (widest + embedding.shape[1]) if adapters else 0
        self._adapted = torch.empty(size, dtype=torch.float32, device="cpu")
        self._rotary, self._embedding, self._factors = rotary, embedding, factors
        self._vocab, self._hidden = embedding.shape
        if isinstance(embedding, Tensor):
            place = pointer("the embedding", embedding, embedding.dtype, *embedding.shape)
            self._table = Matrix(
                place, None, None, KINDS[embedding.dtype], self._hidden, self._vocab, interleaved=IN_ROWS
            )
        else:
            self._table = embedding.matrix
        for name, linear in self._heads.items():
            if linear.shape[1] != self._hidden:
                raise ValueError(f"the {name} head takes {linear.shape[1]} numbers, hidden states have {self._hidden}")
        self._pointers = {name: addressof(linear.matrix) for name, linear in self._heads.items()}
        most = max(chosen.pick_scratch(pointer, STEP_ROWS) for pointer in self._pointers.values())
        self._summaries = torch.empty(-(-most // 8), dtype=torch.int64, device="cpu")
        self._x = torch.empty(STEP_ROWS, self._hidden, dtype=torch.float32, device="cpu")
        self._embedded, self._tokens = (c_int64 * STEP_ROWS)(), (c_int64 * STEP_ROWS)()
        self._numbers = (c_float * (4 * STEP_ROWS))()
        self._space = Workspace(layers)  # not per thread: the next call may come from another one
        self._space.reserve(STEP_ROWS)
        step = self._step = self._space.step
        step.embedded = addressof(self._embedded)
        step.norm, step.eps = pointer("the norm's factors", factors, torch.float32, self._hidden), norm.eps
        step.summaries = self._summaries.data_ptr()
        step.tokens, step.numbers = addressof(self._tokens), addressof(self._numbers)
        step.adapted = self._adapted.data_ptr()

    def tokens(
        self,
        tokens: Sequence[int],
        rows: CacheRows,
        stop: int,
        last: Tensor,
        *,
        head: str | None = None,
        detail: Detail = "token",
        record: tuple[Tensor, int] | None = None,
        logits: Tensor | None = None,
    ) -> list[HeadOutput]:
        """Run at most `STEP_ROWS` tokens through layers [0, stop).

        last: float32 [tokens, hidden], contiguous; receives their hidden states. head: "full" or "draft", the head to apply;
        None returns an empty list. record: float32 [layers, rows, hidden] and a first row; receives the hidden states after
        every layer. logits: float32 [tokens, vocab], contiguous; receives the head's.
        """
        count = len(tokens)
        if count > STEP_ROWS or not 0 <= min(tokens) <= max(tokens) < self._vocab:
            raise ValueError(f"{count} tokens do not fit a step, or there are no such tokens: {tokens}")
        if last.dtype is not torch.float32 or last.shape[-1] != self._hidden or last.numel() != count * self._hidden:
            raise ValueError(f"last must be float32 [{count}, {self._hidden}], got {last.dtype} {list(last.shape)}")
        if not (last.is_cpu and last.is_contiguous()):
            raise ValueError("last must be contiguous, on the CPU")
        step = self._step
        step.embedding, step.x = addressof(self._table), self._x.data_ptr()
        self._embedded[:count] = [*tokens]
        rotary = self._rotary()
        positions = self._layers.check(count, 0, stop, rows, rotary)
        self._describe(0, stop, count, last, last if record else None, head, detail, record, logits)
        self._space.run(rows, positions, 0, stop, rotary, self, last, record, logits)
        if head is None:
            return []
        if detail == "token":
            return [HeadOutput(token, logit) for token, logit in zip(self._tokens[:count], self._numbers)]
        numbers = self._numbers
        return [
            HeadOutput(self._tokens[i], numbers[i], numbers[count + i], numbers[2 * count + i], numbers[3 * count + i])
            for i in range(count)
        ]

    def rows(
        self,
        x: Tensor,
        rows: CacheRows,
        start: int,
        stop: int,
        *,
        record: tuple[Tensor, int] | None = None,
        logits: Tensor | None = None,
    ) -> tuple[list[int], list[float]]:
        """Run rows through layers [start, stop) and the full head. Returns the best tokens and their logits (see `Choices`).

        x: float32 [rows, hidden], contiguous, at most `STEP_ROWS` rows; the output of the first `start` layers.
        record, logits: as in `tokens`.
        """
        check_rows("x", x, self._hidden)
        count, step = x.shape[0], self._step
        if count > STEP_ROWS or not x.is_contiguous():
            raise ValueError(f"x must be contiguous, of at most {STEP_ROWS} rows, got {list(x.shape)}")
        step.embedding, step.x = None, x.data_ptr()
        outputs = torch.empty_like(x) if record is None else x
        rotary = self._rotary()
        positions = self._layers.check(count, start, stop, rows, rotary)
        self._describe(start, stop, count, outputs, None, "full", "token", record, logits)
        self._space.run(rows, positions, start, stop, rotary, self, outputs, record, logits)
        return self._tokens[:count], self._numbers[:count]

    def _describe(
        self,
        start: int,
        stop: int,
        count: int,
        outputs: Tensor,
        last: Tensor | None,
        head: str | None,
        detail: Detail,
        record: tuple[Tensor, int] | None,
        logits: Tensor | None,
    ) -> None:
        """Fill in `step` for a pass, except for its layers and its rows' caches."""
        step = self._step
        if record is None:
            step.outputs, step.last, step.stride = outputs.data_ptr(), None, 0
        else:
            kept, first = record
            most = kept.shape[1]
            if not 0 <= first <= most - count or stop > kept.shape[0]:
                raise ValueError(f"{count} rows from {first} on do not fit a record of {list(kept.shape)}")
            begin = pointer("a record", kept, torch.float32, kept.shape[0], most, self._hidden)
            assert begin is not None
            step.outputs = begin + 4 * (start * most + first) * self._hidden
            step.stride = most * self._hidden
            step.last = None if last is None else last.data_ptr()
        step.head = None if head is None else self._pointers[head]
        vocab = 0 if head is None else self._heads[head].shape[0]
        step.logits = pointer("logits", logits, torch.float32, count, vocab)
        adapter = self._adapters.get(stop) if head == "draft" else None
        step.adapter = None if adapter is None else adapter.address
        step.spread = detail != "token"
