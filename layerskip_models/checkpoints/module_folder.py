"""A small network in a folder of its own: reading one that may be damaged, or of another model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from layerskip_models.kv_cache import KVCache
from layerskip_models.model import LayerSkipModel
from layerskip_models.prefill import prefill
from layerskip_models.text_files import in_a_line

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_UNREADABLE = (
    TypeError, KeyError, ValueError, RuntimeError, AttributeError, OSError, ArithmeticError, SafetensorError,
    StrictDataclassError,
)  # fmt: skip
"""What reading somebody else's files may raise."""

_PROBE_TOKENS = 8
_LEAST_COSINE = 0.99  # half precision stays above .999; other weights of the same shape are far below

M = TypeVar("M", bound=nn.Module)


def read_module(
    config: Path, weights: Path, make: Callable[[dict[str, Any]], M], *, what: str, missing: str, remedy: str
) -> M:
    """Build what `make` makes of the fields of a JSON file, with the other file's weights in float32, on the CPU.

    what: it is, for messages. missing, remedy: what to do if it is not there, or cannot be read. Raises FileNotFoundError
    without the JSON file, and ValueError that names the folder, or the file with weights that are not finite.
    """
    if not config.is_file():
        raise FileNotFoundError(f"no {what} at {config.parent}: {config.name} is missing; {missing}")
    try:
        fields = json.loads(config.read_text(encoding="utf-8"))
        with torch.device("cpu"):  # whatever the caller's default is
            module = make(fields)
        module.load_state_dict({name: value.float() for name, value in load_file(weights).items()})
    except _UNREADABLE as error:
        raise ValueError(f"{config.parent} holds no {what} that can be read: {remedy}; {in_a_line(error)}") from error
    for name, value in module.state_dict().items():
        if not bool(value.isfinite().all()):
            why = f"its training diverged; {remedy}"
            raise ValueError(f"{weights} holds NaN or infinite weights, first in {name}: {why}")
    return module


def write_module(
    module: nn.Module, config: DataclassInstance, config_file: Path, weights_file: Path, dtype: torch.dtype | None
) -> None:
    """Write the fields of `config` as JSON, and the weights in `dtype` (None for their own), for `read_module`."""
    config_file.write_text(json.dumps(asdict(config), indent=1) + "\n", encoding="utf-8")
    weights = {name: value.to(dtype or value.dtype).contiguous() for name, value in module.state_dict().items()}
    save_file(weights, weights_file, {"format": "pt"})


def with_tuples(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Turn the named fields into tuples: JSON has lists. Raises TypeError or KeyError for one that is not a list."""
    return {**fields, **{name: tuple(fields[name]) for name in names}}


def fingerprint(model: LayerSkipModel) -> tuple[float, ...]:
    """16 numbers that tell a model's weights from others of its shape, whatever their dtype, device and layout.

    Logits of some tokens after a fixed short text, less their mean: all weights have a part in them.
    """
    tokens = torch.arange(1, _PROBE_TOKENS + 1, device=model.device) * 7919 % model.vocab_size
    with torch.inference_mode():
        hidden = prefill(model, tokens, KVCache(model, _PROBE_TOKENS))
        logits = model.logits(hidden[-1:])[0]
        chosen = logits[torch.arange(1, 17, device=logits.device) * 104729 % logits.shape[0]]
        return tuple(round(value, 4) for value in (chosen - chosen.mean()).tolist())


def same_weights(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether two fingerprints are of the same weights, perhaps in another dtype or layout."""
    if len(one) != len(other):
        return False
    numbers = torch.tensor([one, other], dtype=torch.float32, device="cpu")
    return float(torch.cosine_similarity(numbers[0], numbers[1], dim=0)) >= _LEAST_COSINE
