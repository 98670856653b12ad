"""The LayerSkip training recipe as functions: rates of layer dropout, exit-loss weights, curricula.

Layers are numbered l = 0..L-1 as in the paper; the exit of layer l reads the hidden state after l + 1 layers, so
exit_layer E of the decoding engine is l = E - 1. Steps are t = 0..T-1.

Source: Elhoushi et al. 2024, "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding", section 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

DROPOUT_TIMES = ("continual", "scratch")
CURRICULA = ("rotational", "gradual", "all", "none")
EXIT_WEIGHTS = ("published", "uniform")
ARMS = ("uniform", "cumulative", "full")


def dropout_depth_scale(num_layers: int) -> list[float]:
    """D(l) for every layer: 0 at the first, 1 at the last, growing exponentially between them; length L.

    Source: LayerSkip section 4.1.1, D(l) = exp(l ln2 / (L - 1)) - 1.
    Raises ValueError when num_layers < 2 (the formula divides by L - 1).
    """
    if num_layers < 2:
        raise ValueError(f"num_layers must be at least 2 for layer dropout, got {num_layers}")
    return [math.exp(layer * math.log(2) / (num_layers - 1)) - 1 for layer in range(num_layers)]


def dropout_time_scale(time: str, step: int, num_steps: int) -> float:
    """S(t) in [0, 1]: 1 when continuing a trained model, growing from 0 to 1 when training from scratch.

    time: "continual" or "scratch". With num_steps = 1, "scratch" gives 0.
    Source: LayerSkip section 4.1.1, S(t) = exp(t ln2 / (T - 1)) - 1.
    """
    if time == "continual":
        return 1.0
    if time != "scratch":
        raise ValueError(f"dropout_time must be one of {', '.join(DROPOUT_TIMES)}, got {time!r}")
    if num_steps <= 1:
        return 0.0
    return math.exp(min(step, num_steps - 1) * math.log(2) / (num_steps - 1)) - 1


def layer_dropout_rates(num_layers: int, p_max: float, time: str, step: int, num_steps: int) -> list[float]:
    """p(l, t) = S(t) D(l) p_max: the chance that a sample skips layer l at step t; length L, each in [0, p_max]."""
    scale = dropout_time_scale(time, step, num_steps) * p_max
    return [scale * depth for depth in dropout_depth_scale(num_layers)]


def exit_loss_weights(
    num_layers: int, weights: str | Sequence[float], *, e_scale: float = 0.2, last_exit_weight: float = 3.0
) -> list[float]:
    """Weight e(l) of each exit's loss before normalisation; length L.

    weights: "published" is e(l) = e_scale * (0 + 1 + ... + l) below the last layer and
    L - 1 + e_scale * (0 + ... + L - 2) for the last. Then e(0) = 0: the exit of the first layer gets no loss.
    "uniform" is 1 below the last layer and last_exit_weight there. A sequence of L numbers is taken as it is.
    Raises ValueError for an unknown name, a wrong length, a negative weight or a last weight of 0.
    Source: LayerSkip section 4.1.2. "uniform" is ours: from scratch at small size the published weights leave the
    first exits almost untrained (docs/training.md has the comparison).
    """
    if weights == "published":
        below = [e_scale * layer * (layer + 1) / 2 for layer in range(num_layers - 1)]
        last = num_layers - 1 + e_scale * (num_layers - 2) * (num_layers - 1) / 2
        return [*below, last]
    if weights == "uniform":
        return [1.0] * (num_layers - 1) + [float(last_exit_weight)]
    if isinstance(weights, str):
        raise ValueError(f"exit_weights must be {', '.join(EXIT_WEIGHTS)} or {num_layers} numbers, got {weights!r}")
    if len(weights) != num_layers:
        raise ValueError(f"exit_weights must have one number per layer ({num_layers}), got {len(weights)}")
    if not all(weight >= 0 and math.isfinite(weight) for weight in weights) or weights[-1] == 0:
        raise ValueError("exit_weights must be finite, at least 0, and above 0 for the last layer")
    return [float(weight) for weight in weights]


def enabled_exits(curriculum: str, num_layers: int, step: int, num_steps: int, rotation: int = 4) -> list[int]:
    """Layers whose exit has a loss at step t, ascending; the last layer L - 1 is always among them.

    curriculum: "rotational" takes every layer l with l = t (mod rotation), so that each gets its turn once in
    `rotation` steps; "gradual" starts with the last layer and adds the next one below every T / (2 L) steps, so that
    all are enabled from the middle of the training on; "all"; "none" (the last layer only: plain training).
    Source: LayerSkip section 4.1.2.
    """
    last, chosen = num_layers - 1, range(0)
    if curriculum == "rotational":
        chosen = range(step % rotation, num_layers, rotation)
    elif curriculum == "gradual":
        chosen = range(max(last - step * 2 * num_layers // max(num_steps, 1), 0), num_layers)
    elif curriculum == "all":
        chosen = range(num_layers)
    elif curriculum != "none":
        raise ValueError(f"curriculum must be one of {', '.join(CURRICULA)}, got {curriculum!r}")
    return sorted({*chosen, last})


def normalised_exit_weights(weights: Sequence[float], exits: Iterable[int]) -> dict[int, float]:
    """Weights of the enabled exits, summing to 1; exits of weight 0 are left out (their logits need no computing)."""
    used = {layer: weights[layer] for layer in exits if weights[layer] > 0}
    total = sum(used.values())
    return {layer: weight / total for layer, weight in used.items()}
