"""Every form of exit adapter that is compared, and the one that the engine does not draft with.

    low_rank        `layerskip_models.exits.adapter`
    steered         `layerskip_models.exits.steering`, with its default width and random numbers at the start
    steered_wide    the same as wide as the hidden states, which begins as their sum, as SD2 begins
    layer           the low-rank form after causal attention of its own, over the exit states of the text so far

Source of the last: a light layer after the exit, Kangaroo (Liu et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from layerskip_models import LayerSkipModel
from layerskip_models.exits.adapter import STEERED, AdapterConfig, ExitAdapter, ExitAdapters
from layerskip_models.exits.steering import STEERING_SIZE, SteeredAdapters, steering_layers
from selfspec.exits.fitting import Outputs
from selfspec.exits.hidden_state_dataset import StatesPlan
from selfspec.exits.sequences import ExitSequence
from selfspec.exits.steered_rows import drawn_distances, exit_outputs
from selfspec.exits.training_texts import TrainingText

FORMS = ("low_rank", "steered", "steered_wide", "layer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The shape of a layer's own attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0


def make_adapters(form: str, config: AdapterConfig, model: LayerSkipModel) -> ExitAdapters:
    """Untrained adapters of this form. config: of low-rank ones."""
    if form in ("steered", "steered_wide"):
        size = STEERING_SIZE if form == "steered" else config.hidden_size
        depths = steering_layers(model.num_layers)
        return SteeredAdapters(replace(config, form=STEERED, steering_layers=depths, steering_size=size))
    if form == "layer":
        rope = getattr(model.config, "rope_parameters", None) or {}
        return LayerAdapters(
            config,
            Attention(
                num_heads=model.num_heads,
                num_kv_heads=model.num_kv_heads,
                head_dim=model.head_dim,
                rope_theta=float(rope.get("rope_theta", 10000.0)),
            ),
        )
    return ExitAdapters(config)


class LayerAdapter(ExitAdapter):
    """One exit's adapter with attention before it."""

    def __init__(self, config: AdapterConfig, shape: Attention) -> None:
        super().__init__(config)
        self.attention = CausalAttention(config.hidden_size, shape)

    def attended(self, hidden: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """hidden: [batch, length, hidden], of the exit. Returns the same shape.

        positions: int64 [batch, length]. mask: bool [batch, length, length], True where a row may attend; None is causal.
        """
        normed = F.rms_norm(hidden, (self.config.hidden_size,), None, self.config.eps)
        adapted: Tensor = self(hidden + self.scale * self.attention(normed, positions, mask))
        return adapted


class LayerAdapters(ExitAdapters):
    """Adapters with attention before them."""

    def __init__(self, config: AdapterConfig, shape: Attention) -> None:
        self.shape = shape
        super().__init__(config)

    def make_adapter(self) -> ExitAdapter:
        return LayerAdapter(self.config, self.shape)


class CausalAttention(nn.Module):
    """Causal attention with rotary positions, its output projection zero at the start."""

    inv_freq: Tensor

    def __init__(self, size: int, shape: Attention) -> None:
        super().__init__()
        dim = shape.head_dim
        self.heads, self.kv_heads = shape.num_heads, shape.num_kv_heads
        self.query = nn.Linear(size, self.heads * dim, bias=False)
        self.key = nn.Linear(size, self.kv_heads * dim, bias=False)
        self.value = nn.Linear(size, self.kv_heads * dim, bias=False)
        self.output = nn.Linear(self.heads * dim, size, bias=False)
        for linear in (self.query, self.key, self.value):
            nn.init.normal_(linear.weight, std=size**-0.5)
        nn.init.zeros_(self.output.weight)
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        self.register_buffer("inv_freq", shape.rope_theta**-exponents, persistent=False)

    def forward(self, normed: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """See `LayerAdapter.attended`; normed: [batch, length, hidden]."""
        angles = positions.unsqueeze(-1).float() * self.inv_freq  # [batch, length, dim / 2]
        angles = torch.cat([angles, angles], dim=-1).unsqueeze(1)
        cos, sin = angles.cos().to(normed.dtype), angles.sin().to(normed.dtype)
        query = rearrange(self.query(normed), "b n (h d) -> b h n d", h=self.heads)
        key = rearrange(self.key(normed), "b n (h d) -> b h n d", h=self.kv_heads)
        value = rearrange(self.value(normed), "b n (h d) -> b h n d", h=self.kv_heads)
        attended = F.scaled_dot_product_attention(
            _rotate(query, cos, sin),
            _rotate(key, cos, sin),
            value,
            attn_mask=None if mask is None else mask.unsqueeze(1),
            is_causal=mask is None,
            enable_gqa=self.heads != self.kv_heads,
        )
        return self.output(rearrange(attended, "b h n d -> b n (h d)"))


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin


class EveryRow(StatesPlan):
    """All rows of a text are kept: steering reads rows before those with a loss, and attention reads all."""

    def rows(self, text: TrainingText) -> Tensor:
        return torch.arange(len(text.tokens) - 1)


def plan_for_forms(adapters: Sequence[ExitAdapters], model: LayerSkipModel, dtype: torch.dtype) -> EveryRow:
    """What adapters of all these kinds need, of one model."""
    depths = {model.num_layers}
    for one in adapters:
        depths |= {*one.exit_layers, *one.config.steering_layers}
    return EveryRow(depths=tuple(sorted(depths)), dtype=dtype)


def attention_mask(sequence: ExitSequence) -> Tensor:
    """bool [1, rows, rows]: causal, and within one text."""
    same = sequence.texts.unsqueeze(0) == sequence.texts.unsqueeze(1)
    return same.tril().unsqueeze(0)


def adapted_states(
    adapters: ExitAdapters, sequence: ExitSequence, depths: Sequence[int], rows: Tensor, distance: Tensor
) -> list[Tensor]:
    """What replaces each exit's states at these rows, float32 [n, hidden] for each exit.

    depths: of the sequence's states. distance: int64 [n], how far before each row the row is that steers it.
    """
    if not isinstance(adapters, LayerAdapters):
        return exit_outputs(adapters, sequence, depths, rows, distance)
    found: list[Tensor] = []
    for layer in adapters.exit_layers:
        adapter = adapters.at(layer)
        assert isinstance(adapter, LayerAdapter)
        hidden = sequence.states[:, depths.index(layer)].float().unsqueeze(0)
        positions = sequence.positions.unsqueeze(0)
        found.append(adapter.attended(hidden, positions, attention_mask(sequence))[0, rows])
    return found


def training_outputs(adapters: ExitAdapters, depths: Sequence[int]) -> Outputs:
    """For `selfspec.exits.fitting.fit`: each row steered by a row at a random distance."""

    def outputs(sequence: ExitSequence, rows: Tensor, draw: np.random.Generator) -> list[Tensor]:
        return adapted_states(adapters, sequence, depths, rows, drawn_distances(rows, draw))

    return outputs
