"""What transformers builds from a configuration to compare a model with is built once, not at each conversion.

It takes 20 ms of a tiny model's conversion, and thousands of tests convert one. The check reads what was built and leaves
it as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from layerskip_models.checkpoints import as_built

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build_once() -> None:
    """From now on in this process."""
    build = as_built.built_on_meta
    built: dict[tuple[type, str], PreTrainedModel] = {}

    def built_before(config: Any, name: str) -> PreTrainedModel:
        key = (type(config), config.to_json_string(use_diff=False))
        if key not in built:
            built[key] = build(config, name)
        return built[key]

    as_built.built_on_meta = built_before
