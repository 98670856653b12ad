"""A Llama's hidden states at its exits, and what training computes of them: dropped layers, sums, weights of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from layerskip_models.training.looped import layers_with_exits, num_loops
from layerskip_models.transfer import to_device

EVALUATION_ROWS = 1024
ALPHA, BLOCK = 0.5, 8  # as in the paper, where alpha from .3 to .7 hardly matters


def draw_keep_mask(rates: Sequence[float], num_samples: int, generator: torch.Generator) -> Tensor:
    """Return which samples run which layers: bool [L, num_samples], False with probability rates[l], independently."""
    uniform = torch.rand(len(rates), num_samples, generator=generator, dtype=torch.float64)
    return uniform >= torch.tensor(rates, dtype=torch.float64)[:, None]


def run_layer(
    layer: torch.nn.Module, hidden: Tensor, position_ids: Tensor, position_embeddings: tuple[Tensor, Tensor]
) -> Tensor:
    """One of transformers' decoder layers, causal and without a cache: hidden, [batch, length, hidden], in and out."""
    # No mask: with the sdpa attention that training asks for, transformers then takes the causal kernel.
    output = layer(
        hidden, attention_mask=None, position_ids=position_ids, use_cache=False, position_embeddings=position_embeddings
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

    exits: of a looped model, counted through all loops.
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
    for index, layer in enumerate([*decoder.layers] * num_loops(model)):
        if index and index % len(decoder.layers) == 0:  # the next loop reads what the exit of the last one does
            hidden = decoder.norm(hidden)
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
    """Sum over rows, float64 [2, exits]: cross-entropy against labels, and agreement with the last layer.

    input_ids, labels: int64 [batch, length]. Logits exist for EVALUATION_ROWS rows of one layer at a time.
    """
    exits = layers_with_exits(model)
    states = exit_hidden_states(model, input_ids, exits)
    sums = torch.zeros(2, len(exits), dtype=torch.float64)
    for start in range(0, labels.numel(), EVALUATION_ROWS):
        chunk, chosen = slice(start, start + EVALUATION_ROWS), None
        for place in reversed(range(len(exits))):
            logits = model.lm_head(model.model.norm(states[exits[place]].flatten(0, 1)[chunk])).float()
            argmax = logits.argmax(-1)
            chosen = argmax if chosen is None else chosen
            sums[0, place] += F.cross_entropy(logits, labels.flatten()[chunk], reduction="sum").item()
            sums[1, place] += (argmax == chosen).sum().item()
    return sums


@torch.no_grad()
def accepted_length_weights(
    losses: Tensor, valid: Tensor, *, arm: str, alpha: float = ALPHA, block: int = BLOCK, mean_one: bool = True
) -> Tensor:
    """Weigh the rows of an exit's loss by what each token is worth for the length of an accepted draft.

    Returns each row's weight, [batch, length], of mean 1 over the valid rows of a sequence; equal where all would be 0.
    Without mean_one they are as in the paper, and with alpha 0 they vanish where no draft is right.
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
    if not mean_one:
        return total.to(losses.dtype)
    weight, count = total.sum(1, keepdim=True), valid.sum(1, keepdim=True)
    return torch.where(weight > 0, total * (count / weight), valid.double()).to(losses.dtype)
