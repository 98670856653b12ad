"""Adapters of any form on the model's own text: where each exit agrees, and what fixed drafts would have made of that.

The form that the engine does not draft with is judged here as well: all by their trained networks, on hidden states of a text
that the model wrote itself. While drafts are accepted they are that text, so the replay is what decoding would have done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.experiments.exit_adapters.other_forms import adapted_states
from layerskip_models import LayerSkipModel
from layerskip_models.exits.adapter import STEERED, ExitAdapters
from layerskip_models.exits.steering import FARTHEST
from policies import RoundRecord, draft_passes
from selfspec import SelfSpecGenerator
from selfspec.exits.fitting import states_at
from selfspec.exits.frozen_head import FrozenHead
from selfspec.exits.sequences import ExitSequence
from selfspec.exits.training_texts import TrainingText

LENGTHS = tuple(range(1, 9))
"""Drafts a round of the replayed settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Where an exit says what the model says, text by text.

    hits: bool [places, rows] of each text. Row i is that of the i-th new token; place j is that of the (j + 1)-th draft of a
    round, one place for all where an exit says the same at each.
    """

    exit_layer: int
    hits: tuple[Tensor, ...]

    @property
    def share(self) -> float:
        """Of the rows, at the first place."""
        return float(torch.cat([hits[0] for hits in self.hits]).float().mean())


def own_texts(generator: SelfSpecGenerator, prompts: Iterable[Tensor], max_new_tokens: int) -> list[TrainingText]:
    """The model's greedy continuations of these prompts, int64 [n] each; EOS does not end them."""
    texts = []
    for prompt in prompts:
        result = generator.generate(
            prompt, max_new_tokens=max_new_tokens, policy="ar", do_sample=False, eos_token_id=[]
        )
        tokens = result.sequences[0].tolist()
        texts.append(TrainingText(tokens, [(prompt.numel() + 1, len(tokens))], own=True))
    return texts


@torch.no_grad()
def agreements(
    adapters: ExitAdapters | None,
    layers: Sequence[int],
    sequences: Sequence[ExitSequence],
    depths: Sequence[int],
    head: FrozenHead,
) -> list[Agreement]:
    """Of every exit, with these adapters or bare. depths: of the sequences' states; the last is the model's last layer."""
    places = range(FARTHEST if adapters is not None and adapters.config.form == STEERED else 1)
    found: list[list[Tensor]] = [[] for _ in layers]
    for sequence in sequences:
        rows = sequence.scored_rows()
        by_place: list[list[Tensor]] = []
        for place in places:
            if adapters is None:
                states = [states_at(sequence, depths, layer, rows).float() for layer in layers]
            else:
                states = adapted_states(adapters, sequence, depths, rows, torch.full_like(rows, place + 1))
            by_place.append([_tokens(head, hidden) == sequence.labels[rows] for hidden in states])
        for hits, of_exit in zip(found, zip(*by_place)):
            hits.append(torch.stack(of_exit))
    return [Agreement(exit_layer=layer, hits=tuple(hits)) for layer, hits in zip(layers, found)]


def _tokens(head: FrozenHead, states: Tensor) -> Tensor:
    return torch.cat([head.logits(states[chunk]).argmax(dim=-1) for chunk in head.chunks(len(states))])


def replayed_gain(agreement: Agreement, length: int, num_layers: int, adapter_layers: float) -> float:
    """Tokens per layer over plain decoding's, of rounds of `length` drafts. adapter_layers: of an adapter, in layers."""
    tokens = cost = 0.0
    for hits in agreement.hits:
        places, rows = hits.shape
        done = 0
        while done < rows:
            drafts = min(length, rows - done - 1)
            accepted = 0
            while accepted < drafts and hits[min(accepted, places - 1), done + accepted]:
                accepted += 1
            tokens += accepted + 1
            cost += drafts * (agreement.exit_layer + adapter_layers) + num_layers
            done += accepted + 1
    return tokens / cost * num_layers


def accepted_from_all_rows(agreement: Agreement, length: int) -> float:
    """Mean number of accepted tokens when a draft of `length` starts at every row with enough rows after it."""
    accepted = drafts = 0
    for hits in agreement.hits:
        starts = hits.shape[1] - length + 1
        holding = torch.ones(max(starts, 0), dtype=torch.bool)
        drafts += len(holding)
        for place in range(length if starts > 0 else 0):
            holding &= hits[min(place, len(hits) - 1), place : place + starts]
            accepted += int(holding.sum())
    return accepted / max(drafts, 1)


def best_length(agreement: Agreement, num_layers: int, adapter_layers: float) -> tuple[int, float]:
    """The number of drafts with most tokens per layer, and `replayed_gain` of it."""
    gains = {length: replayed_gain(agreement, length, num_layers, adapter_layers) for length in LENGTHS}
    best = max(gains, key=lambda length: gains[length])
    return best, gains[best]


def gain_of_rounds(trace: Iterable[RoundRecord], num_layers: int, adapter_layers: Mapping[int, float]) -> float:
    """Tokens per layer over plain decoding's, of rounds that were really run; each look pays its exit's adapter."""
    tokens = cost = 0.0
    for record in trace:
        tokens += len(record.tokens)
        passes, _ = draft_passes(record)
        cost += record.loaded_layers + passes * adapter_layers.get(record.exit_layer or 0, 0.0)
    return tokens / cost * num_layers


def adapter_layers(adapters: ExitAdapters, model: LayerSkipModel) -> float:
    """What a draft step reads of one exit's adapter, in layers of the model, by numbers of weights.

    The shared projection of steering states is left out: it is computed once a round.
    """
    exit_layer = adapters.config.exit_layers[0]
    numbers = sum(parameter.numel() for parameter in adapters.at(exit_layer).parameters())
    return numbers / model.layer_weights
