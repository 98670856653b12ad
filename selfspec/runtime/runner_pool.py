"""KV caches and passes that no text is using. Each text takes a cache for itself and gives it back when it ends.

A cache that comes back still holds its text, and a later text that begins alike goes on from there (docs/chat.md).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.kv_cache import KVCache
from selfspec.eager import EagerPasses
from selfspec.graphs.captured_runner import CapturedRunner, captured_length
from selfspec.hidden_states import KeptStates
from selfspec.passes import RunnerName
from selfspec.runtime.prefix_cache import ANYONE, MOST_KEPT, Owner, PrefixCache, num_alike

SMALL_LOSS = 32
"""Rows of a kept text that a text which goes on from it may write over. Policies have about as many read again anyway. If
more would be lost, the rows that both begin with are copied, and the kept text stays."""


def _no_tokens() -> Tensor:
    return torch.empty(0, dtype=torch.long, device="cpu")


@dataclass(slots=True, eq=False)
class Place:
    """Where a text lives: its KV cache, and the passes that were captured on that cache, if there are any.

    tokens: of the text that it holds while it is idle, int64 [rows] on the CPU. kept: that text's hidden states.
    read: while a text lives here, returns those of its tokens whose rows are final and will stay. owner: of the text.
    """

    cache: KVCache
    captured: CapturedRunner | None = None
    tokens: Tensor = field(default_factory=_no_tokens)
    kept: KeptStates | None = None
    read: Callable[[], Tensor] | None = None
    owner: Owner = ANYONE

    @property
    def capacity(self) -> tuple[bool, int, int]:
        """What a later text would otherwise have to make anew: captures, then room, then more captures."""
        made = 0 if self.captured is None else self.captured.num_captures
        return self.captured is not None, self.cache.max_length, made

    @property
    def num_bytes(self) -> int:
        """Of memory."""
        states = 0 if self.kept is None else self.kept.rows.numel() * self.kept.rows.element_size()
        return self.cache.num_bytes + states

    def settle(self) -> None:
        """What the last text's passes still write comes before all that is launched from now on, on whatever stream."""
        if self.captured is not None:
            self.captured.begin()

    def copy(self, model: LayerSkipModel, rows: int) -> Place:
        """The first rows of its text in as little memory as they need, without captures."""
        cache = KVCache(model, rows)
        cache.take(self.cache, rows)
        kept = None if self.kept is None else KeptStates(self.kept.layers, self.kept.rows[:, :rows].clone())
        return Place(cache, tokens=self.tokens[:rows], kept=kept, owner=self.owner)

    def share(self, read: Callable[[], Tensor]) -> None:
        """A text lives here now, and others may go on from what it has read. Hidden states are its own until it ends."""
        self.read, self.kept = read, None

    def shared(self) -> Tensor:
        """The tokens that a prompt may begin with in order to go on from here."""
        return self.tokens if self.read is None else self.read()

    def leave(self, tokens: Tensor, kept: KeptStates | None) -> None:
        """The text ends here. tokens: int64 [rows], those that the cache's first rows belong to."""
        self.tokens, self.kept = tokens.to("cpu", copy=True), kept

    def is_beginning_of(self, other: Place) -> bool:
        """Whether the same owner's other text begins with all of this one."""
        rows = len(self.tokens)
        return not rows or (
            self.owner == other.owner and rows <= len(other.tokens) and bool(self.tokens.equal(other.tokens[:rows]))
        )

    def forget(self) -> None:
        """Whatever text it held."""
        self.tokens, self.kept = _no_tokens(), None


@dataclass(frozen=True, slots=True)
class KeptTexts:
    """Idle KV caches: how many of them hold a text, and the bytes of all."""

    count: int
    num_bytes: int


class RunnerPool:
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
        self._idle: list[Place] = []  # the one that was used last is last
        self._lent: list[Place] = []
        self._returned: list[Place] = []  # not among the idle ones yet
        self._times_forgotten = 0
        self._is_changing = False
        self._idle_passes: EagerPasses | None = None
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
            return KeptTexts(sum(place.tokens.numel() > 0 for place in self._idle), self._num_bytes())

    @contextmanager
    def lend(
        self, num_tokens: int, prompt: Tensor | None = None, owner: Owner = ANYONE, *, alone: bool = True
    ) -> Iterator[Place]:
        """A place for one text of at most `num_tokens` tokens.

        prompt: int64 [n] on the CPU. Its KV cache holds the rows that a kept text begins with as the prompt does, and is
        empty if there is none. owner: of the text; kept ones of others are not looked at. alone: whether the text begins
        without company. In company it runs eagerly, so it gets no captures, whose cache is longer than most texts.
        """
        with self._changing():
            before = self._times_forgotten
            place = self._find(num_tokens, prompt, owner, self.kind == "captured" and alone)
            place.tokens, place.owner = _no_tokens(), owner
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

    def forget(self) -> None:
        """Use no text that has been read so far: the weights are others now."""
        with self._changing():
            self._times_forgotten += 1
            for place in (*self._idle, *self._returned, *self._lent):
                place.forget()
                place.read = None

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

    def _find(self, num_tokens: int, prompt: Tensor | None, owner: Owner, captured: bool) -> Place:
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

    def _most_alike(self, prompt: Tensor | None, owner: Owner) -> tuple[Place | None, int]:
        """The place whose text, of the same owner, has the longest beginning in common with the prompt, and how long that is.

        Captured passes may write over a whole cache, for padding or after a failure: of texts that still live, only those
        without captures are looked at.
        """
        best: Place | None = None
        rows = 0
        if prompt is not None and self.reuses:
            living = [place for place in self._lent if place.captured is None]
            for place in (*self._idle[::-1], *living):
                if place.owner != owner:
                    continue
                alike = num_alike(place.shared(), prompt)
                if alike > rows:
                    best, rows = place, alike
        return best, rows

    def _with_room(self, num_tokens: int, source: Place | None, rows: int) -> Place | None:
        """An idle place without captures to write over: the text's own beginning, or what would be given up for the new
        text's memory."""
        room = self._prefixes.num_bytes - num_tokens * self._row_bytes - self._num_bytes()
        found: Place | None = None
        able = [place for place in self._idle if place.captured is None]
        if source in able and len(source.tokens) - rows <= SMALL_LOSS:
            able.remove(source)
            found = source
            room += source.num_bytes
        while able and room < 0:
            if found is not None and found.cache.max_length >= num_tokens:
                break
            found = next((place for place in able if place is not source), able[0])
            able.remove(found)
            room += found.num_bytes
        self._idle = [place for place in self._idle if place in able or place.captured is not None]
        return found if found is not None and found.cache.max_length >= num_tokens else None

    def _with_captures(self, num_tokens: int, source: Place | None, rows: int) -> Place | None:
        """An idle place with captures, which take long to make. Its text moves elsewhere if there is memory for that."""
        able = [one for one in self._idle if one.captured is not None and one.cache.max_length >= num_tokens]
        if not able:
            return None
        found = source if source in able else able[-1]
        at = self._idle.index(found)
        self._idle.remove(found)
        found.settle()
        held = found.tokens.numel()
        both = found.num_bytes + self._row_bytes * held
        lost = held - (rows if found is source else 0)
        if lost > SMALL_LOSS and self._num_bytes() + both <= self._prefixes.num_bytes:
            self._idle.insert(at, found.copy(self._model, held))
        return found

    def _take_back(self, place: Place) -> None:
        """What was lent is idle again; what is then too much is given up."""
        if place.captured is not None and self.kind == "eager":
            return
        limit = self._prefixes.num_bytes
        if not limit:
            self._idle = [max([place, *self._idle], key=lambda one: one.capacity)]
            return
        # A text that is no more than this one's beginning is not needed any more.
        self._idle = [one for one in self._idle if one.captured or not one.is_beginning_of(place)]
        self._idle.append(place)
        too_much = self._num_bytes() - limit
        for index, one in enumerate(self._idle):
            if too_much <= 0:
                break
            rows = len(one.tokens)
            if one.captured is None and one.cache.max_length > 2 * rows > 0:
                self._idle[index] = one.copy(self._model, rows)
                too_much += self._idle[index].num_bytes - one.num_bytes
        with_captures = next((one for one in reversed(self._idle) if one.captured is not None), None)
        while len(self._idle) > 1 and (too_much > 0 or len(self._idle) > MOST_KEPT):
            oldest = next(one for one in self._idle if one is not with_captures)
            self._idle.remove(oldest)
            too_much -= oldest.num_bytes

    def _num_bytes(self) -> int:
        return sum(place.num_bytes for place in self._idle)

    def _make(self, num_tokens: int, captured: bool) -> Place:
        if captured:
            place: Place | None = None
            failure = RuntimeError("another process of the model has no room for them")
            try:
                cache = KVCache(self._model, captured_length(num_tokens, self._model.max_positions))
                place = Place(cache, CapturedRunner(self._model, cache))
            except RuntimeError as error:  # no memory for its buffers, say
                failure = error
            if self._model.all_agree(place is not None) and place is not None:
                return place
            self.give_up_graphs(failure)
        return Place(KVCache(self._model, num_tokens))
