"""One lean decoder over loaded weights: embed, run a range of layers, norm + head on chosen rows.

The only forward pass that decoding uses. It exists because calling transformers' layers one by one costs 1.5 to 2.9 times
as much at batch 1; the tests hold it to transformers' logits. There is no batch dimension: a hidden state is [rows, hidden],
and its rows belong to one text or to several, each with a KV cache of its own.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig

from layerskip_models.attention import Attention, OperatorAttention
from layerskip_models.choices import Choices, Detail, choices_in_pieces
from layerskip_models.families import family_of
from layerskip_models.kernels.native_forward import NativeForward
from layerskip_models.kernels.native_layers import NativeLayers
from layerskip_models.kernels.native_linear import NativeLinear
from layerskip_models.kernels.threads import OneTeam
from layerskip_models.kv_cache import CacheRows, KVCache, cache_rows
from layerskip_models.linear import Linear
from layerskip_models.norm import RMSNorm

_AS_IT_IS = nullcontext()
_growing = threading.Lock()  # of any model's rotary table


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """The weights of one decoder layer, fused: query, key, value in one matrix; gate and up in one.

    What a family of models does without is None. input_norm and post_attention_norm come before attention and before the
    MLP, output_norm and down_norm behind them: of what they add. query_norm and key_norm: of every head by itself, or of all
    heads of a row together, as wide as they are.
    sliding_window: how many positions a row attends to, its own among them; None for all before it.
    rotated: whether queries and keys get the rotary embedding.
    interleaved: whether query and key rows are, within each head (see `interleave_heads`), so that a rotary pair is adjacent
    and rotary takes complex numbers. All layers of a model alike.
    """

    input_norm: RMSNorm | None
    qkv: Linear  # hidden -> (heads + 2 * kv_heads) * head_dim
    output: Linear  # heads * head_dim -> hidden
    post_attention_norm: RMSNorm | None
    gate_up: Linear  # hidden -> 2 * intermediate
    down: Linear  # intermediate -> hidden
    interleaved: bool
    output_norm: RMSNorm | None = None
    down_norm: RMSNorm | None = None
    query_norm: RMSNorm | None = None
    key_norm: RMSNorm | None = None
    sliding_window: int | None = None
    rotated: bool = True


class Adapter(Protocol):
    """What rows of an early exit pass before the head drafts from them (`layerskip_models.exits.lean`).

    num_bytes: of its weights. rank: width in the middle. address: of what our kernels read of it, None without kernels.
    """

    num_bytes: int
    rank: int

    @property
    def address(self) -> int | None: ...

    def __call__(self, hidden: Tensor) -> Tensor:
        """[rows, hidden], in and out."""
        ...


def resolve_kv_dtype(kv_dtype: str | torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """What a model that computes in `dtype` keeps keys and values in, asked for by name or as it is.

    Raises ValueError for what is neither its own nor bfloat16.
    """
    own = str(dtype).removeprefix("torch.")
    name = str(kv_dtype).removeprefix("torch.")
    if name in ("auto", own):
        return dtype
    if name == "bfloat16":
        return torch.bfloat16
    raise ValueError(f"kv_dtype must be auto ({own}, which this model computes in) or bfloat16, got {name!r}")


def interleave_heads(weight: Tensor, num_heads: int, rotated: int | None = None) -> Tensor:
    """Reorder the rows of a query or key projection so that rotary pairs (i, i + r/2) become (2i, 2i + 1).

    weight: [num_heads * d, ...]. rotated: r, the first numbers of a head, that rotate; None for all d. Queries and keys are
    permuted alike, so their products do not change, and rotating a head becomes one multiplication of complex numbers.
    """
    heads = weight.unflatten(0, (num_heads, -1))
    turning, still = heads[:, :rotated], heads[:, heads.shape[1] if rotated is None else rotated :]
    pairs = turning.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat([pairs, still], dim=1).reshape(weight.shape).contiguous()


class LayerSkipModel:
    """A model whose layers can be run in ranges. Made by `load_model` or `from_transformers`.

    Attributes: config (transformers' own), generation_config (the checkpoint's defaults for `generate`), num_layers,
    hidden_size, vocab_size, max_positions (tokens of context), dtype (of the arithmetic and hidden states),
    kv_dtype (that keys and values are kept in; see `with_kv_dtype`), weights_dtype (that the weights came in: bfloat16 ones
    are computed with in float32 on a CPU; of weights that were rounded to 8 or 4 bits the arithmetic's), device, num_heads,
    num_kv_heads, head_dim, sliding_windows (of each layer, as `DecoderLayer` says), name (hub name or path, for finding the
    checkpoint's default setting), adapters (by exit layer, what drafts pass behind that exit; see `with_adapters`).
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        dtype: torch.dtype,
        weights_dtype: torch.dtype | None = None,
        embedding: Tensor,
        layers: list[DecoderLayer],
        final_norm: RMSNorm,
        head: Linear,
        draft_head: Linear | None = None,
        inv_freq: Tensor,
        rotary_scaling: float,
        generation_config: GenerationConfig,
        name: str | None = None,
    ) -> None:
        self.config = config
        self.generation_config = generation_config
        self.name = name
        self.adapters: Mapping[int, Adapter] = {}
        self.num_layers = len(layers)
        self.hidden_size = config.hidden_size
        self.vocab_size = embedding.shape[0]
        self.max_positions = family_of(config).max_positions(config)
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.dtype = self.kv_dtype = dtype
        self.weights_dtype = dtype if weights_dtype is None else weights_dtype
        self.device = embedding.device
        self._embedding = embedding  # [vocab, hidden]; perhaps in 16 bits, if that loses nothing
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self._draft_head = head if draft_head is None else draft_head
        self._inv_freq = inv_freq  # float32 [head_dim / 2]; shorter where only the first part of a head rotates
        self._rotary_scaling = rotary_scaling
        self._rotary = torch.empty(0)  # complex [positions, 1, head_dim / 2], grown by `prepare`
        self._half = self.dtype not in (torch.float32, torch.float64)
        self._unfused = self.device.type == "cpu" and not self._half
        self._groups_rows = self.device.type != "cpu"  # no fused kernel there takes a mask and grouped heads
        self._interleaved = layers[0].interleaved
        self.sliding_windows = tuple(layer.sliding_window for layer in layers)
        self._native: NativeLayers | None = None
        if NativeLayers.possible(layers):
            self._native = NativeLayers(
                layers,
                hidden_size=self.hidden_size,
                heads=self.num_heads,
                kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                eps=config.rms_norm_eps,
            )

    @property
    def kernels(self) -> str | None:
        """Which variant of our own kernels the layers run on ("avx2", ..); None where PyTorch's operators do the work."""
        return None if self._native is None else self._native.variant

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's weights as they are stored, which a pass through it reads (the mean over layers)."""
        linears = sum(
            linear.num_bytes
            for layer in self._layers
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
        )
        return linears // self.num_layers + 2 * self.hidden_size * self.dtype.itemsize

    @property
    def layer_weights(self) -> int:
        """Numbers in one layer's matrices, however they are stored."""
        heads = 2 * self.num_heads + 2 * self.num_kv_heads  # query and output, key and value
        return self.hidden_size * (heads * self.head_dim + 3 * int(self.config.intermediate_size))

    @property
    def head_bytes(self) -> int:
        """Bytes of norm and head as they are stored."""
        return self._head.num_bytes + self.hidden_size * self.dtype.itemsize

    @property
    def draft_head_bytes(self) -> int:
        """The same of the head that drafts are chosen with."""
        return self._draft_head.num_bytes + self.hidden_size * self.dtype.itemsize

    @property
    def layer_devices(self) -> tuple[torch.device, ...]:
        """Where each layer's weights are, and its part of a KV cache."""
        return (self.device,) * self.num_layers

    @property
    def num_ranks(self) -> int:
        """How many processes hold the model together (`layerskip_models.parallel`)."""
        return 1

    def agree(self, numbers: Sequence[float], same: int = 0) -> list[float]:
        """What the first of the processes that hold the model together says; of a model in one process, these numbers.

        Times are measured differently by every process, and decisions must be one. same: a number below 2^48 that must be
        equal on all of them.
        """
        return [*numbers]

    def all_agree(self, ok: bool) -> bool:
        """Whether it went well in every process that holds the model together. All of them have to ask."""
        return ok

    def prepare(self, max_length: int) -> None:
        """Make the rotary table long enough for positions below `max_length`; allocates only when it grows.

        As in transformers, angles and their sine and cosine are computed in float32 whatever the model's dtype.
        """
        if self._rotary.shape[0] >= max_length:
            return
        with _growing, torch.inference_mode(False):
            if self._rotary.shape[0] >= max_length:  # another thread was faster: its table may be longer than ours
                return
            length = min(max(max_length, 2 * self._rotary.shape[0]), max(self.max_positions, max_length))
            positions = torch.arange(length, dtype=torch.float32, device=self.device)
            angles = torch.outer(positions, self._inv_freq)
            wide = torch.float64 if self.dtype == torch.float64 else torch.float32
            cos = (angles.cos() * self._rotary_scaling).to(wide)
            sin = (angles.sin() * self._rotary_scaling).to(wide)
            if self._interleaved:
                still = self.head_dim // 2 - cos.shape[1]  # pairs that do not rotate
                self._rotary = torch.complex(F.pad(cos, (0, still), value=1.0), F.pad(sin, (0, still))).unsqueeze(1)
            else:
                self._rotary = torch.stack((cos, cos, -sin, sin), dim=1).unflatten(1, (2, 2)).unsqueeze(1)

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens: int64 [rows]. Returns [rows, hidden]."""
        return F.embedding(tokens, self._embedding).to(self.dtype)

    def embed_one(self, token: int) -> Tensor:
        """The embedding of one token as [1, hidden]."""
        # A copy only where the embedding is kept in fewer bits.
        return self._embedding[token : token + 1].to(self.dtype).contiguous()

    def run_layers(
        self,
        hidden: Tensor,
        start: int,
        stop: int,
        cache: KVCache | CacheRows,
        capture: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Run layers [start, stop) over the next rows of one text or of several, which their caches then hold.

        hidden: [rows, hidden], the output after `start` layers (the embedding for 0); left unchanged.
        cache: of the text that all rows belong to; or for each text its cache and how many of the rows are its. Rows stand
            behind those that these layers hold already, and attend to them and to each other up to themselves.
        capture: called after each layer as capture(layers_done, hidden).
        Returns the hidden state after `stop` layers, [rows, hidden]. Raises ValueError for rows that do not fit.
        """
        rows = cache_rows(cache, hidden.shape[0])
        if self._native is not None:
            return self._native.run(hidden, start, stop, rows, self._rotary, capture)
        return hidden if start == stop else self._by_operators(hidden, start, stop, rows, self._rotary, capture)

    def _by_operators(
        self,
        hidden: Tensor,
        start: int,
        stop: int,
        rows: CacheRows,
        rotary: Tensor,
        capture: Callable[[int, Tensor], None] | None,
    ) -> Tensor:
        attention = OperatorAttention(
            rows, start, stop, rotary=rotary, heads=self.num_heads, dtype=self.dtype,
            sliding_windows=self.sliding_windows[start:stop], unfused=self._unfused, groups_rows=self._groups_rows,
        )  # fmt: skip
        hidden = self.walk(hidden, start, stop, attention, capture)
        for one, number in rows:
            one.extend(start, stop, number)
        return hidden

    def steps(self) -> NativeForward | None:
        """Whole passes in single calls of our own kernels; None where they don't run all of the model."""
        embedding, native = self._embedding, self._native
        heads = (self._head, self._draft_head)
        if native is None or self._final_norm.factors is None or self.dtype != torch.float32:
            return None
        if not embedding.is_contiguous() or not all(isinstance(head, NativeLinear) for head in heads):
            return None
        head, draft_head = heads
        assert isinstance(head, NativeLinear)
        assert isinstance(draft_head, NativeLinear)
        return NativeForward(
            native,
            embedding=embedding,
            norm=self._final_norm,
            head=head,
            draft_head=draft_head,
            rotary=lambda: self._rotary,
            adapters=self.adapters,
        )

    def with_adapters(self, adapters: Mapping[int, Adapter]) -> LayerSkipModel:
        """The same model, weights shared, with these adapters behind its exits and no others."""
        other = copy.copy(self)
        other.adapters = dict(adapters)
        return other

    def with_kv_dtype(self, kv_dtype: str | torch.dtype) -> LayerSkipModel:
        """The same model, weights shared, whose texts keep their keys and values in this dtype.

        kv_dtype: "auto" or the model's own for the arithmetic's, which is what models begin with; or "bfloat16", which halves
        their memory, and what attention reads, beside float32. Rows are rounded once, when they are written: the arithmetic
        stays as it is, and drafts and verifications read the same numbers. Raises ValueError for another one.
        """
        other = copy.copy(self)
        other.kv_dtype = resolve_kv_dtype(kv_dtype, self.dtype)
        return other

    def at_exit(self, hidden: Tensor, exit_layer: int) -> Tensor:
        """What drafts are chosen from: the exit's own states, [rows, hidden], or what its adapter makes of them."""
        adapter = self.adapters.get(exit_layer)
        return hidden if adapter is None else adapter(hidden)

    def walk(
        self,
        hidden: Tensor,
        start: int,
        stop: int,
        attention: Attention,
        capture: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Layers [start, stop) by PyTorch's operators, with any attention: `run_layers` without kernels."""
        for index in range(start, stop):
            layer = self._layers[index]
            attended = attention(index, *self._project(layer, hidden, attention.rotary))
            hidden = self._finish(layer, hidden, attended)
            if capture is not None:
                capture(index + 1, hidden)
        return hidden

    def _project(self, layer: DecoderLayer, hidden: Tensor, rotary: Tensor) -> tuple[Tensor, ...]:
        """Norm, then rotated query, key and value: [rows, heads or kv_heads, head_dim] each. rotary: of these rows."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        normed = hidden if layer.input_norm is None else layer.input_norm(hidden)
        qkv = layer.qkv(normed).view(-1, heads + 2 * kv_heads, self.head_dim)
        if layer.query_norm is not None:
            _normalise_heads(layer.query_norm, qkv[:, :heads])
        if layer.key_norm is not None:
            _normalise_heads(layer.key_norm, qkv[:, heads : heads + kv_heads])
        if layer.rotated:
            self._rotate(qkv, heads + kv_heads, rotary)
        return qkv.split_with_sizes((heads, kv_heads, kv_heads), 1)

    def _finish(self, layer: DecoderLayer, hidden: Tensor, attended: Tensor) -> Tensor:
        """The layer's output from its input and what attention gave, [rows, heads * head_dim]."""
        hidden = _add(hidden, attended, layer.output, layer.output_norm)
        normed = hidden if layer.post_attention_norm is None else layer.post_attention_norm(hidden)
        gate, up = layer.gate_up(normed).view(hidden.shape[0], 2, -1).unbind(1)
        return _add(hidden, F.silu(gate).mul_(up), layer.down, layer.down_norm)

    @property
    def rotary(self) -> Tensor:
        """The rotary table; `prepare` may put a longer one in its place.

        With interleaved heads complex, [positions, 1, head_dim / 2]; pairs that do not rotate have a factor of 1. Else real,
        [positions, 1, 2, 2, r / 2], of the r first numbers of a head, which rotate: for both halves of them the factors of
        its own numbers (cos, cos), then those of the other half's (-sin, sin).
        """
        return self._rotary

    def on_one_team(self) -> AbstractContextManager[None]:
        """Within it this thread's PyTorch operators start no threads of their own, if our kernels run the layers.

        For the engine's rounds, whose operators are small; see `kernels.threads`.
        """
        return _AS_IT_IS if self._native is None else OneTeam()

    def logits(self, hidden: Tensor) -> Tensor:
        """norm + head on exactly the rows given: [rows, hidden] -> float32 [rows, vocab], as transformers' generate casts."""
        return self._logits(self._head, hidden)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """What early exits propose for rows of `at_exit`.

        Through weights of 8 bits where the head is large and our kernels run.

        A draft may be chosen in any way, as long as the distribution it was drawn from is the one that it is verified with;
        and at a large vocabulary reading the head is most of what a draft costs. What verifies is `logits`.
        """
        return self._logits(self._draft_head, hidden)

    def choices(self, hidden: Tensor, detail: Detail = "token") -> Choices:
        """What `logits` of these rows come to, without storing them on our own kernels, and else in pieces."""
        return self._choices(self._head, hidden, detail)

    def draft_choices(self, hidden: Tensor, detail: Detail = "token") -> Choices:
        """The same of `draft_logits`."""
        return self._choices(self._draft_head, hidden, detail)

    def _choices(self, head: Linear, hidden: Tensor, detail: Detail) -> Choices:
        if isinstance(head, NativeLinear):
            return head.choices_of_normalised(self._final_norm, hidden, detail)
        return choices_in_pieces(hidden, self.vocab_size, partial(self._logits, head), detail)

    def _logits(self, head: Linear, hidden: Tensor) -> Tensor:
        if isinstance(head, NativeLinear):
            return head.of_normalised(self._final_norm, hidden)
        return head(self._final_norm(hidden)).float()

    def _rotate(self, qkv: Tensor, num_rotated: int, rotary: Tensor) -> None:
        """Rotary embedding, in place, of the first `num_rotated` heads of [rows, heads, head_dim]."""
        if not rotary.is_complex():
            halves = qkv[:, :num_rotated, : 2 * rotary.shape[-1]].unflatten(-1, (2, -1))
            itself, other = rotary.unbind(2)
            # In half precision from float32 products.
            torch.addcmul(halves.flip(-2) * other, halves, itself, out=halves)
        elif self._half:
            heads = qkv[:, :num_rotated]
            pairs = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2)))
            heads.copy_(torch.view_as_real(pairs.mul_(rotary)).flatten(-2))
        else:
            qkv.view(rotary.dtype)[:, :num_rotated].mul_(rotary)


def _add(residual: Tensor, x: Tensor, linear: Linear, norm: RMSNorm | None) -> Tensor:
    """residual + linear(x), or residual + norm(linear(x)), in a new tensor. residual: [rows, out], x: [rows, in]."""
    return linear.add_to(residual, x) if norm is None else norm(linear(x)).add_(residual)


def _normalise_heads(norm: RMSNorm, heads: Tensor) -> None:
    """In place, each head by itself or all of a row together, as wide as the norm is. heads: [rows, heads, head_dim]."""
    heads.copy_(norm(heads.reshape(heads.shape[0], -1, norm.size)).view(heads.shape))
