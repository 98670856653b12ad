"""Answers that later texts may copy from: several owners' in one bound of memory, the oldest forgotten first.

SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975) keeps earlier outputs in suffix trees, shared by all requests, and takes
the continuation that followed most often. Here each owner's are separate, and the most recent continuation counts, as in a
text's own index: one entry for each suffix of 2 to 8 tokens.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Hashable, Sequence
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from policies.copying import SHORTEST
from selfspec.cache.copy_index import BETWEEN, LONGEST, CopyStore, suffix_hashes

ENTRY_BYTES = 240
"""Memory of an entry, counted at its most: two integers, and a dictionary that has just grown."""
ANSWER_BYTES = 512
"""Memory of an answer beside its tokens and entries."""
_PLACES = 32  # bits of a place within an answer


class AnswerStore:
    """One owner's answers. `AnswerStores` adds to it and takes from it, in the thread that decodes.

    A text that copies from an answer keeps it alive to its end, also if it is forgotten meanwhile.
    files: also to copy from, after the answers. largest_token: one below the size of the vocabulary.
    """

    def __init__(self, largest_token: int, files: CopyStore | None = None) -> None:
        self.largest_token = largest_token
        self._files = files
        self._answers: deque[array[int]] = deque()
        self._first = 0  # number of the oldest answer
        self._places: dict[int, int] = {}  # by a suffix's hash: number of the answer, and where in it the suffix ends
        self._most_places = 0  # that the dictionary has held

    def __len__(self) -> int:
        """Number of answers."""
        return len(self._answers)

    @property
    def num_bytes(self) -> int:
        tokens = sum(len(answer) * answer.itemsize for answer in self._answers)
        return tokens + len(self._answers) * ANSWER_BYTES + len(self._places) * ENTRY_BYTES

    def find(self, hashed: int) -> tuple[array[int], int] | None:
        """As `CopySource.find`; in the latest answer that has it."""
        found = self._places.get(hashed)
        if found is None:
            return None if self._files is None else self._files.find(hashed)
        return self._answers[(found >> _PLACES) - self._first], found & (1 << _PLACES) - 1

    def add(self, tokens: Sequence[int]) -> int:
        """Take in an answer. Returns the bytes that this added."""
        before = len(self._places)
        text = np.asarray(tokens, dtype=np.int32)
        answer = array("i", text.tobytes()) + array("i", [BETWEEN])
        number = self._first + len(self._answers) << _PLACES
        for start, hashes in suffix_hashes(text):
            self._places.update(zip(hashes.tolist(), range(number + start, number + len(text))))
        self._answers.append(answer)
        self._most_places = max(self._most_places, len(self._places))
        return _fixed_bytes(answer) + (len(self._places) - before) * ENTRY_BYTES

    def drop_oldest(self) -> int:
        """Forget the oldest answer. Returns the bytes that this freed."""
        places, before = self._places, len(self._places)
        answer = self._answers.popleft()
        text: NDArray[np.int32] = np.frombuffer(answer, dtype=np.int32)[:-1]
        for _, hashes in suffix_hashes(text):
            for hashed in hashes.tolist():
                if places.get(hashed, -1) >> _PLACES == self._first:  # else a later answer has it, too
                    del places[hashed]
        self._first += 1
        if len(places) < 0.75 * self._most_places:
            # A dictionary keeps its room when it loses entries, and so does a copy of it, unless it is filled one by one.
            self._places, self._most_places = dict(iter(places.items())), len(places)
        return _fixed_bytes(answer) + (before - len(places)) * ENTRY_BYTES


def _fixed_bytes(answer: array[int]) -> int:
    return len(answer) * answer.itemsize + ANSWER_BYTES


class AnswerStores:
    """The answers of all owners, in `most_bytes` together. Any thread may ask for a store; one adds answers.

    vocab_size: of the model. files: what every owner may copy from.
    num_bytes: held now, counted at their most. num_answers: held now. num_dropped: forgotten since the start.
    """

    def __init__(self, most_bytes: int, vocab_size: int, files: CopyStore | None = None) -> None:
        if most_bytes < 1:
            raise ValueError(f"the answers to copy from need at least 1 byte, got {most_bytes}")
        self.most_bytes, self._vocab_size, self._files = most_bytes, vocab_size, files
        self.num_bytes = self.num_dropped = 0
        self._lock = threading.Lock()
        self._stores: WeakValueDictionary[Hashable, AnswerStore] = WeakValueDictionary()
        self._order: deque[AnswerStore] = deque()  # whose each answer is, oldest first

    @property
    def num_answers(self) -> int:
        return len(self._order)

    def of(self, owner: Hashable) -> AnswerStore:
        """The store of an owner. It lives as long as it has an answer, or a text has it."""
        with self._lock:
            store = self._stores.get(owner)
            if store is None:
                store = self._stores[owner] = AnswerStore(self._vocab_size - 1, self._files)
            return store

    def add(self, store: AnswerStore, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Keep an answer, and forget the oldest ones of all owners until all fit. One that does not fit alone is not kept.

        prompt: its last tokens are kept, too, so that a prompt that ends alike copies from the first token on.
        """
        tokens = [*prompt[-LONGEST:], *answer]
        if not answer or _most_bytes(len(tokens)) > self.most_bytes:
            return
        self.num_bytes += store.add(tokens)
        self._order.append(store)
        while self.num_bytes > self.most_bytes:
            self.num_bytes -= self._order.popleft().drop_oldest()
            self.num_dropped += 1


def _most_bytes(num_tokens: int) -> int:
    """The most that an answer of so many tokens takes."""
    suffixes = sum(max(0, num_tokens + 1 - length) for length in range(SHORTEST, LONGEST + 1))
    return ANSWER_BYTES + 4 * (num_tokens + 1) + suffixes * ENTRY_BYTES
