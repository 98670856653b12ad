"""Exit adapters with random weights, so that drafts differ from those of bare exits, but not altogether."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layerskip_models import LayerSkipModel
from layerskip_models.exits import LOW_RANK, STEERED
from layerskip_models.exits.adapter import ExitAdapters
from layerskip_models.exits.folder import config_for
from layerskip_models.exits.lean import lean_adapters

_RANK = 5
_STEERING_SIZE = 3


def random_adapters(
    model: LayerSkipModel, exit_layers: Sequence[int], seed: int = 0, form: str = LOW_RANK
) -> ExitAdapters:
    """For these exits of this model, which changes nothing of it. Steering moves steered ones as much as their own states."""
    size = _STEERING_SIZE if form == STEERED else 0
    adapters = ExitAdapters(
        config_for(model, exit_layers=tuple(exit_layers), rank=_RANK, form=form, steering_size=size)
    )
    own = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in exit_layers:
            adapter = adapters.at(layer)
            adapter.scale.fill_(0.5)
            for linear in (adapter.gate, adapter.up, adapter.down):
                linear.weight.normal_(std=0.5, generator=own)
        if adapters.steering is not None:
            adapters.steering.project.weight.normal_(std=0.5, generator=own)
            adapters.steering.norm.weight.fill_(2.0)
            for layer in exit_layers:
                steer = adapters.at(layer).steer
                assert steer is not None
                steer.weight.normal_(std=0.5, generator=own)
    return adapters.eval()


def adapted(model: LayerSkipModel, exit_layers: Sequence[int], seed: int = 0, form: str = LOW_RANK) -> LayerSkipModel:
    """The same model, which drafts with such adapters; bare if there are no such exits."""
    if not exit_layers:
        return model
    return model.with_adapters(lean_adapters(random_adapters(model, exit_layers, seed, form), model))
