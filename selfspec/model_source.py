"""Where a generator's model comes from, and which copy of it a call runs on."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from transformers import GenerationConfig, LlamaForCausalLM

from layerskip_models import LayerSkipModel, from_transformers
from selfspec.preverify import PreVerifiers
from selfspec.runner import RunnerChoice, resolve_runner
from selfspec.runner_pool import RunnerPool


@dataclass(frozen=True, slots=True, eq=False)
class BoundModel:
    """One copy of the weights with all that belongs to it: what a call holds from its start to its end."""

    model: LayerSkipModel
    runners: RunnerPool
    preverifiers: PreVerifiers


class ModelSource:
    """Hands every call the model to run on, and copies a transformers model again when its weights have changed.

    Threads may share a source. A call keeps what it was handed, whatever happens to the weights while it runs.
    """

    def __init__(self, model: LayerSkipModel | LlamaForCausalLM, runner: RunnerChoice) -> None:
        self._runner: RunnerChoice = runner
        self._lock = threading.Lock()
        self._source = None if isinstance(model, LayerSkipModel) else model
        self._version: object = None
        if isinstance(model, LayerSkipModel):
            self.current = self._bound(model)
        else:
            self.current = self._copied(model)

    @property
    def generation_config(self) -> GenerationConfig:
        """The checkpoint's own generation configuration; of a transformers model, as it is now."""
        return self.current.model.generation_config if self._source is None else self._source.generation_config

    def bind(self) -> BoundModel:
        """The model for a call that begins now."""
        if self._source is None:
            return self.current
        with self._lock:
            if _weights_version(self._source) != self._version:
                self.current = self._copied(self._source)
            return self.current

    def refresh(self) -> None:
        """Copy the weights again, changed or not."""
        if self._source is not None:
            with self._lock:
                self.current = self._copied(self._source)

    def _copied(self, source: LlamaForCausalLM) -> BoundModel:
        # Read before the weights are: an update that comes while they are being copied is noticed at the next call.
        self._version = _weights_version(source)
        return self._bound(from_transformers(source))

    def _bound(self, model: LayerSkipModel) -> BoundModel:
        return BoundModel(model, RunnerPool(model, resolve_runner(self._runner, model.device)), PreVerifiers(model))


def _weights_version(model: LlamaForCausalLM) -> tuple[tuple[int, int | None], ...]:
    """Changes when a parameter of the model is replaced or updated in place."""
    return tuple((p.data_ptr(), None if p.is_inference() else p._version) for p in model.parameters())
