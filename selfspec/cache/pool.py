"""The pool of KV caches. Each sequence borrows a slot and gives it back when it ends.

A slot that comes back still holds its text, and a later prompt with the same prefix goes on from there (docs/chat.md).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.fork_safe import fork_safe
from layerskip_models.kv_cache import KVCache
from selfspec.cache.prefix_cache import ANYONE, MAX_KEPT, Owner, PrefixCache, num_common
from selfspec.cache.slots import CacheSlot, IdleSlots, no_tokens

SMALL_LOSS = 32
"""Rows of a kept text that a sequence which goes on from it may overwrite. Policies have about as many read again anyway. If
more would be lost, the common prefix is copied, and the kept text stays."""


@dataclass(frozen=True, slots=True)
class KeptTexts:
    """Idle KV caches: how many of them hold a text, and the bytes of all."""

    count: int
    num_bytes: int


class KVCachePool:
    """Lends slots for sequences of one model.

    It keeps one idle slot, and as many more as fit into the memory of `prefixes`; the oldest are given up first.

    Threads may share a pool. If nothing is idle, something new is made. What was lent only ever returns to the pool that lent
    it, so a sequence that began before the weights were copied again cannot hand its old keys and values to a later one.
    """

    def __init__(self, model: LayerSkipModel, prefixes: PrefixCache) -> None:
        self._model, self._prefixes = model, prefixes
        self._row_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * model.kv_dtype.itemsize
        self._idle = IdleSlots()
        self._lent: list[CacheSlot] = []
        self._returned: list[CacheSlot] = []  # not among the idle ones yet
        self._times_forgotten = 0
        self._is_changing = False
        self._lock = fork_safe(threading.RLock())  # re-entered when a stream is finalised by the garbage collector

    @property
    def reuses(self) -> bool:
        """Whether a prompt may go on from a kept text.

        On our own kernels a row's bits depend only on its text, so it makes no difference which pass computed it.
        """
        return self._prefixes.reuses(exact=self._model.kernels is not None)

    @property
    def kept_texts(self) -> KeptTexts:
        with self._lock:
            return KeptTexts(self._idle.num_texts, self._idle.num_bytes)

    @contextmanager
    def lend(self, num_tokens: int, prompt: Tensor | None = None, owner: Owner = ANYONE) -> Iterator[CacheSlot]:
        """Lend a slot for one sequence of at most `num_tokens` tokens.

        prompt: int64 [n] on the CPU. The slot's cache holds the rows of the longest prefix that a kept text of this owner
        has in common with the prompt; it may be empty.
        """
        with self._changing():
            before = self._times_forgotten
            slot = self._find(num_tokens, prompt, owner)
            slot.tokens, slot.owner = no_tokens(), owner
            self._lent.append(slot)
        try:
            yield slot
        finally:
            with self._changing():
                self._lent.remove(slot)
                slot.read = None
                if before != self._times_forgotten or not len(slot.tokens) or not owner.lasts:
                    slot.forget()
                self._returned.append(slot)

    def forget(self) -> None:
        """Use no text that has been read so far, because the weights have changed."""
        with self._changing():
            self._times_forgotten += 1
            self._idle.forget_texts()
            for slot in (*self._returned, *self._lent):
                slot.forget()
                slot.read = None

    def give_back(self) -> None:
        """Free memory that no text needs: idle caches without text, and the room after texts that are kept."""
        with self._changing():
            for slot in self._idle:
                if not len(slot.tokens):
                    self._idle.remove(slot)
                elif slot.has_spare_room:
                    self._idle.replace(slot, slot.copy(self._model, len(slot.tokens)))

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """For one thread at a time. A slot that returns meanwhile, from a stream that the garbage collector ends, waits."""
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

    def _find(self, num_tokens: int, prompt: Tensor | None, owner: Owner) -> CacheSlot:
        """Find an idle slot or make one; its cache then holds the rows that can be reused."""
        source, rows = self._longest_prefix(prompt, owner)
        slot = self._with_room(num_tokens, source, rows) or CacheSlot(KVCache(self._model, num_tokens))
        if source is None or slot is source:
            slot.cache.declare(rows)
        else:
            slot.cache.take(source.cache, rows)
        slot.kept = None if source is None else source.kept
        return slot

    def _longest_prefix(self, prompt: Tensor | None, owner: Owner) -> tuple[CacheSlot | None, int]:
        """Find the slot of this owner whose text has the longest prefix in common with the prompt, and its length."""
        if prompt is None or not self.reuses:
            return None, 0
        best, rows = self._idle.longest_prefix(prompt, owner)
        for slot in self._lent:
            if slot.owner == owner:
                alike = num_common(slot.reusable_tokens(), prompt)
                if alike > rows:
                    best, rows = slot, alike
        return best, rows

    def _with_room(self, num_tokens: int, source: CacheSlot | None, rows: int) -> CacheSlot | None:
        """Take an idle slot to overwrite: the one with the sequence's own prefix, or one that would be given
        up for the sequence's memory."""
        room = self._prefixes.num_bytes - num_tokens * self._row_bytes - self._idle.num_bytes
        found: CacheSlot | None = None
        own = source is not None and source in self._idle
        if source is not None and own and len(source.tokens) - rows <= SMALL_LOSS:
            self._idle.remove(source)
            found = source
            room += source.num_bytes
        while room < 0 and (found is None or found.cache.max_length < num_tokens):
            other = self._idle.oldest(but=source)
            if other is None:
                break
            self._idle.remove(other)
            found = other
            room += found.num_bytes
        return found if found is not None and found.cache.max_length >= num_tokens else None

    def _take_back(self, slot: CacheSlot) -> None:
        """Take back a slot that is idle again. Slots that no longer fit are given up."""
        limit = self._prefixes.num_bytes
        if not limit:
            largest = max([slot, *self._idle], key=lambda one: one.cache.max_length)
            self._idle.clear()
            self._idle.add(largest)
            return
        # Texts that are prefixes of this one are not needed any more.
        for one in self._idle.prefixes_of(slot.tokens, slot.owner):
            self._idle.remove(one)
        self._idle.add(slot)
        while self._idle.num_bytes > limit and (spacious := self._idle.with_spare_room()) is not None:
            self._idle.replace(spacious, spacious.copy(self._model, len(spacious.tokens)))
        while len(self._idle) > 1 and (self._idle.num_bytes > limit or len(self._idle) > MAX_KEPT):
            oldest = self._idle.oldest()
            assert oldest is not None
            self._idle.remove(oldest)
