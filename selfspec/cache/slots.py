"""Where texts live: a place is a KV cache and what belongs to it. Idle ones are found by the text that they still hold."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.kv_cache import KVCache
from selfspec.cache.prefix_cache import ANYONE, Owner, num_alike
from selfspec.engine.hidden_states import PrefixHiddenStates
from selfspec.engine.runners.cuda_graph.runner import CudaGraphRunner

_TOKEN_BYTES = 4


def no_tokens() -> Tensor:
    """The owner of a slot that holds no text."""
    return torch.empty(0, dtype=torch.long, device="cpu")


@dataclass(slots=True, eq=False)
class CacheSlot:
    """Where a text lives: its KV cache, and the passes that were captured on that cache, if there are any.

    tokens: of the text that it holds while it is idle, int64 [rows] on the CPU. kept: that text's hidden states.
    read: while a text lives here, returns those of its tokens whose rows are final and will stay. owner: of the text.
    """

    cache: KVCache
    captured: CudaGraphRunner | None = None
    tokens: Tensor = field(default_factory=no_tokens)
    kept: PrefixHiddenStates | None = None
    read: Callable[[], Tensor] | None = None
    owner: Owner = ANYONE

    @property
    def capacity(self) -> tuple[bool, int, int]:
        """What a later text would otherwise have to make anew: captures, then room, then more captures."""
        made = 0 if self.captured is None else self.captured.num_captures
        return self.captured is not None, self.cache.max_length, made

    @property
    def num_bytes(self) -> int:
        """Bytes of memory."""
        states = 0 if self.kept is None else self.kept.rows.numel() * self.kept.rows.element_size()
        return self.cache.num_bytes + states

    @property
    def has_spare_room(self) -> bool:
        """Whether its text would fit into half of its cache, which no captured pass needs."""
        return self.captured is None and self.cache.max_length > 2 * len(self.tokens) > 0

    def settle(self) -> None:
        """What the last text's passes still write comes before all that is launched from now on, on whatever stream."""
        if self.captured is not None:
            self.captured.begin()

    def copy(self, model: LayerSkipModel, rows: int) -> CacheSlot:
        """The first rows of its text in as little memory as they need, without captures."""
        cache = KVCache(model, rows)
        cache.take(self.cache, rows)
        kept = None if self.kept is None else PrefixHiddenStates(self.kept.layers, self.kept.rows[:, :rows].clone())
        return CacheSlot(cache, tokens=self.tokens[:rows], kept=kept, owner=self.owner)

    def share(self, read: Callable[[], Tensor]) -> None:
        """A text lives here now, and others may go on from what it has read. Hidden states are its own until it ends."""
        self.read, self.kept = read, None

    def shared(self) -> Tensor:
        """The tokens that a prompt may begin with in order to go on from here."""
        return self.tokens if self.read is None else self.read()

    def leave(self, tokens: Tensor, kept: PrefixHiddenStates | None) -> None:
        """The text ends here. tokens: int64 [rows], those that the cache's first rows belong to."""
        self.tokens, self.kept = tokens.to("cpu", copy=True), kept

    def forget(self) -> None:
        """Whatever text it held."""
        self.tokens, self.kept = no_tokens(), None


@dataclass(frozen=True, slots=True)
class _Entry:
    """A place as it is while it is idle. text: its tokens as bytes, which sort as the tokens do."""

    place: CacheSlot
    num_bytes: int
    text: bytes


class IdlePlaces:
    """Places that no text uses, the one that was used last is last.

    What is asked of them for each text takes about as long for thousands of places as for one: bytes are added up as places
    come and go, and each owner's texts are sorted, so that the one most like a prompt stands beside where the prompt would.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # by number; later ones have larger numbers
        self._numbers: dict[CacheSlot, int] = {}
        self._next = 0
        self._texts: dict[Owner, list[tuple[bytes, int]]] = {}  # sorted
        self._without_text: dict[int, CacheSlot] = {}
        self._with_spare_room: OrderedDict[int, CacheSlot] = OrderedDict()
        self._captured: dict[int, CacheSlot] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[CacheSlot]:
        return iter([entry.place for entry in self._entries.values()])

    def __contains__(self, place: object) -> bool:
        return place in self._numbers

    @property
    def num_texts(self) -> int:
        return len(self._entries) - len(self._without_text)

    def add(self, place: CacheSlot) -> None:
        """As the one that was used last. While it is here its text and its memory stay as they are."""
        self._put(self._next, place)
        self._next += 1

    def replace(self, place: CacheSlot, other: CacheSlot) -> None:
        """By a copy without spare room, which counts as used when the place was."""
        number = self._numbers[place]
        self._forget(number)
        self._put(number, other)

    def remove(self, place: CacheSlot) -> None:
        """Raises KeyError if it is not here."""
        number = self._numbers[place]
        self._forget(number)
        del self._entries[number]

    def oldest(self, *, but: CacheSlot | None = None, captured: bool = True) -> CacheSlot | None:
        """The slot used longest ago; None if there is none. `but` comes last. Slots with captures only if `captured`."""
        found = None
        for entry in self._entries.values():
            if captured or entry.place.captured is None:
                if entry.place is not but:
                    return entry.place
                found = entry.place
        return found

    def captured(self, num_tokens: int) -> list[CacheSlot]:
        """A slot with captures and room for this many tokens, or None."""
        able = [(number, place) for number, place in self._captured.items() if place.cache.max_length >= num_tokens]
        return [place for _, place in sorted(able, key=lambda one: one[0])]

    def with_spare_room(self) -> CacheSlot | None:
        """The oldest whose text needs less than half of its cache."""
        return next(iter(self._with_spare_room.values()), None)

    def most_alike(self, prompt: Tensor, owner: Owner) -> tuple[CacheSlot | None, int]:
        """The place whose text, of this owner, has the longest beginning in common with the prompt, and how long that is."""
        texts = self._texts.get(owner, [])
        at = bisect_left(texts, (_as_bytes(prompt), 0))
        best, rows, newest = None, 0, -1
        for _, number in texts[max(0, at - 1) : at + 1]:
            place = self._entries[number].place
            alike = num_alike(place.tokens, prompt)
            if (alike, number) > (rows, newest) and alike:
                best, rows, newest = place, alike, number
        return best, rows

    def beginnings_of(self, tokens: Tensor, owner: Owner) -> list[CacheSlot]:
        """Those with all of whose text this one of the same owner begins, and those that hold none."""
        found = list(self._without_text.values())
        texts, whole = self._texts.get(owner, []), _as_bytes(tokens)
        at = bisect_right(texts, (whole, self._next))
        while at:
            text, number = texts[at - 1]
            if whole.startswith(text):
                found.append(self._entries[number].place)
                at -= 1
            else:  # where the two part, all that stands between this text and that beginning parts as well
                alike = num_alike(self._entries[number].place.tokens, tokens)
                at = bisect_right(texts, (whole[: alike * _TOKEN_BYTES], self._next), 0, at - 1)
        return found

    def forget_texts(self) -> None:
        """Bytes of all slots together."""
        for place in self:
            number = self._numbers[place]
            self._forget(number)
            place.forget()
            self._put(number, place)

    def clear(self) -> None:
        """Give all up."""
        for place in self:
            self.remove(place)

    def _put(self, number: int, place: CacheSlot) -> None:
        entry = _Entry(place, place.num_bytes, _as_bytes(place.tokens))
        self._entries[number], self._numbers[place] = entry, number
        self.num_bytes += entry.num_bytes
        if entry.text:
            insort(self._texts.setdefault(place.owner, []), (entry.text, number))
        else:
            self._without_text[number] = place
        if place.has_spare_room:
            self._with_spare_room[number] = place
        if place.captured is not None:
            self._captured[number] = place

    def _forget(self, number: int) -> None:
        """All but its turn among the others."""
        entry = self._entries[number]
        del self._numbers[entry.place]
        self.num_bytes -= entry.num_bytes
        if entry.text:
            texts = self._texts[entry.place.owner]
            del texts[bisect_left(texts, (entry.text, number))]
            if not texts:
                del self._texts[entry.place.owner]
        for others in (self._without_text, self._with_spare_room, self._captured):
            others.pop(number, None)


def _as_bytes(tokens: Tensor) -> bytes:
    """Tokens on the CPU so that bytes sort as they do."""
    return tokens.numpy().astype(f">u{_TOKEN_BYTES}").tobytes()
