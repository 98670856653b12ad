"""One generator for each transformers model in use, for as long as the model lives."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary, proxy

from selfspec.generator import SelfSpecGenerator

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_generators: WeakKeyDictionary[PreTrainedModel, SelfSpecGenerator] = WeakKeyDictionary()
_lock = threading.Lock()


def generator_of(model: PreTrainedModel) -> SelfSpecGenerator:
    """The generator of a transformers model, made at the first call.

    On a CPU it copies the weights, again when they have changed; on CUDA it shares them (see `SelfSpecGenerator`). Its
    reference to the model is weak, so that it is freed with the model. Call its `refresh` after writing a few numbers of a
    weight through `.data`. Raises ValueError for a model that this engine cannot run.
    """
    with _lock:
        found = _generators.get(model)
        if found is None:
            found = _generators[model] = SelfSpecGenerator(cast("PreTrainedModel", proxy(model)))
        return found
