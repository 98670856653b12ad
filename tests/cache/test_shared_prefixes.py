"""Nobody learns from the server how another client's prompt begins; one owner's texts share what they can."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, repeat
from random import Random
from typing import Any

import pytest
import torch

from layerskip_models import DEMO_PATH, from_transformers
from running_server import RunningServer, asking, post, running_server, wait_until
from selfspec import SelfSpecGenerator
from selfspec.cache import pool as kv_cache_pool
from selfspec.cache.pool import SMALL_LOSS, KVCachePool
from selfspec.cache.prefix_cache import Owner, PrefixCache, num_common
from tiny_llama import tiny_llama

SECRET = [*range(300, 324)]
UNKNOWN = [371, 306, 355]
"""The end of the victim's prompt, one token of `CANDIDATES` after the other."""
CANDIDATES = [306, 355, 371]


def cached(server: RunningServer, prompt: list[int], **fields: Any) -> int:
    """What a request is told of its prompt."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 1, "temperature": 0, "policy": "ar", **fields}
    status, answer = post(server, "/v1/completions", body)
    assert status == 200, answer
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def guessed(server: RunningServer, names: Iterator[dict[str, str]]) -> list[int]:
    """The published attack: of several next tokens, the one with which the server knows most of a prompt."""
    found: list[int] = []
    for _ in UNKNOWN:
        counts = {token: cached(server, [*SECRET, *found, token, 1, 2], **next(names)) for token in CANDIDATES}
        best = max(CANDIDATES, key=lambda token: counts[token])
        if counts[best] == min(counts.values()):
            return found
        found.append(best)
    return found


@pytest.fixture
def rows_used(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Owner, Owner, int]]:
    """Whose text a new one goes on from, whose that was, and how many rows: also what no answer tells, such as time."""
    used: list[tuple[Owner, Owner, int]] = []
    plain = KVCachePool._longest_prefix

    def watched(pool: KVCachePool, prompt: Any, owner: Owner) -> Any:
        slot, rows = plain(pool, prompt, owner)
        if slot is not None:
            used.append((owner, slot.owner, rows))
        return slot, rows

    monkeypatch.setattr(KVCachePool, "_longest_prefix", watched)
    return used


STRANGERS: list[dict[str, str]] = [
    {}, {"cache_salt": "other{}"}, {"cache_salt": "mine", "user": "eve{}"}, {"user": "bob"},
]  # fmt: skip
VICTIMS: list[dict[str, str]] = [{}, {"cache_salt": "mine"}, {"cache_salt": "mine", "user": "bob"}]


def test_a_prompt_cannot_be_guessed_token_by_token(rows_used: list[tuple[Owner, Owner, int]]) -> None:
    """While the victim's text is decoded, and when it is complete. The same guesses tell all with the victim's own names."""
    generator = SelfSpecGenerator.from_pretrained(DEMO_PATH, prefix_cache="64MB")
    number = count()
    with running_server(generator) as server:
        for victim in VICTIMS:
            asked = {"prompt": [*SECRET, *UNKNOWN], "max_tokens": 1900, "logit_bias": {"0": -100}}
            before = server.metric("generated_tokens_total")
            connection = asking(server, {"model": "demo", **asked, **victim})
            # Far enough that a guess, which shares the prompt alone, does not write over the text: see `SMALL_LOSS`.
            wait_until(lambda: server.metric("generated_tokens_total") > before + 2 * SMALL_LOSS)  # noqa: B023
            for living in (True, False):
                assert server.metric("decoding_texts") == living
                for stranger in STRANGERS:  # each name once: an attacker may be told of texts of its own
                    names = ({k: v.format(next(number)) for k, v in stranger.items()} for _ in repeat(None))
                    rows_used.clear()
                    assert guessed(server, names) == [], (victim, stranger, living)
                    assert rows_used == []
                if victim and not living:
                    assert guessed(server, repeat(victim)) == UNKNOWN, victim
                    assert rows_used and all(new == old for new, old, _ in rows_used)
                if living:
                    connection.close()  # what was read stays, as at the end of a text
                    wait_until(lambda: server.metric("decoding_texts") == 0)


def pool_of(num_bytes: int) -> KVCachePool:
    model = from_transformers(tiny_llama(seed=2, max_position_embeddings=128), layout="plain")
    return KVCachePool(model, PrefixCache(num_bytes=num_bytes, use="always"))


def leave_text(pool: KVCachePool, tokens: list[int], owner: Owner) -> int:
    """A text that is read and ends; how many of its rows came from an earlier one."""
    prompt = torch.tensor(tokens)
    with pool.lend(len(tokens) + 1, prompt, owner) as slot:
        found = slot.cache.length
        slot.cache.declare(len(tokens))
        slot.end_sequence(prompt, None)
    return found


def test_no_more_than_some_texts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_pool, "MAX_KEPT", 3)
    pool = pool_of(1 << 30)
    for token in range(5):
        leave_text(pool, [token] * 9, Owner(str(token)))
    assert pool.kept_texts.count == 3
    assert [leave_text(pool, [token] * 9, Owner(str(token))) for token in (4, 1)] == [9, 0]


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_prefix_is_found_among_all_idle_texts(seed: int) -> None:
    """Against looking at each of them, with every owner's texts coming, branching and going."""
    random = Random(seed)
    pool = pool_of(40 * 2048)
    owners = Owner("a"), Owner("b"), Owner("c", lasts=False)
    for _ in range(60):
        owner, size = random.choice(owners), random.choice([0, 40])
        text = random.choices([0, 1, 300], k=random.randint(1, 5)) + [random.randrange(9)] * size
        idle = [(slot, num_common(slot.tokens, torch.tensor(text))) for slot in pool._idle]
        expected = max((alike for slot, alike in idle if slot.owner == owner), default=0)
        assert leave_text(pool, text, owner) == expected
        assert pool.kept_texts.num_bytes == sum(slot.cache.num_bytes for slot in pool._idle) <= 40 * 2048
        assert pool.kept_texts.count == sum(len(slot.tokens) > 0 for slot in pool._idle)
        assert not any(slot.text for slot in pool._idle if not slot.owner.lasts)
