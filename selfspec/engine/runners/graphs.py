"""The runner for CUDA: a pass over a few rows is a CUDA graph, which costs the host one launch and one wait.

Called from Python, a layer is some twenty launches of ten microseconds, more than the device needs for its work. A graph is
captured once for a range of layers, a number of rows and a head, and then replayed. All that changes from pass to pass is in
a table that the graph itself copies from the host's memory, addresses of caches included (`kernels.triton_rows`). So the same
graphs serve every text, several texts at once, and caches of any length.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.choices import Detail, HeadOutput, choices_of
from layerskip_models.decoder_layer import DecoderLayer, Linear
from layerskip_models.kernels import triton_rows as kernels
from layerskip_models.kv_cache import KVCache
from layerskip_models.linear import PlainLinear
from layerskip_models.norm import RMSNorm
from layerskip_models.operators import normalise_heads
from selfspec.engine.draft import Draft
from selfspec.engine.runners.eager import EagerRunner, gathered, hand_out, max_detail
from selfspec.engine.runners.runner import Head

MAX_ROWS = 64
"""Rows of the longest capture. More rows of several texts take several passes; those of one text run eagerly."""
_NUMBERS: dict[Detail, int] = {"token": 2, "confidence": 3, "all": 5}
"""How many numbers of a `HeadOutput` are read of a row."""


class _Pass(NamedTuple):
    """What selects a capture.

    rows: a power of two. adapter: the exit whose adapter rows pass before the draft head, else 0. detail: what is computed of
    each row. logits: whether these are kept, for rows whose tokens are sampled or processed.
    """

    start: int
    stop: int
    rows: int
    head: Head | None
    adapter: int
    detail: Detail
    logits: bool


class GraphRunner(EagerRunner):
    """See `selfspec.engine.runners.runner.Runner`. Raises RuntimeError, which says what to do, where a capture fails."""

    def __init__(self, model: LayerSkipModel) -> None:
        super().__init__(model)
        device = model.device
        self._graphs: dict[_Pass, torch.cuda.CUDAGraph] = {}
        self._rotary = torch.empty(0)
        self._layers = [_FusedLayer(model, index) for index in range(model.num_layers)]
        self._final_norm = _weight_and_eps(model.final_norm)
        self._on_host = _pinned(torch.zeros(MAX_ROWS, kernels.COLUMNS, dtype=torch.int64), device)
        self._lines = self._on_host.numpy()
        self._table = torch.zeros(MAX_ROWS, kernels.COLUMNS, dtype=torch.int64, device=device)
        self._logits: Tensor | None = None
        self._pool = self._new_pool()
        self._numbers_on_host = _pinned(torch.zeros(5 * MAX_ROWS, dtype=torch.float64), device)
        self._numbers = torch.zeros(5 * MAX_ROWS, dtype=torch.float64, device=device)
        # What captures run on: no text sees it.
        self._scratch = KVCache(model, 1)
        self._scratch_hidden = torch.zeros(model.hidden_size, dtype=model.dtype, device=device)

    def _new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle() if self.model.device.type == "cuda" else (0, 0)

    def run(self, drafts: Sequence[Draft], start: int, stop: int, head: Head | None) -> None:
        if head == "draft" and any(draft.vocabulary is not None for draft in drafts):  # every text has rows of its own
            if start < stop:
                self.run(drafts, start, stop, None)
            self._run_head(drafts, gathered(drafts), head)
            return
        rows = sum(draft.end - draft.first for draft in drafts)
        if rows > MAX_ROWS and len(drafts) > 1:
            half = len(drafts) // 2
            for part in (drafts[:half], drafts[half:]):
                self.run(part, start, stop, head)
                for draft in part:  # the next pass writes over logits
                    draft.logits = None if draft.logits is None else draft.logits.clone()
            return
        adapters = {draft.exit_layer for draft in drafts if head == "draft" and draft.exit_layer in self.model.adapters}
        if rows > MAX_ROWS or len(adapters) > 1 or (adapters and len({draft.exit_layer for draft in drafts}) > 1):
            super().run(drafts, start, stop, head)
            return
        if self.model.rotary is not self._rotary:  # captures know the old table's address
            self._graphs.clear()
            self._pool = self._new_pool()  # PyTorch refuses a pool whose last graph is gone
            self._rotary = self.model.rotary
        detail = max_detail(drafts) if head == "draft" else "token"
        logits = head is not None and not all(draft.sequence.greedy for draft in drafts)
        count = 1 << (rows - 1).bit_length()
        key = _Pass(start, stop, count, head, max(adapters, default=0), detail, logits)
        if key not in self._graphs:
            self._prepare(key)
        self._fill_table(drafts, start, stop, count)
        self._replay(key)
        for draft in drafts:
            if start < stop:
                draft.sequence.cache.extend(start, stop, draft.end - draft.first)
        if head is not None:
            self._read(drafts, rows, key)

    def _fill_table(self, drafts: Sequence[Draft], start: int, stop: int, count: int) -> None:
        lines, row = self._lines, 0
        for draft in drafts:
            sequence, first, end = draft.sequence, draft.first, draft.end
            cache, hidden, states = sequence.cache, sequence.hidden, draft.states
            position = cache.room(start, stop, end - first) if start < stop else 0
            keys, values = cache.keys.data_ptr(), cache.values.data_ptr()
            width = hidden.shape[1] * hidden.element_size()
            seen, stride = 0, 0
            if states is not None and states.watches(start, stop):
                seen, stride = states.round.data_ptr() + first * width, states.round.stride(0)
            for index in range(first, end):
                lines[row] = (
                    draft.rows[index], position + index - first, keys, values, cache.max_length,
                    hidden.data_ptr() + index * width, seen, stride,
                )  # fmt: skip
                row += 1
                seen += width if seen else 0
        # Rows that a capture has beyond these compute and write the last one's numbers once more.
        lines[row:count] = lines[row - 1]

    def _read(self, drafts: Sequence[Draft], rows: int, key: _Pass) -> None:
        kinds = _NUMBERS[key.detail]
        tokens, *numbers = self._numbers_on_host[: kinds * key.rows].view(kinds, key.rows)[:, :rows].tolist()
        outputs = [HeadOutput(int(token), *row) for token, *row in zip(tokens, *numbers)]
        hand_out(drafts, outputs, self._logits if key.logits else None)

    def _replay(self, key: _Pass) -> None:
        """Run a pass, and wait: its outputs are on the host then, and the table may be filled again."""
        self._graphs[key].replay()
        torch.cuda.current_stream().synchronize()

    def _prepare(self, key: _Pass) -> None:
        """Run the pass once on rows of no text, which compiles kernels, and then capture it."""
        cache, hidden = self._scratch, self._scratch_hidden
        self._lines[: key.rows] = (0, 0, cache.keys.data_ptr(), cache.values.data_ptr(), 1, hidden.data_ptr(), 0, 0)
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        current.synchronize()
        stream = torch.cuda.Stream(self.model.device)
        with torch.cuda.stream(stream):
            self._body(key)
            stream.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                try:
                    self._body(key)
                finally:
                    graph.capture_end()
            except BaseException as error:
                _end_failed_capture(self._pool, self.model.device)
                self._pool = self._new_pool()
                if isinstance(error, Exception):
                    raise RuntimeError(f"a CUDA graph could not be captured: pass runner='eager' ({error})") from error
                raise
        self._graphs[key] = graph

    def _body(self, key: _Pass) -> None:
        self._table[: key.rows].copy_(self._on_host[: key.rows], non_blocking=True)
        self._work(key)
        if key.head is not None:
            self._numbers_on_host.copy_(self._numbers, non_blocking=True)

    def _work(self, key: _Pass) -> None:
        model, table = self.model, self._table[: key.rows]
        if key.start == 0:
            x = model.embed(table[:, kernels.TOKEN])
        else:
            x = kernels.load_rows(
                table, torch.empty(key.rows, model.hidden_size, dtype=model.dtype, device=model.device)
            )
        delta: Tensor | None = None
        for index in range(key.start, key.stop):
            x, delta = self._layers[index](x, delta, table)
        if delta is not None:
            x, _ = kernels.add_norm(x, delta, None, table, key.stop, keep=True)
        if key.head is not None:
            self._head_numbers(key, x)

    def _head_numbers(self, key: _Pass, x: Tensor) -> None:
        model, table = self.model, self._table[: key.rows]
        if key.adapter:
            x = model.at_exit(x, key.adapter)
        _, normed = kernels.add_norm(x, None, self._final_norm, table)
        logits = _product(model.draft_head if key.head == "draft" else model.head, normed)
        if key.logits:
            if self._logits is None:
                self._logits = torch.empty(MAX_ROWS, model.vocab_size, dtype=torch.float32, device=model.device)
            self._logits[: key.rows] = logits
        if key.detail == "all":
            found = choices_of(logits.float(), "all")
            outputs = torch.cat([found.tokens.double().unsqueeze(0), found.numbers.double()])
        else:
            outputs = kernels.choose(logits)
        self._numbers[: outputs.numel()] = outputs.view(-1)


class _FusedLayer:
    """One decoder layer in a few kernels. What a family has beyond Llama's runs by PyTorch's operators."""

    def __init__(self, model: LayerSkipModel, index: int) -> None:
        layer: DecoderLayer = model.layers[index]
        self._model, self._index, self._layer = model, index, layer
        self._input_norm, self._post_norm = (
            _weight_and_eps(layer.input_norm),
            _weight_and_eps(layer.post_attention_norm),
        )

    def __call__(self, x: Tensor, delta: Tensor | None, table: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream and what the layer has yet to add to it. x, delta: the same of the layer before."""
        model, layer, index = self._model, self._layer, self._index
        heads, kv_heads = model.num_heads, model.num_kv_heads
        x, normed = kernels.add_norm(x, delta, self._input_norm, table, index)
        qkv = _product(layer.qkv, normed).view(x.shape[0], heads + 2 * kv_heads, model.head_dim)
        if layer.query_norm is not None:
            normalise_heads(layer.query_norm, qkv[:, :heads])
        if layer.key_norm is not None:
            normalise_heads(layer.key_norm, qkv[:, heads : heads + kv_heads])
        rotary = model.rotary.flatten(1) if layer.rotated else None
        query = kernels.rotate_and_store(qkv, table, rotary, index, heads)
        attended = _product(layer.output, kernels.attend(query, table, index, kv_heads, layer.sliding_window))
        if layer.output_norm is not None:
            attended = layer.output_norm(attended)
        x, normed = kernels.add_norm(x, attended, self._post_norm, table)
        down = _product(layer.down, kernels.silu_mul(_product(layer.gate_up, normed)))
        return x, down if layer.down_norm is None else layer.down_norm(down)


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _weight_and_eps(norm: RMSNorm | None) -> tuple[Tensor, float] | None:
    return None if norm is None else (norm.scale, norm.eps)


def _product(linear: Linear, x: Tensor) -> Tensor:
    assert isinstance(linear, PlainLinear)
    return kernels.product(x, linear.weight, linear.bias)


def _end_failed_capture(pool: Any, device: torch.device) -> None:
    """Leave the allocator and the random generator as before a capture that failed, which PyTorch does not."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with suppress(RuntimeError):  # not if the capture came to its end
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
    # The generator of PyTorch 2.11 believes that it is captured still; a copy of its state does not.
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())
