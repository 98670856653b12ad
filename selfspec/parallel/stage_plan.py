"""What each of two stages holds and where: worked out before anything is loaded, with every check that this allows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from layerskip_models import LayerSkipModel
from layerskip_models.checkpoints.checkpoint_files import resolve_checkpoint
from layerskip_models.checkpoints.loading import load_config, resolve_device
from layerskip_models.exits.adapter import DRAFTED, AdapterConfig
from layerskip_models.exits.folder import adapters_beside, check_shape, load_adapters
from layerskip_models.exits.lean import ExitsChoice, lean_adapters
from layerskip_models.parallel.shard_loading import load_layers
from policies import check_exit_layer
from selfspec.defaults import fixed_setting

Devices = Literal["auto"] | tuple[str | torch.device, str | torch.device]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """What a stage loads. options: of `load_layers`. exits: folder of the adapters to draft with, None for a bare exit."""

    name: str
    layers: range
    options: dict[str, Any]
    kv_dtype: str | torch.dtype = "auto"
    exits: str | Path | None = None

    def load(self) -> LayerSkipModel:
        """The layers as a model; its only exit is behind the last of them. Errors as those of `load_model`."""
        model = load_layers(self.name, self.layers, **self.options).with_kv_dtype(self.kv_dtype)
        if self.exits is None:
            return model
        return model.with_adapters(lean_adapters(load_adapters(self.exits), model, [self.layers.stop]))


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """name: of the checkpoint. origin: revision and local_files_only. adapters: to draft with, None for a bare exit."""

    name: str
    origin: dict[str, Any]
    exit_layer: int
    devices: tuple[torch.device, torch.device]
    adapters: AdapterConfig | None
    drafting: StageLayers
    verifying: StageLayers

    @classmethod
    def of(
        cls,
        name_or_path: str | Path,
        exit_layer: int | None,
        *,
        devices: Devices,
        dtype: str | torch.dtype,
        kv_dtype: str | torch.dtype,
        exits: ExitsChoice,
        revision: str | None,
        local_files_only: bool,
    ) -> StagePlan:
        """Arguments and errors as of `TwoStages`."""
        name = resolve_checkpoint(name_or_path)
        origin: dict[str, Any] = {"revision": revision, "local_files_only": local_files_only}
        config, places = load_config(name, **origin), _resolved(devices)
        num_layers = config.num_hidden_layers
        folder = adapters_beside(name) if exits == "auto" else exits
        adapters: AdapterConfig | None = None
        if folder is not None:
            adapters = load_adapters(folder).config
            check_shape(adapters, config.hidden_size, num_layers, name, folder)
            if adapters.form != DRAFTED:
                raise ValueError(
                    f"{folder} holds adapters of form {adapters.form!r}, which are for measuring: drafts are made with form "
                    f"{DRAFTED!r}, or say exits=None (--exits none)"
                )
        if exit_layer is None:
            exit_layer = _best_exit(name, num_layers, adapters)
        check_exit_layer(exit_layer, num_layers)
        if adapters is not None and exit_layer not in adapters.exit_layers:
            if exits != "auto":
                layers = ", ".join(map(str, adapters.exit_layers))
                raise ValueError(
                    f"{folder} holds adapters for exit layers {layers}, and none for {exit_layer}: take one of these, or say "
                    "exits=None (--exits none)"
                )
            folder = adapters = None
        first, rest = (
            StageLayers(
                name=name,
                layers=layers,
                kv_dtype=kv_dtype,
                options={"dtype": dtype, "device": device, **origin},
                exits=own,
            )
            for layers, device, own in zip((range(exit_layer), range(exit_layer, num_layers)), places, (folder, None))
        )
        return cls(
            name=name,
            origin=origin,
            exit_layer=exit_layer,
            devices=places,
            adapters=adapters,
            drafting=first,
            verifying=rest,
        )

    def halves(self) -> tuple[list[int], list[int]] | None:
        """Cores for each stage where both are on CPUs: half of this process's each, None if it has but one."""
        own = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        half = len(own) // 2
        return (own[:half], own[half:]) if half and all(device.type == "cpu" for device in self.devices) else None


def _resolved(devices: Devices) -> tuple[torch.device, torch.device]:
    """Of the drafter and of the other stage. ValueError for what this machine lacks, or what is no pair."""
    if devices == "auto":
        devices = ("cuda:0", "cuda:1") if torch.cuda.device_count() > 1 else ("cpu", "cpu")
    if isinstance(devices, str) or len(devices) != 2:
        raise ValueError(f"devices (--stage-devices) must be two, such as 'cuda:0' and 'cuda:1', got {devices!r}")
    return resolve_device(devices[0]), resolve_device(devices[1])


def _best_exit(name: str, num_layers: int, adapters: AdapterConfig | None) -> int:
    """The exit of the best known fixed setting, or the nearest that has an adapter."""
    known, _ = fixed_setting(name, num_layers)
    return known if adapters is None else min(adapters.exit_layers, key=lambda layer: abs(layer - known))
