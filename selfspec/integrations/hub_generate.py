"""`generate` with selfspec from its raw arguments. Exported folders import it, so it stays where it is."""

from __future__ import annotations

import copy
import inspect
from typing import Any

from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from policies import Policy
from selfspec.integrations.custom_generate import SelfSpecOutput, custom_generate

_SIGNATURE = inspect.signature(GenerationMixin.generate)


def hub_generate(
    model: PreTrainedModel, arguments: tuple[Any, ...], options: dict[str, Any], *, policy: str | Policy | None = None
) -> Tensor | SelfSpecOutput:
    """Decode `model.generate(*arguments, **options)` with selfspec.

    The options may also contain `policy`, `exit_layer` and `num_speculations`. policy: used if none of these is given. An
    explicit `custom_generate` takes precedence over all of them.
    Returns and raises what `custom_generate`'s callable does. Stop strings in a configuration work here too.
    """
    bound = _SIGNATURE.bind(model, *arguments, **options).arguments
    others = bound.pop("kwargs", {})
    del bound["self"]
    if bound.get("custom_generate") is None:
        decode = custom_generate(policy, tokenizer=others.pop("tokenizer", None))
        bound["custom_generate"] = decode
        stops = _stop_strings(model, bound, others)
        if stops is not None:
            # `stop_strings` is not in its signature, so that the None among the options reaches the configuration.
            def decode_to_a_stop(model: PreTrainedModel, input_ids: Tensor, **prepared: Any) -> Tensor | SelfSpecOutput:
                return decode(model, input_ids, stop_strings=stops, **prepared)

            bound["custom_generate"] = decode_to_a_stop
    return GenerationMixin.generate(model, **bound, **others)


def _stop_strings(model: PreTrainedModel, bound: dict[str, Any], others: dict[str, Any]) -> Any:
    """Take the stop strings out of a call's arguments. transformers raises if it finds any, even with a tokenizer."""
    config = bound.get("generation_config")
    given = others.pop("stop_strings", None)
    configured = None if config is None else config.stop_strings
    if configured is not None:
        bound["generation_config"] = copy.deepcopy(config)
        bound["generation_config"].stop_strings = None
    of_the_model = model.generation_config.stop_strings
    if of_the_model is not None:
        others["stop_strings"] = None
    return next((stops for stops in (given, configured, of_the_model) if stops is not None), None)
