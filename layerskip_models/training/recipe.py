"""The LayerSkip training recipe as functions: layer dropout, exit-loss weights, curricula, hidden states at exits.

Layers are numbered l = 0..L-1 as in the paper; the exit of layer l reads the hidden state after l + 1 layers, so
exit_layer E of the decoding engine is l = E - 1. Steps are t = 0..T-1.

Source: Elhoushi et al. 2024, "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding", section 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from layerskip_models.transfer import to_device

DROPOUT_TIMES = ("continual", "scratch")
CURRICULA = ("rotational", "gradual", "all", "none")
EXIT_WEIGHTS = ("published", "uniform")
EVALUATION_ROWS = 1024
ARMS = ("uniform", "cumulative", "full")
ALPHA, BLOCK = 0.5, 8  # as in the paper, where alpha from .3 to .7 hardly matters


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


def draw_keep_mask(rates: Sequence[float], num_samples: int, generator: torch.Generator) -> Tensor:
    """Return which samples run which layers: bool [L, num_samples], False with probability rates[l], independently."""
    uniform = torch.rand(len(rates), num_samples, generator=generator, dtype=torch.float64)
    return uniform >= torch.tensor(rates, dtype=torch.float64)[:, None]


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
        raise ValueError(
            f"exit_weights must be one of {', '.join(EXIT_WEIGHTS)} or {num_layers} numbers, got {weights!r}"
        )
    if len(weights) != num_layers:
        raise ValueError(
            f"exit_weights must have one number per layer ({num_layers}), the last layer last; got {len(weights)}"
        )
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


def run_layer(
    layer: torch.nn.Module, hidden: Tensor, position_ids: Tensor, position_embeddings: tuple[Tensor, Tensor]
) -> Tensor:
    """One of transformers' decoder layers, causal and without a cache: hidden, [batch, length, hidden], in and out."""
    # No mask: with the sdpa attention that training asks for, transformers then takes the causal kernel.
    output = layer(
        hidden,
        attention_mask=None,
        position_ids=position_ids,
        use_cache=False,
        position_embeddings=position_embeddings,
    )
    return output[0] if isinstance(output, tuple) else output


def exit_hidden_states(
    model: LlamaForCausalLM,
    input_ids: Tensor,
    exits: Iterable[int],
    keep: Tensor | None = None,
    run: Callable[[torch.nn.Module, Tensor, Tensor, tuple[Tensor, Tensor]], Tensor] = run_layer,
) -> dict[int, Tensor]:
    """Hidden states after the named layers, through transformers' own decoder layers: layer -> [batch, length, hidden].

    input_ids: int64 [batch, length], attended causally, no padding.
    keep: bool [L, batch] on the CPU; a sample whose entry is False passes the layer unchanged (x + 0 * f(x), without
    rescaling), and a layer that no sample keeps is not computed at all. None keeps everything.
    run: run_layer, or a compiled run_layer.
    """
    wanted = set(exits)
    decoder = model.model
    hidden = decoder.embed_tokens(input_ids)  # [batch, length, hidden]
    position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    position_embeddings = decoder.rotary_emb(hidden, position_ids)
    states: dict[int, Tensor] = {}
    for index, layer in enumerate(decoder.layers):
        kept = None if keep is None or bool(keep[index].all()) else keep[index].nonzero()[:, 0]
        if kept is None:
            hidden = run(layer, hidden, position_ids, position_embeddings)
        elif len(kept):
            rows = to_device(kept, hidden.device)
            output = run(layer, hidden[rows], position_ids, position_embeddings)
            hidden = hidden.index_copy(0, rows, output.to(hidden.dtype))
        if index in wanted:
            states[index] = hidden
    return states


@torch.no_grad()
def exit_sums(model: LlamaForCausalLM, input_ids: Tensor, labels: Tensor) -> Tensor:
    """Sum over rows, float64 [2, L]: cross-entropy against labels, and agreement with the last layer.

    input_ids, labels: int64 [batch, length]. Logits exist for EVALUATION_ROWS rows of one layer at a time.
    """
    num_layers = len(model.model.layers)
    states = exit_hidden_states(model, input_ids, range(num_layers))
    sums = torch.zeros(2, num_layers, dtype=torch.float64)
    for start in range(0, labels.numel(), EVALUATION_ROWS):
        chunk, chosen = slice(start, start + EVALUATION_ROWS), None
        for layer in reversed(range(num_layers)):
            logits = model.lm_head(model.model.norm(states[layer].flatten(0, 1)[chunk])).float()
            argmax = logits.argmax(-1)
            chosen = argmax if chosen is None else chosen
            sums[0, layer] += F.cross_entropy(logits, labels.flatten()[chunk], reduction="sum").item()
            sums[1, layer] += (argmax == chosen).sum().item()
    return sums


@torch.no_grad()
def accepted_length_weights(
    losses: Tensor, valid: Tensor, *, arm: str, alpha: float = ALPHA, block: int = BLOCK
) -> Tensor:
    """Weigh the rows of an exit's loss by what each token is worth for the length of an accepted draft.

    Returns each row's weight, [batch, length], of mean 1 over the valid rows of a sequence; equal where all would be 0.
    Source: Wu et al. 2026, "D-PACE", equations 3 to 9 and section 5.2 ("cumulative-only"). Deviation: there drafts start at
    chosen anchors. An exit may start one at any row, so a row's weight is the sum over all drafts that contain it: the
    gradient of the accepted length averaged over all starts.

    losses: [batch, length], -log q of each row's label. valid: bool, the same shape; other rows get 0 and end a draft.
    arm: "uniform" is 1. With q~ = (1 - alpha) q + alpha and P_m = q~_s .. q~_m, for the draft of `block` rows from row s,
        "cumulative" gives row j P_j, and "full" (equation 8) P_j + P_(j+1) + ..., the gradient of its accepted length.
    """
    if arm == "uniform":
        return valid.to(losses.dtype)
    smoothed = torch.where(valid, (1 - alpha) * torch.exp(-losses.double()) + alpha, 0.0)
    drafts = F.pad(smoothed, (0, block - 1)).unfold(1, block, 1).cumprod(-1)  # [batch, start, place]
    if arm == "full":
        drafts = drafts.flip(-1).cumsum(-1).flip(-1)
    total = torch.zeros_like(smoothed)
    for place in range(min(block, losses.shape[1])):
        total[:, place:] += drafts[:, : losses.shape[1] - place, place]
    weight, count = total.sum(1, keepdim=True), valid.sum(1, keepdim=True)
    return torch.where(weight > 0, total * (count / weight), valid.double()).to(losses.dtype)
