"""The LayerSkip training recipe as functions: layer dropout, exit-loss weights, curricula, early-exit loss.

Layers are numbered l = 0..L-1 as in the paper; the exit of layer l reads the hidden state after l + 1 layers, so
exit_layer E of the decoding engine is l = E - 1. Steps are t = 0..T-1.

Source: Elhoushi et al. 2024, "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding", section 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from transformers import LlamaForCausalLM

from layerskip_models.transfer import to_device

DROPOUT_TIMES = ("continual", "scratch")
CURRICULA = ("rotational", "gradual", "all", "none")
EXIT_WEIGHTS = ("published", "uniform")
IGNORED = -100  # label of rows without a loss


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
    """Which samples run which layers: bool [L, num_samples], False with probability rates[l], independently."""
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
    custom = [float(weight) for weight in weights]
    if len(custom) != num_layers:
        raise ValueError(
            f"exit_weights must have one number per layer ({num_layers}), the last layer last; got {len(custom)}"
        )
    if not all(weight >= 0 and math.isfinite(weight) for weight in custom) or custom[-1] == 0:
        raise ValueError("exit_weights must be finite, at least 0, and above 0 for the last layer")
    return custom


def enabled_exits(curriculum: str, num_layers: int, step: int, num_steps: int, rotation: int = 4) -> list[int]:
    """Layers whose exit has a loss at step t, ascending; the last layer L - 1 is always among them.

    curriculum: "rotational" takes every layer l with l = t (mod rotation), so that each gets its turn once in
    `rotation` steps; "gradual" starts with the last layer and adds the next one below every T / (2 L) steps, so that
    all are enabled from the middle of the training on; "all"; "none" (the last layer only: plain training).
    Source: LayerSkip section 4.1.2.
    """
    last = num_layers - 1
    if curriculum == "rotational":
        chosen = {layer for layer in range(num_layers) if layer % rotation == step % rotation}
    elif curriculum == "gradual":
        num_added = step * 2 * num_layers // max(num_steps, 1)
        chosen = set(range(max(last - num_added, 0), num_layers))
    elif curriculum == "all":
        chosen = set(range(num_layers))
    elif curriculum == "none":
        chosen = set()
    else:
        raise ValueError(f"curriculum must be one of {', '.join(CURRICULA)}, got {curriculum!r}")
    return sorted(chosen | {last})


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


def early_exit_backward(
    model: LlamaForCausalLM,
    states: Mapping[int, Tensor],
    labels: Tensor | Mapping[int, Tensor],
    weights: Mapping[int, float],
    *,
    scale: float = 1.0,
    chunk_rows: int = 2048,
    unwanted: Tensor | None = None,
    row_weights: Callable[[Tensor, Tensor], Tensor] | None = None,
    drafted: Tensor | None = None,
) -> dict[int, Tensor]:
    """Accumulate the gradient of scale * sum_l weights[l] * loss(l) into the parameters; return each exit's mean loss.

    loss(l) is the mean cross-entropy of lm_head(norm(states[l])) against labels, int64 [batch, length], one tensor or one
    per layer; rows labelled IGNORED are left out. Where unwanted, bool [batch, length], is True the row's loss is
    -log(1 - p(label)) instead: the label is a token that the model should not say.
    row_weights: of exits below the last layer. Called with a chunk's losses [sequences, length] and a bool tensor of that
        shape, it returns the rows' weights, whose mean should be 1; the bool tensor says which rows a draft may contain.
        A labelled row that no draft contains keeps a weight of 1. The losses returned are without these weights.
    drafted: bool [batch, length], for row_weights: False where no draft goes on, such as rows between two documents. Rows
        that are IGNORED or unwanted are left out in any case.
    states: layer -> [batch, length, hidden], still attached to the decoder's graph, which is consumed.
    Logits exist for one exit and chunk_rows rows at a time: each chunk is taken back to its hidden state at once, and
    the decoder's own backward pass then runs a single time from the gradients gathered at the exits. With row_weights
    a chunk holds whole sequences: at least one, however small chunk_rows is.
    """
    flat_unwanted = None if unwanted is None else rearrange(unwanted, "batch length -> (batch length)")
    may_draft = True if drafted is None else rearrange(drafted, "batch length -> (batch length)")
    if flat_unwanted is not None:
        may_draft = ~flat_unwanted & may_draft
    last = len(model.model.layers) - 1
    losses: dict[int, Tensor] = {}
    roots, gradients = [], []
    for layer, weight in weights.items():
        state = states[layer]
        flat = rearrange(state.detach(), "batch length hidden -> (batch length) hidden")
        layer_labels = labels if isinstance(labels, Tensor) else labels[layer]
        flat_labels = rearrange(layer_labels, "batch length -> (batch length)")
        labelled = flat_labels != IGNORED
        in_drafts = labelled & may_draft
        num_rows = labelled.sum().clamp(min=1)
        total = torch.zeros((), device=state.device)
        pieces = []
        length = state.shape[1]
        weigh = None if layer == last else row_weights
        rows_at_once = chunk_rows if weigh is None else max(chunk_rows // length, 1) * length
        for start in range(0, len(flat), rows_at_once):
            chunk = slice(start, start + rows_at_once)
            rows = flat[chunk].requires_grad_()
            logits = model.lm_head(model.model.norm(rows)).float()  # [chunk, vocab]
            losses_of_rows = F.cross_entropy(logits, flat_labels[chunk], reduction="none", ignore_index=IGNORED)
            if flat_unwanted is not None:
                avoided = -torch.log1p(1e-6 - torch.exp(-losses_of_rows))
                losses_of_rows = torch.where(flat_unwanted[chunk], avoided, losses_of_rows)
            total += losses_of_rows.detach().sum() / num_rows
            if weigh is not None:
                of_drafts = in_drafts[chunk]
                by_sequence = weigh(losses_of_rows.detach().view(-1, length), of_drafts.view(-1, length))
                losses_of_rows = losses_of_rows * torch.where(of_drafts, by_sequence.flatten(), 1.0)
            loss = losses_of_rows.sum() / num_rows
            (loss * (weight * scale)).backward()
            assert rows.grad is not None
            pieces.append(rows.grad)
        losses[layer] = total
        roots.append(state)
        gradients.append(torch.cat(pieces).view_as(state))
    torch.autograd.backward(roots, gradients)
    return losses
