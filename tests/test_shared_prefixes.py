"""Nobody learns from the server how another client's prompt begins; one owner's texts share what they can."""

from __future__ import annotations

import json
import threading
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

SECRET = [*range(300, 340)]


def cached(server: RunningServer, prompt: list[int], **fields: Any) -> int:
    """What a request is told of its prompt."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
    status, answer, _ = post(server, "/v1/completions", json.dumps(body).encode())
    assert status == 200, answer
    found = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(found, int)
    return found


def test_a_prompt_cannot_be_guessed_token_by_token() -> None:
    """While the victim's text is decoded, and when it is complete. The same guesses tell all with the victim's salt."""
    generator = SelfSpecGenerator.from_pretrained(DEMO_PATH, prefix_cache="64MB")
    attacks: list[dict[str, Any]] = [
        {},
        {"cache_salt": "other"},
        {"cache_salt": "mine", "user": "eve"},
        {"user": "bob"},
    ]
    with running_server(generator) as server:
        for number, salt in enumerate(({}, {"cache_salt": "mine"}, {"cache_salt": "mine", "user": "bob"})):
            secret = [300 + number, *SECRET]
            body: dict[str, Any] = {
                "model": "demo",
                "prompt": secret,
                "max_tokens": 300,
                "logit_bias": {"0": -100},
                **salt,
            }
            before = server.metric("generated_tokens_total")
            victim = threading.Thread(target=post, args=(server, "/v1/completions", json.dumps(body).encode()))
            victim.start()
            wait_until(lambda: server.metric("generated_tokens_total") > before)  # noqa: B023
            for living in (True, False):
                for attack in attacks:  # each name once: an attacker's own texts may be told of
                    names = {
                        name: value if value == "mine" else f"{value}{number}{living}" for name, value in attack.items()
                    }
                    assert cached(server, [*secret, 1, 2], **names) == 0, (salt, attack, living)
                if salt:
                    assert cached(server, [*secret, 1, 2], **salt) >= len(secret) - 8
                if living:
                    assert victim.is_alive()
                    victim.join()


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
