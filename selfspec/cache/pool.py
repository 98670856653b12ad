"""The pool of KV caches. A slot that comes back keeps its text, and a later prompt with its prefix goes on from there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.fork_safe import fork_safe
from layerskip_models.kv_cache import KVCache
from selfspec.cache.hidden_states import PrefixHiddenStates
from selfspec.cache.prefix_cache import ANYONE, MAX_KEPT, TOKEN_BYTES, Owner, PrefixCache, as_bytes, num_common

SMALL_LOSS = 32
"""Rows of a kept text that a sequence which goes on from it may overwrite. Policies have about as many read again anyway. If
more would be lost, the common prefix is copied, and the kept text stays."""


def _no_tokens() -> Tensor:
    return torch.empty(0, dtype=torch.long, device="cpu")


@dataclass(slots=True, eq=False)
class CacheSlot:
    """A KV cache for one sequence.

    tokens: of the text that an idle slot holds, int64 [rows] on the CPU. kept: the hidden states of that text.
    read: while a sequence uses the slot, returns those of its tokens whose rows are final. owner: of the text.
    text, num_bytes: of an idle slot, the tokens as bytes and the memory it takes.
    """

    cache: KVCache
    tokens: Tensor = field(default_factory=_no_tokens)
    kept: PrefixHiddenStates | None = None
    read: Callable[[], Tensor] | None = None
    owner: Owner = ANYONE
    text: bytes = b""
    num_bytes: int = 0

    @property
    def has_spare_room(self) -> bool:
        """True if the text would fit into half of the cache."""
        return self.cache.max_length > 2 * len(self.tokens) > 0

    def begin_sequence(self, read: Callable[[], Tensor]) -> None:
        """Let a sequence use the slot. Others may go on from the tokens `read` returns, but not from hidden states."""
        self.read, self.kept = read, None

    def end_sequence(self, tokens: Tensor, kept: PrefixHiddenStates | None) -> None:
        """Keep the text of a sequence that has ended. tokens: int64 [rows], of the cache's first rows."""
        self.tokens, self.kept = tokens.to("cpu", copy=True), kept

    def forget(self) -> None:
        self.tokens, self.kept, self.text = _no_tokens(), None, b""

    def become_idle(self) -> CacheSlot:
        """Note what the slot holds and how large it is, which must not change while it is idle."""
        states = 0 if self.kept is None else self.kept.rows.numel() * self.kept.rows.element_size()
        self.text, self.num_bytes = as_bytes(self.tokens), self.cache.num_bytes + states
        return self

    def shrunk(self, model: LayerSkipModel) -> CacheSlot:
        """Copy the slot in as little memory as its text needs."""
        rows = len(self.tokens)
        cache = KVCache(model, rows)
        cache.take(self.cache, rows)
        kept = None if self.kept is None else PrefixHiddenStates(self.kept.layers, self.kept.rows[:, :rows].clone())
        return CacheSlot(cache, tokens=self.tokens, kept=kept, owner=self.owner).become_idle()


@dataclass(frozen=True, slots=True)
class KeptTexts:
    """Idle KV caches: how many of them hold a text, and the bytes of all."""

    count: int
    num_bytes: int


class KVCachePool:
    """Lends slots for sequences of one model.

    It keeps one idle slot, and as many more as fit into the memory of `prefixes`; the oldest are given up first. Threads may
    share a pool. What was lent only ever returns to the pool that lent it, so a sequence that began before the weights were
    copied again cannot hand its old keys and values to a later one. row_bytes: memory of a token.
    """

    def __init__(self, model: LayerSkipModel, prefixes: PrefixCache) -> None:
        self._model, self._prefixes = model, prefixes
        self.row_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * model.kv_dtype.itemsize
        self._idle: list[CacheSlot] = []  # the one that was used last at the end
        self._lent: list[CacheSlot] = []
        self._returned: list[CacheSlot] = []  # not among the idle ones yet
        self._times_forgotten = 0
        self._is_changing = False
        self._lock = fork_safe(threading.RLock())  # re-entered when a stream is finalised by the garbage collector

    @property
    def reuses(self) -> bool:
        """True if a prompt may go on from a kept text. On our own kernels a row's bits depend only on its text."""
        use = self._prefixes.use
        return use == "always" or (use == "exact" and self._model.kernels is not None)

    @property
    def kept_texts(self) -> KeptTexts:
        with self._lock:
            return KeptTexts(sum(bool(slot.text) for slot in self._idle), self._idle_bytes)

    @property
    def _idle_bytes(self) -> int:
        return sum(slot.num_bytes for slot in self._idle)

    @contextmanager
    def lend(self, num_tokens: int, prompt: Tensor | None = None, owner: Owner = ANYONE) -> Iterator[CacheSlot]:
        """Lend a slot for `num_tokens` tokens. It holds the rows that a kept text of this owner shares with the prompt."""
        with self._changing():
            before = self._times_forgotten
            slot = self._find(num_tokens, prompt, owner)
            slot.tokens, slot.owner = _no_tokens(), owner
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
            for slot in (*self._idle, *self._returned, *self._lent):
                slot.forget()
                slot.read = None
            for slot in self._idle:
                slot.become_idle()

    def give_back(self) -> None:
        """Free memory that no text needs: idle caches without text, and the room after texts that are kept."""
        with self._changing():
            needed = [slot for slot in self._idle if slot.text]
            self._idle = [slot.shrunk(self._model) if slot.has_spare_room else slot for slot in needed]

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
        best, rows = None, 0
        wanted = as_bytes(prompt)
        for slot in reversed(self._idle):
            # Comparing bytes is fast, and most texts have no more in common with the prompt than the best one so far.
            longer = wanted[: TOKEN_BYTES * (rows + 1)]
            if slot.owner == owner and rows < len(prompt) and slot.text.startswith(longer):
                best, rows = slot, num_common(slot.tokens, prompt)
        for slot in self._lent:
            if slot.owner == owner:
                alike = num_common(slot.tokens if slot.read is None else slot.read(), prompt)
                if alike > rows:
                    best, rows = slot, alike
        return best, rows

    def _with_room(self, num_tokens: int, source: CacheSlot | None, rows: int) -> CacheSlot | None:
        """Take an idle slot to overwrite: the one with the sequence's own prefix, or one that would be given
        up for the sequence's memory."""
        room = self._prefixes.num_bytes - num_tokens * self.row_bytes - self._idle_bytes
        found: CacheSlot | None = None
        own = source is not None and source in self._idle
        if source is not None and own and len(source.tokens) - rows <= SMALL_LOSS:
            self._idle.remove(source)
            found = source
            room += source.num_bytes
        while room < 0 and (found is None or found.cache.max_length < num_tokens):
            if not self._idle:
                break
            found = next((slot for slot in self._idle if slot is not source), self._idle[0])
            self._idle.remove(found)
            room += found.num_bytes
        return found if found is not None and found.cache.max_length >= num_tokens else None

    def _take_back(self, slot: CacheSlot) -> None:
        """Take back a slot that is idle again. Slots that no longer fit are given up."""
        slot.become_idle()
        limit = self._prefixes.num_bytes
        if not limit:
            self._idle = [max([slot, *self._idle], key=lambda one: one.cache.max_length)]
            return
        # Texts that are prefixes of this one are not needed any more.
        texts = [one for one in self._idle if one.text]
        self._idle = [one for one in texts if one.owner != slot.owner or not slot.text.startswith(one.text)]
        self._idle.append(slot)
        for place, one in enumerate(self._idle):
            if self._idle_bytes <= limit:
                break
            if one.has_spare_room:
                self._idle[place] = one.shrunk(self._model)
        while len(self._idle) > 1 and (self._idle_bytes > limit or len(self._idle) > MAX_KEPT):
            del self._idle[0]
