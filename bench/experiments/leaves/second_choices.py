"""What second choices would add: at a draft that the model rejects, how often is the exit's second choice the model's token?

Verification gives that token anyway. But were the second choice verified beside the draft, as a leaf behind the drafts before
it, its row would give one token more. A leaf's row goes through the first layers with the last draft's, whose weights are
read then, and through the others with all rows. So its price is that of a row, and it gains a token where the draft beside it
is rejected and it is right. Whether that pays is replayed from recorded rounds, without a tree in the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.datasets import EncodedPrompt
from bench.engines.own import run_afresh
from layerskip_models import LayerSkipModel
from layerskip_models.kv_cache import KVCache
from layerskip_models.prefill import prefill
from policies import CostModel, RoundRecord, cost_of_round
from selfspec import SelfSpecGenerator


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafRound:
    """A round, and what a leaf could have brought it.

    cost: of the round. exit_layer: None where no leaf could ride along: nothing was drafted, or no last row had to catch up.
    confidences: of the drafts. rejected: the number of the first rejected draft, from 0, None if all were accepted.
    second_right: whether the exit's second choice there is the model's token.
    """

    tokens: int
    cost: float
    exit_layer: int | None
    confidences: tuple[float, ...] = ()
    rejected: int | None = None
    second_right: bool = False


def leaf_rounds(
    generator: SelfSpecGenerator, prompt: EncodedPrompt, max_new_tokens: int, policy: str, cost: CostModel
) -> list[LeafRound]:
    """The rounds of one greedy text with a policy that asks for confidences."""
    result = run_afresh(generator, policy, prompt.ids, max_new_tokens, trace=True)
    assert result.trace is not None
    text = result.sequences[0]
    second = _second_choices(generator.model, text, {r.exit_layer for r in result.trace if r.exit_layer is not None})
    return [_leaf_round(record, text, second, cost) for record in result.trace]


def _second_choices(model: LayerSkipModel, text: Tensor, layers: set[int]) -> dict[int, list[int]]:
    """The second choice at each of these exits after every token but the last."""
    states: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def keep(first: int, layers_done: int, hidden: Tensor) -> None:
        if layers_done in states:
            states[layers_done].append(hidden.clone())

    with torch.inference_mode():
        ids = text[:-1].to(model.device)
        prefill(model, ids, KVCache(model, ids.numel()), capture=keep)
        return {
            layer: model.draft_logits(model.at_exit(torch.cat(rows), layer)).topk(2, dim=-1).indices[:, 1].tolist()
            for layer, rows in states.items()
        }


def _leaf_round(record: RoundRecord, text: Tensor, second: dict[int, list[int]], cost: CostModel) -> LeafRound:
    tokens, seconds = len(record.tokens), cost_of_round(record, cost)
    layer = record.exit_layer
    if layer is None or record.num_tried or not record.num_drafted or record.stop_cause == "before_draw":
        return LeafRound(tokens=tokens, cost=seconds, exit_layer=None)
    rejected, right = None, False
    if record.num_accepted < record.num_drafted:
        rejected = record.num_accepted
        row = record.num_committed_before - 1 + rejected  # what the exit said after this token
        right = second[layer][row] == int(text[row + 1])
    return LeafRound(
        tokens=tokens,
        cost=seconds,
        exit_layer=layer,
        confidences=(record.confidences or ())[: record.num_drafted],
        rejected=rejected,
        second_right=right,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafGain:
    """Of giving a leaf to each round's least confident draft below a bound: per round, and the gain in tokens per cost."""

    leaves: float
    right: float
    gain: float


def leaf_gain(rounds: Sequence[LeafRound], below: float, cost: CostModel) -> LeafGain:
    """below: the confidence from which on a draft gets no leaf."""
    tokens = sum(found.tokens for found in rounds)
    seconds = sum(found.cost for found in rounds)
    leaves = right = 0
    dearer = 0.0
    for found in rounds:
        if found.exit_layer is None or not found.confidences or min(found.confidences) >= below:
            continue
        place = found.confidences.index(min(found.confidences))
        leaves += 1
        right += found.rejected == place and found.second_right
        drafts, share = len(found.confidences), found.exit_layer / cost.num_layers
        with_last = cost.copying(0, 1, 1) - cost.copying(0, 0, 0)
        with_all = cost.copying(0, drafts + 1, drafts + 1) - cost.copying(0, drafts, drafts)
        dearer += share * with_last + (1 - share) * with_all
    gain = (tokens + right) / (seconds + dearer) / (tokens / seconds) - 1 if tokens else 0.0
    return LeafGain(leaves=leaves / len(rounds), right=right / len(rounds), gain=gain)
