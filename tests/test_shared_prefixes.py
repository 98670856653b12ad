"""Nobody learns from the server how another client's prompt begins; one owner's texts share what they can."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from itertools import count, repeat
from typing import Any

import pytest
import torch
from running_server import RunningServer, running_server
from test_serve import post, wait_until
from tiny_llama import VOCAB_SIZE, tiny_llama

from layerskip_models import DEMO_PATH, from_transformers
from layerskip_models.kv_cache import KVCache
from selfspec import SelfSpecGenerator
from selfspec.runtime.prefix_cache import MOST_KEPT, Owner, PrefixCache
from selfspec.runtime.runner_pool import RunnerPool

SECRET = [*range(300, 324)]
UNKNOWN = [371, 306, 355]
"""The end of the victim's prompt, one token of `CANDIDATES` after the other."""
CANDIDATES = [306, 355, 371]


def cached(server: RunningServer, prompt: list[int], **fields: Any) -> int:
    """What a request is told of its prompt."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 1, "temperature": 0, "policy": "ar", **fields}
    status, answer, _ = post(server, "/v1/completions", json.dumps(body).encode())
    assert status == 200, answer
    found = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(found, int)
    return found


def guessed(server: RunningServer, names: Iterator[dict[str, str]]) -> list[int]:
    """The published attack: of several next tokens, the one with which the server knows most of a prompt. As far as it gets."""
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
    plain = RunnerPool._most_alike

    def watched(pool: RunnerPool, prompt: Any, owner: Owner) -> Any:
        place, rows = plain(pool, prompt, owner)
        if place is not None:
            used.append((owner, place.owner, rows))
        return place, rows

    monkeypatch.setattr(RunnerPool, "_most_alike", watched)
    return used


STRANGERS: list[dict[str, str]] = [
    {},
    {"cache_salt": "other{}"},
    {"cache_salt": "mine", "user": "eve{}"},
    {"user": "bob"},
]
VICTIMS: list[dict[str, str]] = [{}, {"cache_salt": "mine"}, {"cache_salt": "mine", "user": "bob"}]


def test_a_prompt_cannot_be_guessed_token_by_token(rows_used: list[tuple[Owner, Owner, int]]) -> None:
    """While the victim's text is decoded, and when it is complete. The same guesses tell all with the victim's own names."""
    generator = SelfSpecGenerator.from_pretrained(DEMO_PATH, prefix_cache="64MB")
    number = count()
    with running_server(generator) as server:
        for victim in VICTIMS:
            body = {
                "model": "demo",
                "prompt": [*SECRET, *UNKNOWN],
                "max_tokens": 1900,
                "logit_bias": {"0": -100},
                **victim,
            }
            connection = http.client.HTTPConnection(server.base[7:], timeout=60)
            before = server.metric("generated_tokens_total")
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            wait_until(lambda: server.metric("generated_tokens_total") > before)  # noqa: B023
            for living in (True, False):
                assert server.app.state.scheduler.decoding == living
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
                    wait_until(lambda: server.app.state.scheduler.decoding == 0)


def test_an_operator_may_share_all() -> None:
    generator = SelfSpecGenerator.from_pretrained(DEMO_PATH)
    with running_server(generator, share_prefixes=True) as server:
        assert cached(server, SECRET) == 0
        assert cached(server, SECRET) > 0


def pool_of(num_bytes: int) -> RunnerPool:
    model = from_transformers(tiny_llama(seed=2, max_position_embeddings=128), layout="plain")
    return RunnerPool(model, "eager", PrefixCache(num_bytes=num_bytes, use="always"))


def leave_text(pool: RunnerPool, tokens: list[int], owner: Owner) -> int:
    """A text that is read and ends; how many of its rows came from an earlier one."""
    prompt = torch.tensor(tokens)
    with pool.lend(len(tokens) + 1, prompt, owner) as place:
        found = place.cache.length
        place.cache.declare(len(tokens))
        place.leave(prompt, None)
    return found


def test_owners_share_nothing_in_the_pool() -> None:
    pool, text = pool_of(1 << 30), [*range(30)]
    assert leave_text(pool, text, Owner("a")) == 0
    assert leave_text(pool, text, Owner("b")) == 0
    assert leave_text(pool, [*text, 5], Owner("a")) == 30
    assert leave_text(pool, text, Owner("once", lasts=False)) == 0
    assert leave_text(pool, text, Owner("once", lasts=False)) == 0
    assert pool.kept_texts.count == 2


def test_what_a_text_costs_the_pool_does_not_grow_with_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are counted a fixed number of times for each place, and no more than some texts are kept."""
    pool = pool_of(1 << 30)
    for number in range(MOST_KEPT + 10):
        leave_text(pool, [*(number // VOCAB_SIZE**place % VOCAB_SIZE for place in range(4)), *[1] * 60], Owner("a"))
    assert pool.kept_texts.count == MOST_KEPT
    counted = 0
    plain = KVCache.num_bytes

    def counting(cache: KVCache) -> int:
        nonlocal counted
        counted += 1
        found = plain.fget(cache)  # type: ignore[attr-defined]
        assert isinstance(found, int)
        return found

    monkeypatch.setattr(KVCache, "num_bytes", property(counting))
    leave_text(pool, [1, 2, 3, 4, 5, 6], Owner("a"))
    assert counted < 5 * MOST_KEPT
