"""Exit adapters as they are trained: small networks between an early exit and the model's own norm and head.

The base model stays as it is. An adapter changes only what an exit says, so layers [0, E), the KV cache and verification
never see it, and the output of the model is its own whatever an adapter does.

    y = x + D (silu(G n) * (U n)),  n = x / rms(x)

x: the hidden state at the exit, h^E; y replaces it before the model's norm and head. The steered form sees more of the row
that was verified last than its token:

    y = x + D (silu(G n) * (U n + S g)),  g = LayerNorm(P [h_1; h_2; h_3])

h_i: the states of the last verified row after a few layers, as they are. g is one for all drafts of a round and shared by
all exits. The norm has no bias, so states of 0 steer nothing. S is zero at the start, so an untrained adapter changes
nothing. The j-th draft of a round is steered by the row j positions before its own, so in training a row is steered by a row
1 to `FARTHEST` positions before it, at random.

Source: SD2 (Berdoz et al.), appendix A.4, and the norm as in its code; with silu in place of the sigmoid, so that our kernels
run it as they run an MLP. There the bias goes into every MLP of a drafter of its own. Here drafts share the model's layers
and its KV cache, so it goes into the adapter alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerskip_models.checkpoints.typed_fields import check_types
from layerskip_models.exits import FORMS, LOW_RANK, STEERED

FARTHEST = 8
"""How far before a draft's row the row that steers it may be, as far as steering is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """What an adapter is and which model it belongs to. ValueError for what cannot be.

    base_model, fingerprint: of the model that it was trained for (`checkpoints.module_folder`). exit_layers: ascending; each
    has weights of its own. rank: width of the gated projection. steering_layers, steering_size: of the steered form, after
    which layers the states that steer are taken, ascending, and how wide their common projection is.
    """

    form: str = LOW_RANK
    hidden_size: int
    exit_layers: tuple[int, ...]
    rank: int
    eps: float = 1e-6
    steering_layers: tuple[int, ...] = ()
    steering_size: int = 0
    base_model: str = ""
    fingerprint: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        if self.form not in FORMS:
            raise ValueError(f"drafts are made with adapters of form {' or '.join(FORMS)}, got {self.form!r}")
        for name, layers in (("exit_layers", self.exit_layers), ("steering_layers", self.steering_layers)):
            if list(layers) != sorted({*layers}) or min(layers, default=1) < 1:
                raise ValueError(f"{name} must be ascending and at least 1, got {list(layers)}")
        if not self.exit_layers or self.rank < 1 or self.hidden_size < 1 or self.eps <= 0:
            raise ValueError("an adapter needs an exit layer, a rank and a hidden_size of at least 1, and eps above 0")
        if self.form == LOW_RANK and (self.steering_layers or self.steering_size):
            raise ValueError("adapters of form low_rank have no steering_layers and no steering_size")
        if self.form == STEERED and (not self.steering_layers or self.steering_size < 1):
            raise ValueError("adapters of form steered need steering_layers and a steering_size of at least 1")


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
        self.gate = nn.Linear(size, rank, bias=False)
        self.up = nn.Linear(size, rank, bias=False)
        self.down = nn.Linear(rank, size, bias=False)
        self.register_buffer("scale", torch.ones((), dtype=torch.float32))
        for linear in (self.gate, self.up):
            nn.init.normal_(linear.weight, std=size**-0.5)
        nn.init.zeros_(self.down.weight)
        self.steer = nn.Linear(config.steering_size, rank, bias=False) if config.form == STEERED else None
        if self.steer is not None:
            nn.init.zeros_(self.steer.weight)

    def forward(self, hidden: Tensor, steering: Tensor | None = None) -> Tensor:
        """hidden: [..., hidden], of the exit. steering: g, [..., steering_size], or None. Returns the shape of hidden."""
        normed = F.rms_norm(hidden, (self.config.hidden_size,), None, self.config.eps)
        up = self.up(normed)
        if steering is not None and self.steer is not None:
            up = up + self.steer(steering)
        return hidden + self.scale * self.down(F.silu(self.gate(normed)) * up)


def steering_layers(num_layers: int) -> tuple[int, ...]:
    """After which layers states are taken: 3, L/2 and L-2, as in SD2; ascending, fewer in a model of few layers."""
    wanted = (3, num_layers // 2, num_layers - 2)
    return tuple(sorted({min(max(layer, 1), num_layers) for layer in wanted}))


class Steering(nn.Module):
    """P and the norm of the states that steer, shared by all exits. layers: after which they are taken, ascending.

    As wide as the hidden states P begins as their sum, as SD2 begins; else with random numbers.
    """

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__()
        self.layers = config.steering_layers
        size, hidden, depths = config.steering_size, config.hidden_size, len(self.layers)
        self.project = nn.Linear(depths * hidden, size, bias=False)
        self.norm = nn.LayerNorm(size, config.eps, bias=False)
        if size == hidden:
            with torch.no_grad():
                self.project.weight.copy_(torch.eye(hidden).repeat(1, depths))

    def forward(self, states: Tensor) -> Tensor:
        """states: [..., depths, hidden], ascending depths. Returns g, [..., steering_size]; of zeros, zeros."""
        steering: Tensor = self.norm(self.project(states.flatten(-2)))
        return steering

    def rows_before(self, states: Tensor, before: Tensor | None = None) -> Tensor:
        """Steer consecutive rows, each by the row before it, as the first draft of a round is steered: g, [rows, size].

        states: [layers of the model, rows, hidden], as all layers put them out. before: the same of the row before them,
        [layers, hidden]; None if there is no such row: nothing steers the first row then.
        """
        slots = [layer - 1 for layer in self.layers]
        chosen = states[slots].transpose(0, 1)
        first = torch.zeros_like(chosen[:1]) if before is None else before[slots].unsqueeze(0)
        return self(torch.cat([first, chosen[:-1]]))


class ExitAdapters(nn.Module):
    """Adapters of all exits of one model. steering: what steers those of the steered form, else None."""

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__()
        self.config = config
        self.exits = nn.ModuleDict({str(layer): ExitAdapter(config) for layer in config.exit_layers})
        self.steering = Steering(config) if config.form == STEERED else None

    def at(self, exit_layer: int) -> ExitAdapter:
        """One exit's adapter. KeyError for a layer that has none."""
        found = self.exits[str(exit_layer)]
        assert isinstance(found, ExitAdapter)
        return found

    @property
    def exit_layers(self) -> Sequence[int]:
        return self.config.exit_layers
