"""The model of a generator, which copy of its weights a call runs on, and whether these are still the model's."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from layerskip_models import LayerSkipModel, from_transformers
from layerskip_models.checkpoints.as_built import rotary_angles
from layerskip_models.checkpoints.conversion import why_not_shared
from layerskip_models.checkpoints.supported import check_transformers
from layerskip_models.draft_vocabulary import draft_vocabulary_of
from layerskip_models.draft_weights import DraftWeights, check_draft_weights, make_draft_weights
from layerskip_models.exits.lean import ExitsChoice, with_exits
from layerskip_models.fork_safe import fork_safe
from selfspec.cache.pool import KVCachePool
from selfspec.cache.prefix_cache import PrefixCache
from selfspec.engine.runners.eager import EagerRunner, make_runner
from selfspec.engine.runners.runner import RunnerChoice, RunnerName, engine_mode, resolve_runner
from selfspec.pacer.inference import PreVerifiers

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

_SAMPLES = 32  # numbers of each parameter that every call compares
_version_of, _class_of = attrgetter("_version"), attrgetter("__class__")
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, eq=False)
class BoundModel:
    """One copy of the weights with everything that depends on it. A call keeps it from start to end."""

    model: LayerSkipModel
    pool: KVCachePool
    preverifiers: PreVerifiers
    draft_weights: DraftWeights = "none"
    runner: RunnerName = "eager"
    idle_runners: list[EagerRunner] = field(default_factory=list)

    def take_runner(self) -> EagerRunner:
        """Take an idle runner, with what it has captured, or make one. `idle_runners` gets it back."""
        with suppress(IndexError):
            return self.idle_runners.pop()
        return make_runner(self.model, self.runner)


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
        draft_vocabulary: int | str | Path = "auto",
    ) -> None:
        self._draft_weights, self._draft_vocabulary = check_draft_weights(draft_weights), draft_vocabulary
        self._runner, self._kv_dtype, self._exits = runner, kv_dtype, exits
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
        with self._lock:
            self._renew(self._source)

    def _renew(self, source: PreTrainedModel | None) -> None:
        """Copy the weights, or, where they are the engine's own, drop what was made of them: they may be others now."""
        if source is not None and (self._watch is None or self._watch.moved() or why_not_shared(source) is not None):
            self.current = self._copied(source)
            return
        self.current.pool.forget()
        self.current.model.drafters.clear()
        if self.current.model.draft_vocabulary is not None:
            self.current.model.draft_vocabulary.heads.clear()
            self.current.idle_runners.clear()  # which know rows of the old head
        make_draft_weights(self.current.model, self._draft_weights)
        self._watch = None if source is None else WeightWatch(source)

    def _copied(self, source: PreTrainedModel) -> BoundModel:
        self._watch = None  # if this fails, the next call tries again
        check_transformers(source)
        if why_not_shared(source) is None:
            model = from_transformers(source, share=True)
            watch = WeightWatch(source)  # all parameters have their final addresses now
        else:
            watch = WeightWatch(source)  # before the weights are copied: the next call notices an update meanwhile
            model = from_transformers(source)
        try:
            model = with_exits(model, self._exits)
        except ValueError as error:
            if self._exits != "auto":
                raise
            # Adapters that no longer fit the changed weights.
            warnings.warn(f"exits are bare: {error}", RuntimeWarning, stacklevel=2)
        bound = self._bound(model)
        self._watch = watch
        return bound

    def _bound(self, model: LayerSkipModel) -> BoundModel:
        if self._kv_dtype != "auto":
            model = model.with_kv_dtype(self._kv_dtype)
        vocabulary = draft_vocabulary_of(model, self._draft_vocabulary)
        if vocabulary is not model.draft_vocabulary:
            model = model.with_draft_vocabulary(vocabulary)
        make_draft_weights(model, self._draft_weights)
        pool = KVCachePool(model, self._prefixes)
        runner = resolve_runner(self._runner, model)
        return BoundModel(model, pool, PreVerifiers(model), self._draft_weights, runner)


class WeightWatch:
    """Remembers the state of a model's weights, and says whether it has changed.

    A parameter's version counter does not change when it is written through `.data` or by a fused optimiser. So every call
    compares what there is by identity, with hooks and replaced forwards; addresses, version counters and the rotary
    frequencies; and a sample of the numbers in every parameter, spread over its rows and columns, bit for bit. A write
    through `.data` to a few numbers is not found.

    model: its parameters have one dtype and one device. It is referred to weakly. Not for several threads at once.
    """

    def __init__(self, model: nn.Module) -> None:
        whole, *self._inner = model.modules()  # `model` may be a proxy
        self._root, self._class = ref(whole), whole.__class__
        # What each module refers to, by name. Comparing these takes a tenth of the time of walking the model.
        self._tables = [module.__dict__ for module in model.modules()]
        self._held = [*self._objects()]  # kept alive, so that nothing else gets their ids
        self._parameters = [*model.parameters()]  # a tensor shared by several modules counts once
        self._versioned = [parameter for parameter in self._parameters if not parameter.is_inference()]
        self._rotary: list[Any] = [module for module in self._inner if "inv_freq" in module._buffers]
        self._state = self._now()
        self._places = [_sampled(parameter) for parameter in self._parameters]
        with engine_mode(self._parameters[0].device):
            self._sample = torch.cat(self._places)

    def changed(self) -> bool:
        if self._now() != self._state:
            return True
        with engine_mode(self._sample.device):
            return not torch.equal(torch.cat(self._places), self._sample)

    def moved(self) -> bool:
        """Return whether anything but the numbers in the parameters has changed, so that shared weights are not enough."""
        return self._now()[:-1] != self._state[:-1]

    def _now(self) -> tuple[Any, ...]:
        """Everything but numbers that is compared; the parameters' version counters come last."""
        root = self._root()  # None once it is freed, when nobody asks any more
        return (
            [*map(id, self._objects())],
            [*chain.from_iterable((*table["_forward_hooks"], *table["_forward_pre_hooks"]) for table in self._tables)],
            [*torch_modules._global_forward_hooks, *torch_modules._global_forward_pre_hooks],
            [*map(_class_of, self._inner), self._class if root is None else root.__class__],
            [(rotary.attention_scaling, rotary_angles(rotary).tolist()) for rotary in self._rotary],
            [*map(Tensor.data_ptr, self._parameters)],
            [*map(_version_of, self._versioned)],
        )

    def _objects(self) -> Iterator[Any]:
        """Parameters, modules and replaced forwards, in the modules' order."""
        return chain.from_iterable(
            (*table["_parameters"].values(), *table["_modules"].values(), table.get("forward"))
            for table in self._tables
        )


def _sampled(parameter: Tensor) -> Tensor:
    """View some numbers of a parameter's memory as integers of the same width; of all its storage if it is not contiguous."""
    values = parameter.detach()
    if not values.is_contiguous():
        values = values.as_strided((values.untyped_storage().nbytes() // values.element_size(),), (1,), 0)
    numbers = values.view(-1).view(_INTEGERS[values.element_size()])
    # The step is odd, so that it covers all columns of a matrix with a power of two of them.
    return numbers[:: numbers.numel() // _SAMPLES | 1][:_SAMPLES]
