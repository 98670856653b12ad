"""Exit adapters as they are trained: small networks between an early exit and the model's own norm and head.

The base model stays as it is. An adapter changes only what an exit says, so layers [0, E), the KV cache and verification
never see it, and the output of the model is its own whatever an adapter does.

Three forms, each with the one before it inside:

    low_rank    y = x + D (silu(G n) * (U n)),  n = x / rms(x)
    steered     y = x + D (silu(G n) * (U n + S g))
    layer       the low-rank form behind causal attention of its own, over the exit states of the text so far

x: the hidden state at the exit, h^E; y takes its place before the model's norm and head. g: hidden states of the row that was
verified last, from a few depths; their first projection is shared by all exits.

Sources: gated low-rank residual and steering, SD2 (appendix A.4), with silu in place of the sigmoid, so that our kernels run
it as they run an MLP; a light layer behind the exit, Kangaroo (Liu et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from layerskip_models.checkpoints.typed_fields import check_types

Form = Literal["low_rank", "steered", "layer"]
FORMS = get_args(Form)
DRAFTED: Form = "low_rank"
"""The form that the engine drafts with; the others can be trained and measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """What an adapter is and which model it belongs to. ValueError for what cannot be.

    base_model, fingerprint: of the model that it was trained for (`checkpoints.fingerprint`). exit_layers: ascending; each
    has weights of its own. rank: width of the gated projection. steering_layers: depths whose states steer, of form
    "steered". steering_size: width of their shared projection. num_heads, num_kv_heads, head_dim, rope_theta: of the
    attention, of form "layer".
    """

    form: Form = "low_rank"
    hidden_size: int
    exit_layers: tuple[int, ...]
    rank: int
    eps: float = 1e-6
    steering_layers: tuple[int, ...] = ()
    steering_size: int = 64
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    rope_theta: float = 10000.0
    base_model: str = ""
    fingerprint: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        if self.form not in FORMS:
            raise ValueError(f"form must be one of {', '.join(FORMS)}, got {self.form!r}")
        if not self.exit_layers or list(self.exit_layers) != sorted({*self.exit_layers}) or self.exit_layers[0] < 1:
            raise ValueError(f"exit_layers must be ascending and at least 1, got {list(self.exit_layers)}")
        if self.rank < 1 or self.hidden_size < 1 or self.steering_size < 1:
            raise ValueError("rank, hidden_size and steering_size must be at least 1")
        if self.eps <= 0:
            raise ValueError(f"eps must be above 0, got {self.eps}")
        if (self.form == "steered") != bool(self.steering_layers):
            raise ValueError("steering_layers belong to form 'steered', which needs them")
        if self.form == "layer":
            if min(self.num_heads, self.num_kv_heads, self.head_dim) < 1 or self.num_heads % self.num_kv_heads:
                raise ValueError("form 'layer' needs num_heads, num_kv_heads that divide them, and head_dim")
            if self.head_dim % 2:
                raise ValueError(f"head_dim must be even, got {self.head_dim}")


class ExitAdapter(nn.Module):
    """One exit's adapter. It changes nothing until it is trained.

    scale: about the root mean square of the exit's hidden states on the training data, a power of two. What is added is in
    its units, so one learning rate suits every exit of every model.
    """

    scale: Tensor

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__()
        self.config = config
        size, rank = config.hidden_size, config.rank
        self.attention = _Attention(config) if config.form == "layer" else None
        self.gate = nn.Linear(size, rank, bias=False)
        self.up = nn.Linear(size, rank, bias=False)
        self.down = nn.Linear(rank, size, bias=False)
        self.steer = nn.Linear(config.steering_size, rank, bias=False) if config.form == "steered" else None
        self.register_buffer("scale", torch.ones((), dtype=torch.float32))
        for linear in (self.gate, self.up):
            nn.init.normal_(linear.weight, std=size**-0.5)
        nn.init.zeros_(self.down.weight)
        if self.steer is not None:
            nn.init.zeros_(self.steer.weight)

    def forward(
        self,
        hidden: Tensor,
        *,
        steering: Tensor | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """hidden: [..., hidden], of the exit. Returns the same shape.

        steering: [..., steering_size], what `Steering` makes of the row verified last; of form "steered".
        positions: int64 [batch, length] and mask: bool [batch, length, length], True where a row may attend; of form
            "layer", whose hidden is [batch, length, hidden]. mask None is causal.
        """
        size, eps = self.config.hidden_size, self.config.eps
        if self.attention is not None:
            assert positions is not None
            attended = self.attention(F.rms_norm(hidden, (size,), None, eps), positions, mask)
            hidden = hidden + self.scale * attended
        normed = F.rms_norm(hidden, (size,), None, eps)
        up = self.up(normed)
        if self.steer is not None:
            assert steering is not None
            up = up + self.steer(steering)
        return hidden + self.scale * self.down(F.silu(self.gate(normed)) * up)


class Steering(nn.Module):
    """The projection of the last verified row's states, shared by all exits: once a round, whatever is drafted."""

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.project = nn.Linear(len(config.steering_layers) * config.hidden_size, config.steering_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """states: [..., depths, hidden], in the order of steering_layers. Returns [..., steering_size]."""
        normed = F.rms_norm(states, states.shape[-1:], None, self.eps)
        return self.project(rearrange(normed, "... depths hidden -> ... (depths hidden)"))


class _Attention(nn.Module):
    """Causal attention with rotary positions, its output projection zero at the start."""

    inv_freq: Tensor

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__()
        size, dim = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.dim = config.num_heads, config.num_kv_heads, dim
        self.query = nn.Linear(size, self.heads * dim, bias=False)
        self.key = nn.Linear(size, self.kv_heads * dim, bias=False)
        self.value = nn.Linear(size, self.kv_heads * dim, bias=False)
        self.output = nn.Linear(self.heads * dim, size, bias=False)
        for linear in (self.query, self.key, self.value):
            nn.init.normal_(linear.weight, std=size**-0.5)
        nn.init.zeros_(self.output.weight)
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        self.register_buffer("inv_freq", config.rope_theta**-exponents, persistent=False)

    def forward(self, normed: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """See `ExitAdapter`; normed: [batch, length, hidden]."""
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


class ExitAdapters(nn.Module):
    """Adapters of all exits of one model, with what they share."""

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__()
        self.config = config
        self.exits = nn.ModuleDict({str(layer): ExitAdapter(config) for layer in config.exit_layers})
        self.steering = Steering(config) if config.form == "steered" else None

    def at(self, exit_layer: int) -> ExitAdapter:
        """Of one exit. KeyError for a layer that has none."""
        found = self.exits[str(exit_layer)]
        assert isinstance(found, ExitAdapter)
        return found

    @property
    def exit_layers(self) -> Sequence[int]:
        return self.config.exit_layers
