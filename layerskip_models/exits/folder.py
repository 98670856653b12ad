"""The folder that holds a model's exit adapters: read, written, and refused for another model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from layerskip_models.checkpoints.module_folder import fingerprint, read_module, same_weights, with_tuples, write_module
from layerskip_models.exits import FOLDER, LOW_RANK, STEERED, STEERING_SIZE
from layerskip_models.exits.adapter import AdapterConfig, ExitAdapters, steering_layers
from layerskip_models.model import LayerSkipModel

CONFIG_FILE, WEIGHTS_FILE = "exits.json", "exits.safetensors"
_EARLIER = ("num_heads", "num_kv_heads", "head_dim", "rope_theta")
_OF_STEERING = ("steering_layers", "steering_size")


def config_for(
    model: LayerSkipModel,
    *,
    exit_layers: tuple[int, ...],
    rank: int,
    form: str = LOW_RANK,
    steering_size: int = 0,
    base_model: str | None = None,
) -> AdapterConfig:
    """Adapters for this model. steering_size: 0 for the form's default. base_model: its name for people; None for its own."""
    steered = form == STEERED
    return AdapterConfig(
        form=form,
        steering_layers=steering_layers(model.num_layers) if steered else (),
        steering_size=(steering_size or STEERING_SIZE) if steered else steering_size,
        hidden_size=model.hidden_size,
        exit_layers=exit_layers,
        rank=rank,
        eps=float(model.config.rms_norm_eps),
        base_model=(model.name or "") if base_model is None else base_model,
        fingerprint=fingerprint(model),
    )


def save_adapters(adapters: ExitAdapters, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write configuration and weights into an existing folder; dtype: of the weights, None for theirs."""
    write_module(adapters, adapters.config, folder / CONFIG_FILE, folder / WEIGHTS_FILE, dtype)


def load_adapters(folder: str | Path, *, map_location: str | torch.device = "cpu") -> ExitAdapters:
    """Read what `save_adapters` wrote, in float32. FileNotFoundError or ValueError says what is wrong."""
    folder = Path(folder)
    adapters = read_module(
        folder / CONFIG_FILE,
        folder / WEIGHTS_FILE,
        lambda fields: ExitAdapters(_config(fields)),
        what="exit adapters",
        missing="train them with selfspec train-exit",
        remedy="train them again with selfspec train-exit, or say exits=None (--exits none)",
    )
    return adapters.to(map_location).eval()


def _config(fields: dict[str, Any]) -> AdapterConfig:
    """Take the fields without those of other forms, which earlier versions wrote, and with tuples for JSON's lists."""
    steered = fields.get("form") == STEERED
    others = _EARLIER if steered else (*_EARLIER, *_OF_STEERING)
    known = {name: value for name, value in fields.items() if name not in others}
    return AdapterConfig(**with_tuples(known, "fingerprint", "exit_layers", *(("steering_layers",) if steered else ())))


def check_fits(config: AdapterConfig, model: LayerSkipModel, where: str | Path) -> None:
    """ValueError unless the adapters were trained for this model."""
    deepest = max([config.exit_layers[-1] + 1, *config.steering_layers])
    if config.hidden_size != model.hidden_size or deepest > model.num_layers:
        problem = f"a model of another shape than {model.name or 'this one'}"
    elif not same_weights(fingerprint(model), config.fingerprint):
        problem = f"whose weights are not those of {model.name or 'this model'}"
    else:
        return
    raise ValueError(
        f"{where} holds adapters for exit layers {', '.join(map(str, config.exit_layers))} of "
        f"{config.base_model or 'another model'}, {problem}: train them for this model with selfspec train-exit, or say "
        "exits=None (--exits none)"
    )


def adapters_beside(name: str | None) -> Path | None:
    """Find the folder of the adapters that lie beside the checkpoint of this name, a folder; None if there are none."""
    if name is None or not (Path(name) / FOLDER / CONFIG_FILE).is_file():
        return None
    return Path(name) / FOLDER
