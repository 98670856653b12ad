"""What versions of transformers call by different names."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel


CACHE_NAMES = ("cache", "past_key_values")
"""The KV cache since version 5.24, and before."""


def with_cache(model: PreTrainedModel, cache: Cache) -> dict[str, Any]:
    """Return the argument that hands a KV cache to the model's `forward`."""
    parameters = inspect.signature(model.forward).parameters
    return {next(name for name in CACHE_NAMES if name in parameters): cache}
