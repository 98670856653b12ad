"""KV caches and passes that no text is using. Each text takes a cache for itself and gives it back when it ends.

A cache that comes back still holds its text, and a later text that begins alike goes on from there (docs/chat.md).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.kv_cache import KVCache
from selfspec.cache.prefix_cache import ANYONE, MOST_KEPT, Owner, PrefixCache, num_alike
from selfspec.cache.slots import CacheSlot, IdlePlaces, no_tokens
from selfspec.engine.runners.cuda_graph.paged_attention import attends_by_pages
from selfspec.engine.runners.cuda_graph.runner import CudaGraphRunner, captured_length
from selfspec.engine.runners.eager import EagerRunner
from selfspec.engine.runners.runner import RunnerName

SMALL_LOSS = 32
"""Rows of a kept text that a text which goes on from it may write over. Policies have about as many read again anyway. If
more would be lost, the rows that both begin with are copied, and the kept text stays."""


@dataclass(frozen=True, slots=True)
class KeptTexts:
    """Idle KV caches: how many of them hold a text, and the bytes of all."""

    count: int
    num_bytes: int


class KVCachePool:
    """Lends places for texts of one model, and eager passes.

    It keeps one place that is idle, and as many more as fit into the memory of `prefixes`, oldest given up first.

    Threads may share a pool. Who finds nothing idle gets something new. What was lent only ever returns to the pool that lent
    it, so a text that began before the weights were copied again cannot hand its old captures, or keys and values, to a later
    one. on_giving_up: called once when captures are given up, because graphs fail.
    """

    def __init__(
        self,
        model: LayerSkipModel,
        kind: RunnerName,
        prefixes: PrefixCache,
        on_giving_up: Callable[[], None] = lambda: None,
    ) -> None:
        self.kind: RunnerName = kind
        self._on_giving_up = on_giving_up
        self._model, self._prefixes = model, prefixes
        self._row_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * model.kv_dtype.itemsize
        self._idle = IdlePlaces()
        self._lent: list[CacheSlot] = []
        self._returned: list[CacheSlot] = []  # not among the idle ones yet
        self._times_forgotten = 0
        self._is_changing = False
        self._idle_runner: EagerRunner | None = None
        self._lock = threading.RLock()  # re-entered when a stream is finalised by the garbage collector

    @property
    def reuses(self) -> bool:
        """Whether a prompt may go on from a kept text.

        On our own kernels a row's bits depend on its text alone, so it makes no difference which pass computed it.
        """
        return self._prefixes.reuses(exact=self._model.kernels is not None and self.kind == "eager")

    @property
    def kept_texts(self) -> KeptTexts:
        with self._lock:
            return KeptTexts(self._idle.num_texts, self._idle.num_bytes)

    @contextmanager
    def lend(
        self, num_tokens: int, prompt: Tensor | None = None, owner: Owner = ANYONE, *, alone: bool = True
    ) -> Iterator[CacheSlot]:
        """A place for one text of at most `num_tokens` tokens.

        prompt: int64 [n] on the CPU. Its KV cache holds the rows that a kept text begins with as the prompt does, and is
        empty if there is none. owner: of the text; kept ones of others are not looked at. alone: whether the text begins
        without company. In company it runs eagerly, so it gets no captures, whose cache is longer than most texts.
        """
        with self._changing():
            before = self._times_forgotten
            place = self._find(num_tokens, prompt, owner, self.kind == "captured" and alone)
            place.tokens, place.owner = no_tokens(), owner
            self._lent.append(place)
        try:
            yield place
        finally:
            with self._changing():
                self._lent.remove(place)
                place.read = None
                if before != self._times_forgotten or not len(place.tokens) or not owner.lasts:
                    place.forget()
                self._returned.append(place)

    @contextmanager
    def eager_runner(self) -> Iterator[EagerRunner]:
        """An eager runner for one caller."""
        with self._lock:
            runner, self._idle_runner = self._idle_runner, None
        runner = runner or EagerRunner(self._model)
        try:
            yield runner
        finally:
            self._idle_runner = runner

    def forget(self) -> None:
        """Use no text that has been read so far: the weights are others now."""
        with self._changing():
            self._times_forgotten += 1
            self._idle.forget_texts()
            for place in (*self._returned, *self._lent):
                place.forget()
                place.read = None

    def give_back(self) -> None:
        """Memory that no text needs: idle caches that hold none, and the room after texts that are kept.

        Captures stay with their caches, since they take long to make.
        """
        with self._changing():
            for place in self._idle:
                if place.captured is None and not len(place.tokens):
                    self._idle.remove(place)
                elif place.has_spare_room:
                    self._idle.replace(place, place.copy(self._model, len(place.tokens)))

    def give_up_graphs(self, error: RuntimeError) -> None:
        """Lend no captures from now on, and warn of it once: graphs do not work here, for this reason."""
        with self._changing():
            if self.kind == "eager":
                return
            self.kind = "eager"
            self._idle.clear()
        self._on_giving_up()
        warnings.warn(
            f"CUDA graphs are not used, decoding will be slower: {error}. The text goes on with runner='eager'",
            RuntimeWarning,
            stacklevel=2,
        )

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """For one thread at a time. What returns meanwhile, from a stream that the garbage collector ends, waits."""
        with self._lock:
            if self._is_changing:
                yield
                return
            self._is_changing = True
            try:
                yield
                while self._returned:
                    self._take_back(self._returned.pop(0))
            finally:
                self._is_changing = False

    def _find(self, num_tokens: int, prompt: Tensor | None, owner: Owner, captured: bool) -> CacheSlot:
        """A place out of the idle ones or a new one, whose cache holds what can be reused. captured: with captures."""
        source, rows = self._most_alike(prompt, owner)
        if source is not None:
            source.settle()
        choose = self._with_captures if captured else self._with_room
        place = choose(num_tokens, source, rows) or self._make(num_tokens, captured)
        if source is None or place is source:
            place.cache.declare(rows)
        else:
            place.cache.take(source.cache, rows)
        place.kept = None if source is None else source.kept
        return place

    def _most_alike(self, prompt: Tensor | None, owner: Owner) -> tuple[CacheSlot | None, int]:
        """The place whose text, of the same owner, has the longest beginning in common with the prompt, and how long that is.

        Captured passes may write over a whole cache, for padding or after a failure: of texts that still live, only those
        without captures are looked at.
        """
        if prompt is None or not self.reuses:
            return None, 0
        best, rows = self._idle.most_alike(prompt, owner)
        for place in self._lent:
            if place.captured is None and place.owner == owner:
                alike = num_alike(place.shared(), prompt)
                if alike > rows:
                    best, rows = place, alike
        return best, rows

    def _with_room(self, num_tokens: int, source: CacheSlot | None, rows: int) -> CacheSlot | None:
        """An idle place without captures to write over: the text's own beginning, or what would be given up for the new
        text's memory."""
        room = self._prefixes.num_bytes - num_tokens * self._row_bytes - self._idle.num_bytes
        found: CacheSlot | None = None
        own = source is not None and source.captured is None and source in self._idle
        if source is not None and own and len(source.tokens) - rows <= SMALL_LOSS:
            self._idle.remove(source)
            found = source
            room += source.num_bytes
        while room < 0 and (found is None or found.cache.max_length < num_tokens):
            other = self._idle.oldest(but=source, captured=False)
            if other is None:
                break
            self._idle.remove(other)
            found = other
            room += found.num_bytes
        return found if found is not None and found.cache.max_length >= num_tokens else None

    def _with_captures(self, num_tokens: int, source: CacheSlot | None, rows: int) -> CacheSlot | None:
        """An idle place with captures, which take long to make. Its text moves elsewhere if there is memory for that."""
        able = self._idle.captured(num_tokens)
        if not able:
            return None
        found = source if source is not None and source in able else able[-1]
        found.settle()
        held = found.tokens.numel()
        both = found.num_bytes + self._row_bytes * held
        lost = held - (rows if found is source else 0)
        if lost > SMALL_LOSS and self._idle.num_bytes - found.num_bytes + both <= self._prefixes.num_bytes:
            self._idle.replace(found, found.copy(self._model, held))
        else:
            self._idle.remove(found)
        return found

    def _take_back(self, place: CacheSlot) -> None:
        """What was lent is idle again; what is then too much is given up."""
        if place.captured is not None and self.kind == "eager":
            return
        limit = self._prefixes.num_bytes
        if not limit:
            largest = max([place, *self._idle], key=lambda one: one.capacity)
            self._idle.clear()
            self._idle.add(largest)
            return
        # A text that is no more than this one's beginning is not needed any more.
        for one in self._idle.beginnings_of(place.tokens, place.owner):
            if not one.captured:
                self._idle.remove(one)
        self._idle.add(place)
        while self._idle.num_bytes > limit and (spacious := self._idle.with_spare_room()) is not None:
            self._idle.replace(spacious, spacious.copy(self._model, len(spacious.tokens)))
        with_captures = next(reversed(self._idle.captured(0)), None)
        while len(self._idle) > 1 and (self._idle.num_bytes > limit or len(self._idle) > MOST_KEPT):
            oldest = self._idle.oldest(but=with_captures)
            assert oldest is not None
            self._idle.remove(oldest)

    def _make(self, num_tokens: int, captured: bool) -> CacheSlot:
        if captured:
            place: CacheSlot | None = None
            paged = attends_by_pages(self._model)
            failure = RuntimeError("another process of the model has no room for them")
            try:
                cache = KVCache(self._model, captured_length(num_tokens, self._model.max_positions, paged))
                place = CacheSlot(cache, CudaGraphRunner(self._model, cache))
            except RuntimeError as error:  # no memory for its buffers, say
                failure = error
            if self._model.all_agree(place is not None) and place is not None:
                return place
            self.give_up_graphs(failure)
        return CacheSlot(KVCache(self._model, num_tokens))
