"""Drafts that are copied: the index of earlier places against a search of the whole text, and what rounds make of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batched_runs import shared_model
from policies import ObservationSpec, Plan, Policy, RoundContext, RoundRecord, StatelessPolicy, parse_policy
from policies.fixed import MIN_MATCH
from selfspec import SelfSpecGenerator
from selfspec.cache import copy_index
from selfspec.cache.copy_index import LONGEST, CopyIndex, CopyStore
from tiny_llama import tiny_tokenizer

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


class Copies(StatelessPolicy):
    """So many tokens in every round in which something can be copied; keeps what it saw."""

    observes = ObservationSpec(copies="needed")

    def __init__(self, copied: int, exit_layer: int | None = None) -> None:
        self._plan = Plan(exit_layer=exit_layer, max_speculations=0, copied=copied)
        self.records: list[RoundRecord] = []

    def plan(self, context: RoundContext) -> Plan:
        return self._plan

    def observe(self, record: RoundRecord) -> None:
        self.records.append(record)


def test_a_plan_that_copies_and_drafts_is_refused() -> None:
    with pytest.raises(ValueError, match="with copied=5, exit_layer must be None, got 2"):
        SelfSpecGenerator(shared_model("plain")).generate([1, 2, 1, 2], policy=Policy(Copies(5, exit_layer=2)))


def test_records_say_what_the_index_would_have_said_of_every_token_before_the_round() -> None:
    copies = Copies(0)
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    generator = SelfSpecGenerator(shared_model("plain"))
    tokens = prompt + generator.generate(prompt, max_new_tokens=20, policy=Policy(copies)).new_tokens
    index, expected = CopyIndex(None), []
    index.read(torch.tensor(prompt))
    for token in tokens[len(prompt) : -1]:
        if index.match is not None:
            expected.append((index.match.length, index.match.token == token))
        index.append(token)
    assert [seen for record in copies.records for seen in record.copies] == expected != []


def test_nothing_is_copied_behind_the_budget_or_an_eos() -> None:
    policy, engine = Copies(32), SelfSpecGenerator(shared_model("plain"))
    engine.generate([1, 2, 3, 4, 5, 6, 7, 8] * 2, max_new_tokens=10, policy=Policy(policy), eos_token_id=[8])
    copied = [record.num_copied for record in policy.records]
    assert any(copied) and max(copied) < 9


def test_statistics_by_source() -> None:
    engine = SelfSpecGenerator(shared_model("plain"))
    prompt = [1, 2, 3, 4, 5, 6, 7, 8] * 3
    store = [prompt + engine.generate(prompt, max_new_tokens=30, policy="ar").new_tokens]
    result = engine.generate(prompt, max_new_tokens=30, policy="copy:6", copy_from=store, trace=True)
    assert result.trace is not None
    stats = result.stats
    assert stats.num_copied == sum(min(r.num_copied, r.counted_drafts[0]) for r in result.trace) > 0
    assert 0 < stats.num_copied_accepted <= min(stats.num_copied, stats.num_accepted)
    assert stats.num_copied <= stats.num_drafted


def test_texts_to_copy_from_are_texts_ids_or_a_store() -> None:
    model = shared_model("plain")
    generator = SelfSpecGenerator(model, tiny_tokenizer())
    said = generator.generate([5, 6], max_new_tokens=30, policy="ar")
    prompt = [5, 6, *said.new_tokens[:3]]
    ids = said.sequences[0].tolist()
    alike = []
    for source in ([ids], [tiny_tokenizer().decode(ids)], CopyStore([ids])):
        result = generator.generate(prompt, max_new_tokens=20, policy="copy:8", copy_from=source)
        assert result.new_tokens == said.new_tokens[3:23]
        alike.append((result.stats.rounds, result.stats.num_accepted))
    assert alike[0] == alike[2] and alike[0][0] < 5
    with pytest.raises(TypeError, match="copy_from"):
        generator.generate(prompt, copy_from="one text", policy="copy:8")
    with pytest.raises(ValueError, match="copy_from changes nothing"):
        generator.generate(prompt, copy_from=[ids], policy="ls:1-3")


def test_what_a_name_cannot_mean() -> None:
    for name, message in {
        "copy:0": "length must be in", "copy:33": "length must be in", "copy:4,min=1": "min must be an integer in",
        "copy:4+ar": "say copy:4 alone", "copy+ls:3-6": "say copy alone, or auto, which copies and drafts",
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=message):
            parse_policy(name, num_layers=4)
