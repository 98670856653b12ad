"""The index of earlier places against a search of the whole text."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from policies.fixed import MIN_MATCH
from selfspec.cache import copy_index
from selfspec.cache.copy_index import LONGEST, CopyIndex, CopyStore

# Few different tokens, so that suffixes occur again, and pieces that are repeated, so that long ones do.
TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=8).flatmap(
    lambda pieces: st.lists(st.sampled_from(pieces or [[0]]), max_size=8).map(
        lambda chosen: [token for piece in (*pieces, *chosen) for token in piece]
    )
)


def indexed(text: list[int], read: int = 0, store: CopyStore | None = None) -> CopyIndex:
    """Of which the first `read` tokens are a prompt."""
    index = CopyIndex(store)
    index.read(torch.tensor(text[:read], dtype=torch.long))
    for token in text[read:]:
        index.append(token)
    return index


def searched(text: list[int]) -> tuple[int, list[int]]:
    """By looking everywhere: how long the longest suffix is that occurred before, and what followed it, the latest first."""
    for length in range(len(text) - 1, MIN_MATCH - 1, -1):
        ends = [end for end in range(len(text) - 1, length - 1, -1) if text[end - length : end] == text[-length:]]
        if ends:
            return length, [text[end] for end in ends]
    return 0, []


@given(text=TEXTS, read=st.integers(0, 40))
def test_finds_the_longest_suffix_that_occurred_before_and_its_most_recent_place(text: list[int], read: int) -> None:
    """However much of the text is read at once, as a prompt is."""
    length, following = searched(text)
    match = indexed(text, read).match
    if length <= LONGEST:
        assert match == ((length, following[0]) if length else None)
    else:  # that what it says is so `test_what_an_index_says_is_so` shows
        assert match is not None and match.length >= LONGEST


@given(text=TEXTS.filter(lambda text: len(text) > 3), count=st.integers(0, 20), read=st.integers(0, 40))
def test_continues_as_the_text_did_and_round_and_round_in_a_loop(text: list[int], count: int, read: int) -> None:
    index = indexed(text, read)
    copied = index.continuation(count)
    if index.match is None:
        assert copied == []
        return
    assert len(copied) == count
    assert copied[:1] == [index.match.token][:count]
    # Every copied token stands one period behind what it copies, as in a text that goes on like that for ever.
    whole = text + copied
    assert any(
        all(whole[len(text) + i] == whole[len(text) + i - period] for i in range(count))
        and text[-index.match.length :] == text[-index.match.length - period : -period]
        for period in range(1, len(text))
    )


def test_copies_from_a_store_end_with_its_text_and_the_text_itself_comes_first() -> None:
    store = CopyStore([[1, 2, 3, 4], [5, 6]])
    index = indexed([7, 1, 2], store=store)
    assert index.match == (2, 3)
    assert index.continuation(9) == [3, 4]
    assert indexed([7, 3, 4], store=store).match is None  # nothing came after it
    assert indexed([9, 4, 5], store=store).match is None  # two texts are not one
    assert indexed([1, 2, 8, 0, 1, 2], store=CopyStore([[1, 2, 9]])).match == (2, 8)


def test_follows_a_match_however_long_it_becomes() -> None:
    text = [*range(100), *range(60)]
    assert indexed(text).match == (60, 60)
    assert indexed(text, len(text)).match == (4 * LONGEST, 60)  # found at once, it is measured so far and no further
    assert indexed([*text, 60, 61], len(text)).match == (4 * LONGEST + 2, 62)


def test_the_oldest_places_are_forgotten_and_memory_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_index, "GENERATION", 700)
    index = indexed([*range(1000), 400, 401])
    assert index.match is None  # 600 tokens ago: forgotten
    index = indexed([*range(1000), 950, 951])
    assert index.match == (2, 952)
    assert len(index._own._young) + len(index._own._old) <= 2 * (700 + LONGEST)


def test_a_store_s_text_that_the_whole_text_begins_or_ends() -> None:
    """Both are alike from the text's first token on: there is nothing before it to compare."""
    index = indexed([5] * LONGEST, LONGEST, CopyStore([[5] * 100]))
    assert index.match is None  # the store's text ends there, too
    index.append(5)
    assert index.match is not None and index.match.token == 5
    text = [*range(4 * LONGEST)]
    store = CopyStore([[*text, 77]])
    for length in range(MIN_MATCH, len(text)):
        assert indexed(text[:length], length, store).match == (length, text[length])


@given(text=TEXTS, others=st.lists(TEXTS, max_size=3), read=st.integers(0, 40))
def test_what_an_index_says_is_so(text: list[int], others: list[list[int]], read: int) -> None:
    """Every match is a suffix of the text, no longer than it, that stands before the token it names, here or in the store."""
    index = CopyIndex(CopyStore(others))
    index.read(torch.tensor(text[:read], dtype=torch.long))
    for end in range(min(read, len(text)), len(text) + 1):
        if index.match is not None:
            length, token = index.match
            assert MIN_MATCH <= length <= end
            wanted = [*text[end - length : end], token]
            places = [text[:end], *others]
            assert any(one[i : i + length + 1] == wanted for one in places for i in range(len(one) - length))
        if end < len(text):
            index.append(text[end])
