"""Forms of exit adapters that the engine does not draft with: steered ones, and ones with attention of their own.

Both begin with the low-rank form (`layerskip_models.exits.adapter`), y = x + D (silu(G n) * (U n)), n = x / rms(x):

    steered     y = x + D (silu(G n) * (U n + S g))
    layer       the low-rank form after causal attention of its own, over the exit states of the text so far

g: hidden states of the row that was verified last, from a few depths; their first projection is shared by all exits. While
drafting, the j-th token of a draft is steered by the row j positions before it. So in training a row is steered by the row
1 to FARTHEST positions before it, at random, and by zeros where its text has no such row.

Sources: steering, SD2 (appendix A.4); a light layer after the exit, Kangaroo (Liu et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from layerskip_models import LayerSkipModel
from layerskip_models.exits.adapter import AdapterConfig, ExitAdapter, ExitAdapters
from selfspec.exits.fitting import Outputs, states_at
from selfspec.exits.hidden_state_dataset import StatesPlan
from selfspec.exits.sequences import ExitSequence
from selfspec.exits.training_texts import TrainingText

FORMS = ("low_rank", "steered", "layer")
FARTHEST = 8
"""How far before a draft's row the row that steers it may be, as far as steering is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The shape of a layer's own attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0


def make_adapters(form: str, config: AdapterConfig, model: LayerSkipModel) -> ExitAdapters:
    """Untrained adapters of this form. Steered ones read the states after 3, L/2 and L-2 layers."""
    if form == "steered":
        count = model.num_layers
        depths = tuple(sorted({min(max(layer, 1), count) for layer in (3, count // 2, count - 2)}))
        return SteeredAdapters(config, depths)
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


class SteeredAdapter(ExitAdapter):
    """One exit's adapter, steered by `Steering`."""

    def __init__(self, config: AdapterConfig, steering_size: int) -> None:
        super().__init__(config)
        self.steer = nn.Linear(steering_size, config.rank, bias=False)
        nn.init.zeros_(self.steer.weight)

    def steered(self, hidden: Tensor, steering: Tensor) -> Tensor:
        """hidden: [..., hidden], of the exit. steering: [..., steering_size]. Returns the shape of hidden."""
        normed = F.rms_norm(hidden, (self.config.hidden_size,), None, self.config.eps)
        return self.add_gated(hidden, normed, self.up(normed) + self.steer(steering))


class Steering(nn.Module):
    """The projection of the last verified row's states, shared by all exits: once a round, whatever is drafted."""

    def __init__(self, hidden_size: int, num_depths: int, steering_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.project = nn.Linear(num_depths * hidden_size, steering_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """states: [..., depths, hidden], ascending depths. Returns [..., steering_size]."""
        normed = F.rms_norm(states, states.shape[-1:], None, self.eps)
        return self.project(rearrange(normed, "... depths hidden -> ... (depths hidden)"))


class SteeredAdapters(ExitAdapters):
    """Adapters that share the projection of the states that steer them. steering_layers: their depths, ascending."""

    def __init__(self, config: AdapterConfig, steering_layers: Sequence[int], steering_size: int = 64) -> None:
        self.steering_layers, self.steering_size = tuple(steering_layers), steering_size
        super().__init__(config)
        self.steering = Steering(config.hidden_size, len(self.steering_layers), steering_size, config.eps)

    def make_adapter(self) -> ExitAdapter:
        return SteeredAdapter(self.config, self.steering_size)

    def steering_of(self, sequence: ExitSequence, depths: Sequence[int], rows: Tensor, distance: Tensor) -> Tensor:
        """Of the rows `distance` (int64 [n]) before these, [n, steering_size]; of zero states where there is no such row."""
        found = rows_before(sequence, rows, distance)
        columns = [depths.index(layer) for layer in self.steering_layers]
        states = sequence.states[found.clamp_min(0)][:, columns].float()
        projected: Tensor = self.steering(states * (found >= 0).view(-1, 1, 1))
        return projected


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
        depths |= {*one.exit_layers, *(one.steering_layers if isinstance(one, SteeredAdapters) else ())}
    return EveryRow(depths=tuple(sorted(depths)), dtype=dtype)


def rows_before(sequence: ExitSequence, rows: Tensor, distance: Tensor) -> Tensor:
    """Indices of the rows `distance` positions before these in the same text; -1 where there is none.

    rows, distance: int64 [n].
    """
    keys = sequence.keys()
    wanted = keys[rows] - distance
    found = torch.searchsorted(keys, wanted)
    found.clamp_(max=len(sequence) - 1)
    there = (keys[found] == wanted) & (distance <= sequence.positions[rows])
    return torch.where(there, found, -1)


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
    found: list[Tensor] = []
    steering = adapters.steering_of(sequence, depths, rows, distance) if isinstance(adapters, SteeredAdapters) else None
    for layer in adapters.exit_layers:
        adapter = adapters.at(layer)
        if isinstance(adapter, LayerAdapter):
            hidden = sequence.states[:, depths.index(layer)].float().unsqueeze(0)
            positions = sequence.positions.unsqueeze(0)
            found.append(adapter.attended(hidden, positions, attention_mask(sequence))[0, rows])
            continue
        hidden = states_at(sequence, depths, layer, rows).float()
        if isinstance(adapter, SteeredAdapter):
            assert steering is not None
            found.append(adapter.steered(hidden, steering))
        else:
            found.append(adapter(hidden))
    return found


def training_outputs(adapters: ExitAdapters, depths: Sequence[int]) -> Outputs:
    """For `selfspec.exits.fitting.fit`: each row steered by a row at a random distance."""

    def outputs(sequence: ExitSequence, rows: Tensor, draw: np.random.Generator) -> list[Tensor]:
        distance = torch.from_numpy(draw.integers(1, FARTHEST + 1, len(rows))).to(rows.device)
        return adapted_states(adapters, sequence, depths, rows, distance)

    return outputs
