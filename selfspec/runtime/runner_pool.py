"""KV caches and passes that no text is using. Each text takes a cache for itself and gives it back when it ends."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from layerskip_models import LayerSkipModel
from layerskip_models.kv_cache import KVCache
from selfspec.eager import EagerPasses
from selfspec.graphs.captured_runner import CapturedRunner, captured_length
from selfspec.passes import RunnerName


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a text lives: its KV cache, and the passes that were captured on that cache, if there are any."""

    cache: KVCache
    captured: CapturedRunner | None = None

    @property
    def capacity(self) -> tuple[int, int]:
        """Longer texts first, then more captures: what a later text would otherwise have to make anew."""
        return self.cache.max_length, 0 if self.captured is None else self.captured.num_captures


class RunnerPool:
    """Lends places for texts of one model, and eager passes. It keeps at most one of each that is idle.

    Threads may share a pool. Who finds nothing idle gets something new. What was lent only ever returns to the pool that lent
    it, so a text that began before the weights were copied again cannot hand its old captures to a later one.
    on_giving_up: called once when captures are given up, because graphs fail.
    """

    def __init__(
        self, model: LayerSkipModel, kind: RunnerName, on_giving_up: Callable[[], None] = lambda: None
    ) -> None:
        self.kind: RunnerName = kind
        self._on_giving_up = on_giving_up
        self._model = model
        self._idle: Place | None = None
        self._idle_passes: EagerPasses | None = None
        self._lock = threading.RLock()  # re-entered when a stream is finalised by the garbage collector

    @contextmanager
    def lend(self, num_tokens: int) -> Iterator[Place]:
        """A place for one text of at most `num_tokens` tokens, whose KV cache is empty."""
        with self._lock:
            place, self._idle = self._idle, None
        if place is not None and place.cache.max_length < num_tokens:
            place = None  # freed before the longer one is allocated
        if place is None:
            place = self._make(num_tokens)
        place.cache.declare(0)
        try:
            yield place
        finally:
            with self._lock:
                outdated = place.captured is not None and self.kind == "eager"
                if not outdated and (self._idle is None or place.capacity > self._idle.capacity):
                    self._idle = place

    @contextmanager
    def eager_passes(self) -> Iterator[EagerPasses]:
        """Eager passes for one caller."""
        with self._lock:
            passes, self._idle_passes = self._idle_passes, None
        passes = passes or EagerPasses(self._model)
        try:
            yield passes
        finally:
            passes.forget()
            self._idle_passes = passes

    def give_up_graphs(self, error: RuntimeError) -> None:
        """Lend no captures from now on, and warn of it once: graphs do not work here, for this reason."""
        with self._lock:
            if self.kind == "eager":
                return
            self.kind = "eager"
            self._idle = None
        self._on_giving_up()
        warnings.warn(
            f"CUDA graphs are not used, decoding will be slower: {error}. The text goes on with runner='eager'",
            RuntimeWarning,
            stacklevel=2,
        )

    def _make(self, num_tokens: int) -> Place:
        if self.kind == "captured":
            cache = KVCache(self._model, captured_length(num_tokens, self._model.max_positions))
            try:
                return Place(cache, CapturedRunner(self._model, cache))
            except RuntimeError as error:  # no memory for its buffers, say
                self.give_up_graphs(error)
        return Place(KVCache(self._model, num_tokens))
