"""A step of decoding in one call of our own kernels: embed a token, run some layers, look at the head.

Between two passes of a small model Python's operators took as long as a layer or two: what is set up here once per KV cache
is not set up again at every step. Results are those of the single calls, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import addressof, c_float, c_int64, sizeof

import torch
from torch import Tensor

from layerskip_models.choices import Detail, Look
from layerskip_models.kernels import library
from layerskip_models.kernels.library import KINDS, Cache, Layer, Step
from layerskip_models.kernels.native_layers import NativeLayers
from layerskip_models.kernels.native_linear import NativeLinear, check_rows
from layerskip_models.kernels.threads import keep, num_threads
from layerskip_models.norm import RMSNorm

STEP_ROWS = 40
"""Most rows of a step: its scratch is kept as long as the cache."""


class NativeSteps:
    """Steps on one KV cache, for one call of `generate` at a time. float32, one CPU.

    embedding: [vocab, hidden], contiguous. keys, values: the cache's, [layers, kv_heads, .., ..] with a position's numbers
    side by side. rotary: gives the model's table, which may have grown.
    """

    def __init__(
        self,
        layers: NativeLayers,
        *,
        embedding: Tensor,
        norm: RMSNorm,
        head: NativeLinear,
        draft_head: NativeLinear,
        keys: Tensor,
        values: Tensor,
        rotary: Callable[[], Tensor],
    ) -> None:
        chosen, factors = library.kernels(), norm.factors
        if chosen is None or factors is None or embedding.dtype not in KINDS or not embedding.is_contiguous():
            raise RuntimeError("no native steps here")
        self._run = chosen.step
        self._layers, self._heads = layers, {"full": head, "draft": draft_head}
        self._keys, self._values, self._rotary = keys, values, rotary
        self._embedding, self._factors = embedding, factors
        self._hidden = embedding.shape[1]
        self._pointers = {name: addressof(linear.matrix) for name, linear in self._heads.items()}
        most = max(chosen.pick_scratch(pointer, STEP_ROWS) for pointer in self._pointers.values())
        self._summaries = torch.empty(-(-most // 8), dtype=torch.int64, device="cpu")
        self._scratch = layers.new_scratch(STEP_ROWS)  # not a thread's: whoever calls next may be another one
        self._x = torch.empty(self._hidden, dtype=torch.float32, device="cpu")
        self._tokens, self._numbers = (c_int64 * STEP_ROWS)(), (c_float * (4 * STEP_ROWS))()
        self._step = Step(
            shape=layers.shape_address,
            kind=KINDS[embedding.dtype],
            scratch=self._scratch.data_ptr(),
            norm=factors.data_ptr(),
            eps=norm.eps,
            summaries=self._summaries.data_ptr(),
            tokens=addressof(self._tokens),
            numbers=addressof(self._numbers),
        )
        self._address = addressof(self._step)

    def token(
        self,
        token: int,
        position: int,
        stop: int,
        last: Tensor,
        *,
        head: str | None = None,
        detail: Detail = "token",
        record: tuple[Tensor, int] | None = None,
    ) -> Look | None:
        """One token through layers [0, stop).

        last: float32 [hidden], gets its hidden state. head: "full" or "draft", to look at; None returns None.
        record: float32 [layers, rows, hidden] and a row: gets the hidden states after every layer.
        """
        if not 0 <= token < self._embedding.shape[0]:
            raise ValueError(f"there is no token {token}")
        if last.dtype is not torch.float32 or last.numel() != self._hidden or not last.is_contiguous():
            raise ValueError(f"last must be contiguous float32 [{self._hidden}], got {last.dtype} {list(last.shape)}")
        step = self._step
        step.embedding, step.token, step.x = self._embedding.data_ptr(), token, self._x.data_ptr()
        self._walk(0, stop, position, 1, last, head, detail, record)
        if head is None:
            return None
        if detail == "token":
            return Look(self._tokens[0], self._numbers[0])
        return Look(self._tokens[0], *self._numbers[:4])

    def rows(
        self,
        x: Tensor,
        start: int,
        stop: int,
        position: int,
        *,
        record: tuple[Tensor, int] | None = None,
    ) -> tuple[list[int], list[float]]:
        """Rows through layers [start, stop) and the full head: the tokens that win and their logits, as in `Choices`.

        x: float32 [rows, hidden], contiguous, at most `STEP_ROWS`; the output after `start` layers.
        """
        check_rows("x", x, self._hidden)
        rows, step = x.shape[0], self._step
        if rows > STEP_ROWS or not x.is_contiguous():
            raise ValueError(f"x must be contiguous, of at most {STEP_ROWS} rows, got {list(x.shape)}")
        step.embedding, step.x = None, x.data_ptr()
        last = torch.empty_like(x) if record is None else x
        self._walk(start, stop, position, rows, last, "full", "token", record, x)
        return self._tokens[:rows], self._numbers[:rows]

    def _walk(
        self,
        start: int,
        stop: int,
        position: int,
        rows: int,
        last: Tensor,
        head: str | None,
        detail: Detail,
        record: tuple[Tensor, int] | None,
        x: Tensor | None = None,
    ) -> None:
        step, rotary = self._step, self._rotary()
        memory = self._layers.check(rows, start, stop, self._keys, self._values, rotary, position)
        offset = 4 * start * memory.layer_stride
        keys, values = self._keys.data_ptr() + offset, self._values.data_ptr() + offset
        step.cache = Cache(keys, values, memory.layer_stride, memory.head_stride)
        step.layers = self._layers.first + start * sizeof(Layer)
        step.rotary = rotary.data_ptr() + 8 * position * rotary.shape[-1]
        step.count, step.rows, step.position = stop - start, rows, position
        if record is None:
            step.outputs, step.last, step.stride = last.data_ptr(), None, 0
        else:
            outputs, first = record
            most = outputs.shape[1]
            if first + rows > most or stop > outputs.shape[0]:
                raise ValueError(f"{rows} rows from {first} on do not fit a record of {list(outputs.shape)}")
            step.outputs = outputs.data_ptr() + 4 * (start * most + first) * self._hidden
            step.stride = most * self._hidden
            step.last = None if x is not None else last.data_ptr()
        step.head = None if head is None else self._pointers[head]
        step.spread = detail != "token"
        job = self._run(self._address, num_threads())
        if job:
            keep(job, self, rotary, x, last, record)
