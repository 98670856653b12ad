"""One lean decoder over loaded weights: embed tokens, run a range of layers, apply norm and head to chosen rows.

Decoding uses no other forward pass. It exists because calling transformers' layers one by one costs 1.5 to 2.9 times as much
at batch 1; tests compare its logits with transformers'. There is no batch dimension: a hidden state is [rows, hidden], and
its rows belong to one sequence or to several, each with its own KV cache. A backend runs the layers (`operators`):
PyTorch's operators, our kernels, or layers on several devices.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip_models.choices import Choices, Detail, choices_in_pieces
from layerskip_models.decoder_layer import DecoderLayer, Linear
from layerskip_models.families import family_of, head_dim_of
from layerskip_models.fork_safe import fork_safe
from layerskip_models.grouped_weight import ROW_BITS, GroupedLinear
from layerskip_models.kernels.native_forward import NativeForward
from layerskip_models.kernels.native_layers import NativeLayers
from layerskip_models.kernels.native_linear import NativeGroupedLinear, NativeLinear
from layerskip_models.kernels.threads import SingleThreadedOperators
from layerskip_models.kv_cache import CacheRows, KVCache, cache_rows
from layerskip_models.linear import row_bits, with_rows
from layerskip_models.norm import RMSNorm
from layerskip_models.operators import Capture, LayerBackend, OperatorLayers

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig

    from layerskip_models.draft_vocabulary import DraftTokens
    from layerskip_models.exits.adapter import Steering
    from layerskip_models.exits.lean import LeanAdapter

Embedding = Tensor | NativeLinear | GroupedLinear
"""[vocab, hidden]: floats, in 16 bits if that loses nothing; or a matrix whose rows are read, perhaps the head itself."""
_NO_TEAM = nullcontext()
_growing = fork_safe(threading.Lock())  # while any model's rotary table grows


def resolve_kv_dtype(kv_dtype: str | torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of keys and values for a model that computes in `dtype`. kv_dtype: "auto", a name or a dtype.

    Raises ValueError for anything but the model's own dtype and bfloat16.
    """
    own = str(dtype).removeprefix("torch.")
    name = str(kv_dtype).removeprefix("torch.")
    if name in ("auto", own):
        return dtype
    if name == "bfloat16":
        return torch.bfloat16
    raise ValueError(f"kv_dtype must be auto ({own}, which this model computes in) or bfloat16, got {name!r}")


class LayerSkipModel:
    """A model whose layers can be run in ranges. Made by `load_model` or `from_transformers`.

    config, generation_config: transformers' own. name: hub name or path, used to find the checkpoint's default setting.
    num_layers, hidden_size, vocab_size, num_heads, num_kv_heads, head_dim: sizes.
    num_loops, loop_layers: how often a looped model runs its layers, and how many there are; `num_layers` is their product,
        and layer l of loop r has number r * loop_layers + l. Elsewhere 1 and `num_layers`. gate: float32 [hidden + 1], a
        looped checkpoint's own judge of when to stop, its bias last; only reported.
    max_positions: context length in tokens. sliding_windows: of each layer, as in `DecoderLayer`.
    dtype: of the arithmetic and the hidden states. kv_dtype: of keys and values (`with_kv_dtype`).
    weights_dtype: of the weights as they were loaded. On a CPU, bfloat16 weights are computed with in float32. For weights
        rounded to 8 or 4 bits it is `dtype`.
    device: of the embedding, and of hidden states. layer_devices: of each layer's weights and its part of a KV cache.
        head_device: of the last norm and the head.
    layers, final_norm, head: the weights. The layers of all loops are the same objects; `loop` has each once.
    draft_head: that drafts are chosen with; the head, or a copy of it in 8 bits.
    rotary: the rotary table, which `prepare` may replace by a longer one. With interleaved heads it is complex,
        [positions, 1, head_dim / 2]; pairs that do not rotate have a factor of 1. Otherwise it is real,
        [positions, 1, 2, 2, r / 2], where the first r numbers of a head rotate. It holds, for both halves of them, the
        factors of the half's own numbers (cos, cos) and then those of the other half's (-sin, sin).
    drafters: copies of it with weights in fewer bits, by bits, which drafts may be made with (`draft_weights`).
    draft_vocabulary: the tokens that drafts may choose, besides those of their text; None for all (`with_draft_vocabulary`).
    adapters: by exit layer (`with_adapters`). steering: what the steered ones among them share, None without.
    backend: what runs the layers (`with_backend`).
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        dtype: torch.dtype,
        weights_dtype: torch.dtype | None = None,
        embedding: Embedding,
        layers: Sequence[DecoderLayer],
        final_norm: RMSNorm,
        head: Linear,
        draft_head: Linear | None = None,
        inv_freq: Tensor,
        rotary_scaling: float,
        generation_config: GenerationConfig,
        name: str | None = None,
        num_loops: int = 1,
        gate: Tensor | None = None,
    ) -> None:
        self.config = config
        self.generation_config = generation_config
        self.name = name
        self.adapters: Mapping[int, LeanAdapter] = {}
        self.steering: Steering | None = None
        self.draft_vocabulary: DraftTokens | None = None
        self.num_loops, self.loop_layers, self.gate = num_loops, len(layers), gate
        self.num_layers = num_loops * len(layers)
        self.hidden_size = config.hidden_size
        self.max_positions = family_of(config).max_positions(config)
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = head_dim_of(config)
        self.dtype = self.kv_dtype = dtype
        self.weights_dtype = dtype if weights_dtype is None else weights_dtype
        self.device = embedding.device if isinstance(embedding, Tensor) else torch.device("cpu")
        self._embedding = embedding
        self.final_norm = final_norm
        self.head = head
        self.draft_head = head if draft_head is None else draft_head
        self._inv_freq = inv_freq  # float32 [head_dim / 2]; shorter where only the first part of a head rotates
        self._rotary_scaling = rotary_scaling
        self.rotary = torch.empty(0, device="cpu")
        self._interleaved = layers[0].interleaved
        self.sliding_windows = tuple(layer.sliding_window for layer in layers) * num_loops
        self.layer_devices, self.head_device = (self.device,) * self.num_layers, self.device
        self._intermediate_size = int(config.intermediate_size)
        self.vocab_size = embedding.shape[0]
        self.drafters: dict[int, LayerSkipModel] = {}
        self._set_layers(layers)

    def _set_layers(self, loop: Sequence[DecoderLayer]) -> None:
        self.loop = tuple(loop)
        self.layers: Sequence[DecoderLayer] = self.loop * self.num_loops
        layers = self.layers
        self.operators = OperatorLayers(
            layers,
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            device=self.device,
        )
        self.backend: LayerBackend = self.operators
        if NativeLayers.possible(layers):
            self.backend = NativeLayers(
                layers,
                hidden_size=self.hidden_size,
                heads=self.num_heads,
                kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                eps=self.config.rms_norm_eps,
            )

    @property
    def kernels(self) -> str | None:
        """Which variant of our own kernels runs the layers ("avx2", ...); None where PyTorch's operators do."""
        return self.backend.variant

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's weights as stored, which a pass through the layer reads; the mean over layers."""
        linears = sum(linear.num_bytes for layer in self.loop for linear in layer.linears)
        return linears // self.loop_layers + 2 * self.hidden_size * self.dtype.itemsize

    @property
    def layer_weights(self) -> int:
        """Number of weights in the matrices of one layer, however they are stored."""
        heads = 2 * self.num_heads + 2 * self.num_kv_heads  # query and output, key and value
        return self.hidden_size * (heads * self.head_dim + 3 * self._intermediate_size)

    @property
    def head_bytes(self) -> int:
        """Bytes of norm and head as stored."""
        return self.head.num_bytes + self.hidden_size * self.dtype.itemsize

    @property
    def draft_head_bytes(self) -> int:
        """Bytes of norm and draft head as stored, as far as drafts read it."""
        return self.drafting_head.num_bytes + self.hidden_size * self.dtype.itemsize

    @property
    def drafting_head(self) -> Linear:
        """The head that drafts are chosen with: the draft head, or what a draft vocabulary takes of it."""
        vocabulary = self.draft_vocabulary
        return self.draft_head if vocabulary is None else vocabulary.head(self.draft_head)

    def prepare(self, max_length: int) -> None:
        """Make the rotary table long enough for positions below `max_length`; allocates only when it grows.

        As in transformers, angles and their sine and cosine are computed in float32 whatever the model's dtype.
        """
        for drafter in [*self.drafters.values()]:
            drafter.prepare(max_length)
        if self.rotary.shape[0] >= max_length:
            return
        with _growing, torch.inference_mode(False):
            if self.rotary.shape[0] >= max_length:  # another thread was faster, perhaps with a longer table
                return
            length = min(max(max_length, 2 * self.rotary.shape[0]), max(self.max_positions, max_length))
            positions = torch.arange(length, dtype=torch.float32, device=self.device)
            angles = torch.outer(positions, self._inv_freq)
            wide = torch.float64 if self.dtype == torch.float64 else torch.float32
            cos = (angles.cos() * self._rotary_scaling).to(wide)
            sin = (angles.sin() * self._rotary_scaling).to(wide)
            if self._interleaved:
                still = self.head_dim // 2 - cos.shape[1]  # pairs that do not rotate
                self.rotary = torch.complex(F.pad(cos, (0, still), value=1.0), F.pad(sin, (0, still))).unsqueeze(1)
            else:
                self.rotary = torch.stack((cos, cos, -sin, sin), dim=1).unflatten(1, (2, 2)).unsqueeze(1)

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens: int64 [rows]. Returns [rows, hidden]."""
        table = self._embedding
        return (F.embedding(tokens, table) if isinstance(table, Tensor) else table.rows(tokens)).to(self.dtype)

    def run_layers(
        self, hidden: Tensor, start: int, stop: int, cache: KVCache | CacheRows, capture: Capture | None = None
    ) -> Tensor:
        """Run layers [start, stop) over the next rows of one sequence or of several, and add the rows to their caches.

        hidden: [rows, hidden], the output after `start` layers (the embedding for 0); it is not changed.
        cache: the cache of the sequence that all rows belong to; or a list of caches, each with its number of rows. Rows
            follow those that the cache holds for these layers, and attend to them and to each other up to themselves.
        capture: called after each layer as capture(layers_done, hidden).
        Returns the hidden state after `stop` layers, [rows, hidden]. Raises ValueError for rows that do not fit.
        """
        return self.backend.run(hidden, start, stop, cache_rows(cache, hidden.shape[0]), self.rotary, capture)

    def steps(self) -> NativeForward | None:
        """Whole passes in single calls of our own kernels; None where they don't run all of the model."""
        embedding, native, head, draft_head = self._embedding, self.backend, self.head, self.drafting_head
        if not isinstance(native, NativeLayers) or self.final_norm.factors is None or self.dtype != torch.float32:
            return None
        if not (isinstance(head, NativeLinear) and isinstance(draft_head, NativeLinear)):
            return None
        if isinstance(embedding, GroupedLinear) or (isinstance(embedding, Tensor) and not embedding.is_contiguous()):
            return None
        return NativeForward(
            native,
            embedding=embedding,
            norm=self.final_norm,
            head=head,
            draft_head=draft_head,
            rotary=lambda: self.rotary,
            adapters={layer: one for layer, one in self.adapters.items() if one.steering is None},
        )

    def with_backend(
        self,
        backend: LayerBackend,
        layer_devices: Sequence[torch.device],
        head_device: torch.device,
    ) -> LayerSkipModel:
        """Return a model of the same weights, which are on these devices, run by another backend."""
        other = copy.copy(self)
        other.backend, other.layer_devices, other.head_device = backend, tuple(layer_devices), head_device
        return other

    def with_layers(self, layers: Sequence[DecoderLayer], head: Linear) -> LayerSkipModel:
        """Return the same model with other matrices: those of these layers, and this head, for drafts and all else.

        layers: of one loop.
        """
        other = copy.copy(self)
        other.head = other.draft_head = head
        other.adapters, other.steering, other.drafters = {}, None, {}
        other._set_layers(layers)
        return other

    def with_adapters(self, adapters: Mapping[int, LeanAdapter]) -> LayerSkipModel:
        """Return the same model, sharing its weights, with exactly these adapters after its exits."""
        other = copy.copy(self)
        other.adapters = dict(adapters)
        other.steering = next((one.steering for one in adapters.values() if one.steering is not None), None)
        return other

    def with_draft_vocabulary(self, vocabulary: DraftTokens | None) -> LayerSkipModel:
        """Return the same model, sharing its weights, whose drafts may choose these tokens and those of their text."""
        other = copy.copy(self)
        other.draft_vocabulary, other.drafters = vocabulary, {}
        return other

    def with_kv_dtype(self, kv_dtype: str | torch.dtype) -> LayerSkipModel:
        """Return the same model, sharing its weights, that keeps keys and values in this dtype.

        kv_dtype: "auto" or the model's own dtype, which is the default; or "bfloat16", which needs half the memory of float32
        and lets attention read half as much. Rows are rounded once, when they are written. The arithmetic does not change,
        and drafts and verification read the same numbers. Raises ValueError for any other dtype.
        """
        other = copy.copy(self)
        other.kv_dtype = resolve_kv_dtype(kv_dtype, self.dtype)
        return other

    @property
    def row_bits(self) -> dict[int, int]:
        """Bits of rows by the bits of the weights in groups that they meet, the fewest; 32 where rows are not rounded."""
        found: dict[int, int] = {}
        for linear in self._grouped:
            found[linear.bits] = min(row_bits(linear), found.get(linear.bits, 32))
        return dict(sorted(found.items()))

    @property
    def _grouped(self) -> list[GroupedLinear | NativeGroupedLinear]:
        linears = [*(linear for layer in self.loop for linear in layer.linears), self.head]
        return [linear for linear in linears if isinstance(linear, (GroupedLinear, NativeGroupedLinear))]

    def with_rows(self, rows: int) -> LayerSkipModel:
        """Return the same model, sharing its weights, that rounds rows otherwise where they meet weights of 4 to 6 bits.

        rows: 8 bits in groups of 32 numbers, which is the default, or 16. Beside weights of 8 bits rows have 16. The head and
        the copies of weights that drafts are made with stay as they are. Raises ValueError for another number, for a model
        without weights in groups, and for 8 where no row is rounded to 8.
        """
        if rows not in ROW_BITS:
            raise ValueError(f"rows must be {' or '.join(map(str, ROW_BITS))} (bits), got {rows!r}")
        if not self._grouped:
            raise ValueError(
                f"rows={rows} changes nothing: this model has no weights in groups of 4 to 8 bits on a CPU"
            )
        other = copy.copy(self)
        other.head = with_rows(self.head, rows)
        other._set_layers([layer.with_linears(partial(with_rows, rows=rows)) for layer in self.loop])
        if rows == 8 and 8 not in other.row_bits.values():
            raise ValueError(
                "rows=8 changes nothing: it is for weights of 4 to 6 bits, in matrices of 32, 64, ... outputs"
            )
        return other

    def is_steered(self, exit_layer: int) -> bool:
        """Return whether this exit's drafts depend on the row that was verified last."""
        adapter = self.adapters.get(exit_layer)
        return adapter is not None and adapter.steering is not None

    def at_exit(self, hidden: Tensor, exit_layer: int, steering: Tensor | None = None) -> Tensor:
        """Return the states that drafts are chosen from: [rows, hidden] of the exit, through its adapter if any.

        steering: what `self.steering` made of the row that was verified last, for the exits that it steers.
        """
        adapter = self.adapters.get(exit_layer)
        return hidden if adapter is None else adapter(hidden, steering)

    def on_one_team(self) -> AbstractContextManager[None]:
        """Return a context in which this thread's PyTorch operators start no threads of their own, if our kernels run.

        For the engine's rounds, whose operators are small; see `kernels.threads`.
        """
        native = self.kernels is not None or isinstance(self.head, NativeLinear)
        return SingleThreadedOperators() if native else _NO_TEAM

    def logits(self, hidden: Tensor) -> Tensor:
        """norm + head on exactly the rows given: [rows, hidden] -> float32 [rows, vocab], as transformers' generate casts."""
        return self.logits_by(self.head, hidden)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """Logits that drafts are drawn from, for rows of `at_exit`: [rows, hidden] -> float32 [rows, vocab].

        If the head is large and our kernels run, they come from a copy of the head in 8 bits: with a large vocabulary,
        reading the head is most of a draft's cost. A draft may be drawn from any distribution, as long as verification is
        told which. Verification itself uses `logits`.
        """
        return self.logits_by(self.draft_head, hidden)

    def choices(self, hidden: Tensor, detail: Detail = "token") -> Choices:
        """Choose the best token of each row of `logits`; our kernels store no logits, operators make them in pieces."""
        return self.choices_by(self.head, hidden, detail)

    def draft_choices(self, hidden: Tensor, detail: Detail = "token") -> Choices:
        """Choose the best token of each row of `draft_logits`."""
        return self.choices_by(self.draft_head, hidden, detail)

    def logits_by(self, head: Linear, hidden: Tensor) -> Tensor:
        """Norm and a head: [rows, hidden] -> float32 [rows, outputs]."""
        if isinstance(head, NativeLinear):
            return head.of_normalised(self.final_norm, hidden)
        return self._operator_logits(head, hidden.to(self.head_device)).to(self.device)

    def choices_by(self, head: Linear, hidden: Tensor, detail: Detail) -> Choices:
        """Choose the best output of each row of `logits_by`."""
        if isinstance(head, NativeLinear):
            return head.choices_of_normalised(self.final_norm, hidden, detail)
        logits = partial(self._operator_logits, head)
        found = choices_in_pieces(hidden.to(self.head_device), self.vocab_size, logits, detail)
        return Choices(found.tokens.to(self.device), found.numbers.to(self.device))

    def _operator_logits(self, head: Linear, hidden: Tensor) -> Tensor:
        """hidden: on the head's device, and so are the logits."""
        return head(self.final_norm(hidden)).float()
