"""Answers that later texts copy from: found as by a search, the oldest forgotten first, and nobody sees another's."""

from __future__ import annotations

import gc
import tracemalloc
from collections import deque
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batched_runs import LAYOUTS, Wish, generator_of, run_alone, run_together, shared_model
from layerskip_models.linear import Layout
from policies.copying import SHORTEST
from selfspec.cache.answer_store import AnswerStore, AnswerStores
from selfspec.cache.copy_index import LONGEST, CopyIndex, CopyStore
from selfspec.cache.copy_sources import CopyFrom
from tiny_llama import VOCAB_SIZE

ANSWERS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), max_size=10)


def continued(store: AnswerStore, text: list[int], count: int = 4) -> tuple[int, list[int]]:
    """How long the match at the end of a text is, and what would be copied."""
    index = CopyIndex(store)
    index.read(torch.tensor(text, dtype=torch.long))
    return (0 if index.match is None else index.match.length), index.continuation(count)


def searched(answers: list[list[int]], end: list[int], count: int = 4) -> tuple[int, list[int]]:
    """The same by looking everywhere, for a text in which nothing occurs twice."""
    for length in range(min(LONGEST, len(end)), SHORTEST - 1, -1):
        for answer in reversed(answers):
            for place in range(len(answer), length - 1, -1):
                if answer[place - length : place] == end[-length:]:
                    return (length, answer[place : place + count]) if place < len(answer) else (0, [])
    return 0, []


@given(
    answers=ANSWERS, dropped=st.integers(0, 10), end=st.lists(st.integers(0, 2), min_size=2, max_size=2, unique=True)
)
def test_a_store_finds_the_latest_of_its_answers(answers: list[list[int]], dropped: int, end: list[int]) -> None:
    """Also after the oldest are gone, and as if they had never been."""
    store = AnswerStore(9)
    added = [store.add(answer) for answer in answers]
    freed = [store.drop_oldest() for _ in range(min(dropped, len(answers)))]
    assert sum(added) - sum(freed) == store.num_bytes
    left = answers[len(freed) :]
    assert len(store) == len(left)
    assert continued(store, end) == searched(left, end)
    fresh = AnswerStore(9)
    for answer in left:
        fresh.add(answer)
    assert fresh.num_bytes == store.num_bytes
    if len(freed) == len(answers):
        assert store.num_bytes == 0


def test_longer_matches_and_the_end_of_an_answer() -> None:
    store = AnswerStore(99)
    store.add([*range(20, 40)])
    assert continued(store, [1, *range(22, 36)]) == (14, [36, 37, 38, 39])
    assert continued(store, [1, 38, 39]) == (0, [])  # nothing followed
    store.add([38, 39, 5])
    assert continued(store, [1, 38, 39]) == (2, [5])


def test_files_come_after_answers() -> None:
    store = AnswerStore(99, CopyStore([[1, 2, 3, 4], [7, 8, 9]]))
    assert continued(store, [0, 1, 2, 3]) == (3, [4])
    store.add([2, 3, 6])
    assert continued(store, [0, 2, 3]) == (2, [6])
    assert continued(store, [0, 1, 2, 3]) == (3, [4])  # longer there
    store.drop_oldest()
    assert continued(store, [0, 2, 3]) == (2, [4])


class TestSeveralOwners:
    def test_nothing_of_one_is_ever_copied_for_another(self) -> None:
        """Each owner has tokens of its own, all the same pairs in front of them."""
        stores, random = AnswerStores(1 << 20, 1000), Random(0)
        owners = {name: stores.of(name) for name in ("a", "b", "c")}
        for _ in range(60):
            number = random.randrange(3)
            own = [1, 2, 100 * (number + 1) + random.randrange(100), 3, 4, 100 * (number + 1) + random.randrange(100)]
            stores.add(owners["abc"[number]], [5, 6], own)
        for number, store in enumerate(owners.values()):
            for end in ([9, 1, 2], [9, 3, 4], [9, 5, 6, 1]):
                length, copied = continued(store, end, 3)
                assert length and copied
                for token in copied:
                    assert token < 100 or token // 100 == number + 1
        assert continued(stores.of("d"), [9, 1, 2]) == (0, [])

    def test_the_oldest_answer_of_anybody_goes_first(self) -> None:
        stores = AnswerStores(1 << 30, 1000)
        one, other = stores.of("one"), stores.of("other")
        stores.add(one, [], [1, 2, 10])
        stores.add(other, [], [1, 2, 20])
        stores.add(one, [], [3, 4, 11])
        stores.most_bytes = stores.num_bytes
        stores.add(one, [], [5, 6, 12])
        assert (stores.num_answers, stores.num_dropped) == (3, 1)
        assert continued(one, [9, 1, 2]) == (0, [])
        assert continued(other, [9, 1, 2]) == (2, [20])
        stores.add(one, [], [7, 8, 13])
        assert continued(other, [9, 1, 2]) == (0, [])
        assert continued(one, [9, 3, 4]) == (2, [11])

    def test_an_answer_that_does_not_fit_alone_is_not_kept(self) -> None:
        stores = AnswerStores(20_000, 1000)
        store = stores.of("one")
        stores.add(store, [], [1, 2, 3])
        stores.add(store, [], [4] * 1000)
        assert (stores.num_answers, stores.num_dropped) == (1, 0)
        stores.add(store, [1, 2, 3], [])  # nothing was answered
        assert stores.num_answers == 1
        with pytest.raises(ValueError, match="at least 1 byte"):
            AnswerStores(0, 1000)

    def test_an_owner_without_answers_is_forgotten(self) -> None:
        stores = AnswerStores(1 << 20, 1000)
        store = stores.of("one")
        stores.add(store, [], [1, 2, 3])
        del store
        assert len(stores.of("one")) == 1
        stores.most_bytes = stores.num_bytes
        stores.add(stores.of("other"), [], [1, 2, 4])
        assert [*stores._stores] == ["other"]

    def test_a_text_goes_on_with_an_answer_that_is_forgotten_meanwhile(self) -> None:
        stores = AnswerStores(1 << 20, 1000)
        store = stores.of("one")
        stores.add(store, [], [*range(30)])
        index = CopyIndex(store)
        index.read(torch.tensor([99, 5, 6, 7]))
        store.drop_oldest()
        assert index.continuation(3) == [8, 9, 10]
        index.append(8)
        assert index.continuation(2) == [9, 10]
        index.append(77)
        assert index.continuation(2) == []


def test_memory_stays_within_the_bound() -> None:
    """What is counted is at least what Python takes, for answers that are new and for answers that repeat."""
    random = Random(3)
    most = 3 << 20
    stores = AnswerStores(most, 50_000)
    names = deque("abcd")
    gc.collect()
    tracemalloc.start()
    try:
        before, seen = tracemalloc.get_traced_memory()[0], 0
        text = [random.randrange(50_000) for _ in range(400)]
        for turn in range(120):
            names.rotate()
            if turn % 3:
                text[random.randrange(400)] = random.randrange(50_000)
            else:
                text = [random.randrange(50_000) for _ in range(400)]
            stores.add(stores.of(names[0]), [], text)
            assert stores.num_bytes <= most
            assert stores.num_bytes == sum(stores.of(name).num_bytes for name in set("abcd"))
            taken = tracemalloc.get_traced_memory()[0] - before
            seen = max(seen, taken)
            assert taken <= stores.num_bytes + 20_000
    finally:
        tracemalloc.stop()
    assert stores.num_dropped > 20
    assert seen > most / 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_text_is_the_same_with_a_store_and_in_a_batch(layout: Layout) -> None:
    """Greedy text with answers of all kinds behind it: its own of earlier, right and with mistakes, and others'."""
    random, generator = Random(8), generator_of(layout)
    stores, copied = AnswerStores(1 << 20, VOCAB_SIZE), 0
    names = ["copy:6", "copy:4+ls:{E}-3", "auto:cost=layers", "copy:32", "copy:3+del"] * 2
    prompts = [[random.randrange(VOCAB_SIZE) for _ in range(6)] for _ in names]
    for turn in range(3):
        wishes, plain = [], []
        for index, (name, prompt) in enumerate(zip(names, prompts)):
            options: dict[str, object] = {"max_new_tokens": 12 + index}
            store: CopyFrom = stores.of(index % 3)
            plain.append(Wish(prompt=prompt, policy=name, options=options, joins=index // 4))
            wishes.append(Wish(prompt=prompt, policy=name, options={**options, "copy_from": store}, joins=index // 4))
        alone = [run_alone(shared_model(layout), wish) for wish in plain]
        for index, (course, expected) in enumerate(zip(run_together(generator, wishes), alone)):
            assert course.tokens == expected.tokens
            assert course.result is not None
            copied += course.result.stats.num_copied_accepted if turn else 0
            likely = [token if random.random() < 0.9 else random.randrange(VOCAB_SIZE) for token in course.tokens]
            stores.add(stores.of(index % 3), wishes[index].prompt, likely)
    assert copied > 100
