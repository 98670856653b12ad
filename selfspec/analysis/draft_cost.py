"""Which exit, and how many drafts a round, for an engine that runs a model and a draft model beside it.

A round with k drafts reads the draft's layers and the head k times, and the model's layers and its head once. Reading is what
a single text waits for, on GPUs as on CPUs. So a setting is worth the tokens that it brings for what it reads, beside one
token for the model's layers and its head. Launching k small passes, which costs extra, is not counted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from selfspec.analysis.replay import AgreementTrace, replay
from selfspec.generator import SelfSpecGenerator

LENGTHS = range(1, 13)
"""Drafts a round that are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSetting:
    """An exit with a number of drafts a round. speedup: predicted, over plain decoding of one text."""

    exit_layer: int
    num_drafts: int
    tokens_per_round: float
    speedup: float


def head_in_layers(model: PreTrainedModel) -> float:
    """The size of the head beside that of a decoder layer; with a small model and a large vocabulary, several."""
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    return model.get_output_embeddings().weight.numel() / layer


def best_drafts(
    traces: Sequence[AgreementTrace], exit_layer: int, draft_layers: float, num_layers: int, head_layers: float
) -> DraftSetting:
    """The number of drafts that brings most for what it reads.

    traces: greedy texts, with an entry for `exit_layer`. draft_layers: what the draft reads, in layers of the model, an
        adapter's included; a layer in fewer bits counts by its bytes.
    head_layers: as `head_in_layers`. Raises ValueError for traces without a round.
    """
    found = []
    for length in LENGTHS:
        replays = [replay(trace, exit_layer, length) for trace in traces]
        rounds = sum(one.rounds for one in replays)
        if not rounds:
            raise ValueError("the texts are too short to predict anything: give longer ones")
        drafts = sum(sum(one.drafted) for one in replays)
        tokens = sum(one.num_tokens for one in replays)
        read = drafts * (draft_layers + head_layers) + rounds * (num_layers + head_layers)
        found.append(
            DraftSetting(
                exit_layer=exit_layer,
                num_drafts=length,
                tokens_per_round=tokens / rounds,
                speedup=tokens * (num_layers + head_layers) / read,
            )
        )
    return max(found, key=lambda setting: setting.speedup)


def best_exit(
    generator: SelfSpecGenerator, traces: Sequence[AgreementTrace], adapted: Collection[int], head_layers: float
) -> DraftSetting:
    """The exit that brings most. traces: with every layer. adapted: exits with an adapter, which is one more layer."""
    num_layers = generator.model.num_layers
    return max(
        (
            best_drafts(traces, exit_layer, exit_layer + (exit_layer in adapted), num_layers, head_layers)
            for exit_layer in range(1, num_layers)
        ),
        key=lambda setting: setting.speedup,
    )
