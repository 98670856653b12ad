"""One generator for each transformers model in use, for as long as the model lives, and for each choice of draft weights."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary, proxy

from layerskip_models.fork_safe import fork_safe
from selfspec.engine.draft_choice import DraftWeights
from selfspec.generator import SelfSpecGenerator

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_generators: WeakKeyDictionary[PreTrainedModel, dict[str, SelfSpecGenerator]] = WeakKeyDictionary()
_lock = fork_safe(threading.Lock())


def generator_of(model: PreTrainedModel, draft_weights: DraftWeights = "auto") -> SelfSpecGenerator:
    """The generator of a transformers model, made at the first call.

    On a CPU it copies the weights, again when they have changed; on CUDA it shares them (see `SelfSpecGenerator`). Its
    reference to the model is weak, so that it is freed with the model. Call its `refresh` after writing a few numbers of a
    weight through `.data`. draft_weights: as in `SelfSpecGenerator`. Raises ValueError for a model that this engine cannot
    run.
    """
    with _lock:
        made = _generators.setdefault(model, {})
        if draft_weights not in made:
            weak = cast("PreTrainedModel", proxy(model))
            made[draft_weights] = SelfSpecGenerator(weak, draft_weights=draft_weights)
        return made[draft_weights]
