"""Slots of the KV cache pool. Idle ones still hold the text of their last sequence, and are found by it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.kv_cache import KVCache
from selfspec.cache.prefix_cache import ANYONE, Owner, num_common
from selfspec.engine.hidden_states import PrefixHiddenStates

_TOKEN_BYTES = 4


def no_tokens() -> Tensor:
    return torch.empty(0, dtype=torch.long, device="cpu")


@dataclass(slots=True, eq=False)
class CacheSlot:
    """A KV cache for one sequence.

    tokens: of the text that an idle slot holds, int64 [rows] on the CPU. kept: the hidden states of that text.
    read: while a sequence uses the slot, returns those of its tokens whose rows are final. owner: of the text.
    """

    cache: KVCache
    tokens: Tensor = field(default_factory=no_tokens)
    kept: PrefixHiddenStates | None = None
    read: Callable[[], Tensor] | None = None
    owner: Owner = ANYONE

    @property
    def num_bytes(self) -> int:
        states = 0 if self.kept is None else self.kept.rows.numel() * self.kept.rows.element_size()
        return self.cache.num_bytes + states

    @property
    def has_spare_room(self) -> bool:
        """Whether the text would fit into half of the cache."""
        return self.cache.max_length > 2 * len(self.tokens) > 0

    def copy(self, model: LayerSkipModel, rows: int) -> CacheSlot:
        """Copy the slot with the first rows of the text, in as little memory as they need."""
        cache = KVCache(model, rows)
        cache.take(self.cache, rows)
        kept = None if self.kept is None else PrefixHiddenStates(self.kept.layers, self.kept.rows[:, :rows].clone())
        return CacheSlot(cache, tokens=self.tokens[:rows], kept=kept, owner=self.owner)

    def begin_sequence(self, read: Callable[[], Tensor]) -> None:
        """Let a sequence use the slot. Others may go on from the tokens `read` returns, but not from hidden states."""
        self.read, self.kept = read, None

    def reusable_tokens(self) -> Tensor:
        """Return the tokens that a prompt must begin with to go on from this cache."""
        return self.tokens if self.read is None else self.read()

    def end_sequence(self, tokens: Tensor, kept: PrefixHiddenStates | None) -> None:
        """Keep the text of a sequence that has ended. tokens: int64 [rows], of the cache's first rows."""
        self.tokens, self.kept = tokens.to("cpu", copy=True), kept

    def forget(self) -> None:
        self.tokens, self.kept = no_tokens(), None


@dataclass(frozen=True, slots=True)
class _Entry:
    """A slot as it was when it became idle. text: its tokens as bytes, which sort as the tokens do."""

    slot: CacheSlot
    num_bytes: int
    text: bytes


class IdleSlots:
    """Slots that no sequence uses, in the order of their last use.

    A lookup takes about as long for thousands of slots as for one. Bytes are added up as slots come and go. Each owner's
    texts are sorted, so the text with the longest prefix in common with a prompt is a neighbour of the prompt's place.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # by number; later ones have larger numbers
        self._numbers: dict[CacheSlot, int] = {}
        self._next = 0
        self._texts: dict[Owner, list[tuple[bytes, int]]] = {}  # sorted
        self._without_text: dict[int, CacheSlot] = {}
        self._with_spare_room: OrderedDict[int, CacheSlot] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[CacheSlot]:
        return iter([entry.slot for entry in self._entries.values()])

    def __contains__(self, slot: object) -> bool:
        return slot in self._numbers

    @property
    def num_texts(self) -> int:
        return len(self._entries) - len(self._without_text)

    def add(self, slot: CacheSlot) -> None:
        """Add the slot that was used last. Its text and its memory must not change while it is here."""
        self._put(self._next, slot)
        self._next += 1

    def replace(self, slot: CacheSlot, other: CacheSlot) -> None:
        """Replace a slot by a copy without spare room, which counts as last used when the slot was."""
        number = self._numbers[slot]
        self._forget(number)
        self._put(number, other)

    def remove(self, slot: CacheSlot) -> None:
        """Remove the slot. Raises KeyError if it is not here."""
        number = self._numbers[slot]
        self._forget(number)
        del self._entries[number]

    def oldest(self, *, but: CacheSlot | None = None) -> CacheSlot | None:
        """Find the slot used longest ago, if there is one. `but` comes last."""
        found = None
        for entry in self._entries.values():
            if entry.slot is not but:
                return entry.slot
            found = entry.slot
        return found

    def with_spare_room(self) -> CacheSlot | None:
        """Find the slot used longest ago whose text needs less than half of its cache."""
        return next(iter(self._with_spare_room.values()), None)

    def longest_prefix(self, prompt: Tensor, owner: Owner) -> tuple[CacheSlot | None, int]:
        """Find this owner's slot whose text shares the longest prefix with the prompt, and the prefix's length."""
        texts = self._texts.get(owner, [])
        at = bisect_left(texts, (_as_bytes(prompt), 0))
        best, rows, newest = None, 0, -1
        for _, number in texts[max(0, at - 1) : at + 1]:
            slot = self._entries[number].slot
            alike = num_common(slot.tokens, prompt)
            if (alike, number) > (rows, newest) and alike:
                best, rows, newest = slot, alike, number
        return best, rows

    def prefixes_of(self, tokens: Tensor, owner: Owner) -> list[CacheSlot]:
        """Slots whose whole text is a prefix of these tokens, of the same owner; and slots without text."""
        found = list(self._without_text.values())
        texts, whole = self._texts.get(owner, []), _as_bytes(tokens)
        at = bisect_right(texts, (whole, self._next))
        while at:
            text, number = texts[at - 1]
            if whole.startswith(text):
                found.append(self._entries[number].slot)
                at -= 1
            else:  # where the two differ, all that is sorted between this text and that prefix differs as well
                alike = num_common(self._entries[number].slot.tokens, tokens)
                at = bisect_right(texts, (whole[: alike * _TOKEN_BYTES], self._next), 0, at - 1)
        return found

    def forget_texts(self) -> None:
        for slot in self:
            number = self._numbers[slot]
            self._forget(number)
            slot.forget()
            self._put(number, slot)

    def clear(self) -> None:
        for slot in self:
            self.remove(slot)

    def _put(self, number: int, slot: CacheSlot) -> None:
        entry = _Entry(slot, slot.num_bytes, _as_bytes(slot.tokens))
        self._entries[number], self._numbers[slot] = entry, number
        self.num_bytes += entry.num_bytes
        if entry.text:
            insort(self._texts.setdefault(slot.owner, []), (entry.text, number))
        else:
            self._without_text[number] = slot
        if slot.has_spare_room:
            self._with_spare_room[number] = slot

    def _forget(self, number: int) -> None:
        """Forget all of an entry but its place in the order."""
        entry = self._entries[number]
        del self._numbers[entry.slot]
        self.num_bytes -= entry.num_bytes
        if entry.text:
            texts = self._texts[entry.slot.owner]
            del texts[bisect_left(texts, (entry.text, number))]
            if not texts:
                del self._texts[entry.slot.owner]
        for others in (self._without_text, self._with_spare_room):
            others.pop(number, None)


def _as_bytes(tokens: Tensor) -> bytes:
    """Tokens as bytes that sort as the tokens do."""
    return tokens.numpy().astype(f">u{_TOKEN_BYTES}").tobytes()
