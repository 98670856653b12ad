"""Tiny random pre-verifiers, which judge drafts at random: policies that use one must be exact all the same."""

from __future__ import annotations

from typing import Any

import torch

from layerskip_models import LayerSkipModel
from selfspec.pacer.inference import PreVerification
from selfspec.pacer.network import (
    LeanPreVerifier,
    PreVerifierConfig,
    PreVerifierModule,
    describe_layer,
    fingerprint,
)


def random_module(model: LayerSkipModel, *, seed: int = 0, **changes: Any) -> PreVerifierModule:
    """For all exit layers of a model; outputs spread over (0, 1)."""
    options = {"exit_layers": tuple(range(1, model.num_layers)), "max_drafts": 6, **changes}
    config = PreVerifierConfig(
        base_model="tiny", fingerprint=fingerprint(model), layer=describe_layer(model.config), **options
    )
    module = PreVerifierModule(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                scale = (
                    1.0 if parameter.ndim == 1 or "position" in name or "exit" in name else parameter.shape[1] ** -0.5
                )
                parameter.normal_(0.0, scale, generator=generator)
        module.calibration[:, 0].uniform_(0.5, 1.5, generator=generator)
        module.calibration[:, 1].uniform_(-0.3, 0.3, generator=generator)
    return module.eval()


def random_preverification(model: LayerSkipModel, **options: Any) -> PreVerification:
    """The same, ready to decode with the model."""
    return PreVerification(LeanPreVerifier(random_module(model, **options), model.dtype, model.device))
