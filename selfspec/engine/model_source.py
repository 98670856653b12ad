"""The model of a generator, and which copy of its weights a call runs on."""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from layerskip_models import LayerSkipModel, from_transformers
from layerskip_models.checkpoints.conversion import why_not_shared
from layerskip_models.checkpoints.supported import check_transformers
from layerskip_models.exits.lean import ExitsChoice, with_exits
from layerskip_models.fork_safe import fork_safe
from selfspec.cache.pool import KVCachePool
from selfspec.cache.prefix_cache import PrefixCache
from selfspec.engine.draft_choice import DraftWeights, check_draft_weights, make_draft_weights
from selfspec.engine.runners.choice import RunnerChoice, resolve_runner
from selfspec.engine.weight_watch import WeightWatch
from selfspec.pacer.inference import PreVerifiers

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel


@dataclass(frozen=True, slots=True, eq=False)
class BoundModel:
    """One copy of the weights with everything that depends on it. A call keeps it from start to end."""

    model: LayerSkipModel
    pool: KVCachePool
    preverifiers: PreVerifiers
    draft_weights: DraftWeights = "none"


class ModelSource:
    """Gives every call the model to run on, and notices when the weights of a transformers model have changed.

    On a CPU the weights are copied, again after a change. On CUDA the parameters become views of the engine's tensors.
    A change in place is then effective at once; only kept KV caches are dropped.
    Threads may share a source. Do not write to shared weights while a call runs.
    """

    def __init__(
        self,
        model: LayerSkipModel | PreTrainedModel,
        runner: RunnerChoice,
        prefixes: PrefixCache | None = None,
        exits: ExitsChoice = "auto",
        kv_dtype: str | torch.dtype = "auto",
        draft_weights: DraftWeights = "auto",
    ) -> None:
        self._draft_weights = check_draft_weights(draft_weights)
        self.runner = resolve_runner(runner)
        self._kv_dtype = kv_dtype
        self._exits: ExitsChoice = exits
        self._prefixes = PrefixCache() if prefixes is None else prefixes
        self._lock = fork_safe(threading.RLock())  # the garbage collector may finalise a stream while it is held
        self._source = None if isinstance(model, LayerSkipModel) else model
        self._watch: WeightWatch | None = None
        if isinstance(model, LayerSkipModel):
            self.current = self._bound(model if exits == "auto" else with_exits(model, exits))
        else:
            self.current = self._copied(model)

    @property
    def generation_config(self) -> GenerationConfig:
        """The generation configuration of the checkpoint, or of the transformers model as it is now."""
        return self.current.model.generation_config if self._source is None else self._source.generation_config

    def bind(self) -> BoundModel:
        if self._source is None:
            return self.current
        with self._lock:
            if self._watch is None or self._watch.changed():
                self._renew(self._source)
            return self.current

    def refresh(self) -> None:
        """Take the weights as they are now, and drop KV caches of the old ones."""
        if self._source is None:
            self._forget()
        else:
            with self._lock:
                self._renew(self._source)

    def _forget(self) -> None:
        """Drop what was made of the weights: they may be others now."""
        self.current.pool.forget()
        self.current.model.drafters.clear()
        make_draft_weights(self.current.model, self._draft_weights)

    def _renew(self, source: PreTrainedModel) -> None:
        if self._watch is None or self._watch.moved() or why_not_shared(source) is not None:
            self.current = self._copied(source)
        else:
            self._forget()
            self._watch = WeightWatch(source)

    def _copied(self, source: PreTrainedModel) -> BoundModel:
        self._watch = None  # if this fails, the next call tries again
        check_transformers(source)
        if why_not_shared(source) is None:
            bound = self._bound(self._with_exits(from_transformers(source, share=True)))
            self._watch = WeightWatch(source)  # all parameters have their final addresses now
            return bound
        # Made before the weights are copied, so that the next call notices an update during the copying.
        watch = WeightWatch(source)
        bound = self._bound(self._with_exits(from_transformers(source)))
        self._watch = watch
        return bound

    def _with_exits(self, model: LayerSkipModel) -> LayerSkipModel:
        """With exits="auto", adapters that no longer fit the changed weights are left out with a warning."""
        try:
            return with_exits(model, self._exits)
        except ValueError as error:
            if self._exits != "auto":
                raise
            warnings.warn(f"exits are bare: {error}", RuntimeWarning, stacklevel=2)
            return model

    def _bound(self, model: LayerSkipModel) -> BoundModel:
        if self._kv_dtype != "auto":
            model = model.with_kv_dtype(self._kv_dtype)
        make_draft_weights(model, self._draft_weights)
        pool = KVCachePool(model, self._prefixes)
        return BoundModel(model, pool, PreVerifiers(model), self._draft_weights)
