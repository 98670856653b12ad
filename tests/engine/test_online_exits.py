"""Rows that exits may learn from, and adapters that change between rounds: the text is what it was.

`test_lossless` and `test_batch` run models whose adapters change with every round (`tiny_llama.pool_model`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from batched_runs import LAYOUTS, each_policy, shared_model
from layerskip_models import LayerSkipModel
from layerskip_models.exits.adapter import ExitAdapters
from layerskip_models.exits.folder import config_for
from layerskip_models.exits.lean import LeanAdapter, lean_adapters
from layerskip_models.kv_cache import KVCache
from layerskip_models.linear import Layout
from random_adapters import adapted, random_adapters
from restless_exits import let_exits_change
from scripted_policies import EVERY_POLICY, named_policy
from selfspec import SelfSpecGenerator
from selfspec.engine.online_exits import HELD_OUT, LEAST_ROWS, ExitRows, OnlineExits, RowRing
from tiny_llama import pool_model

PROMPTS = [[5, 1, 7], [2], [9, 9, 3, 0, 23], [4, 4], [8, 1], [11, 3, 2], [1], [20, 6, 6, 2]]


def watched(model: LayerSkipModel, seed: int = 0, **options: Any) -> tuple[SelfSpecGenerator, OnlineExits]:
    """A generator with adapters at exits 1 and 2 whose rows are kept."""
    adapters = lean_adapters(random_adapters(model, [1, 2], seed), model)
    generator = SelfSpecGenerator(model.with_adapters(adapters))
    online = OnlineExits(generator.model, adapters, **{"num_bytes": 1 << 18, "rows_per_text": 100, **options})
    generator._models.learn_exits(generator.model, online)
    return generator, online


def held_in(ring: RowRing) -> ExitRows:
    """All rows that are in it, in their places."""
    return ring.at(np.arange(len(ring)))


def bare(model: LayerSkipModel, seed: int = 0) -> SelfSpecGenerator:
    """The same drafts, and nobody learns."""
    return SelfSpecGenerator(adapted(model, [1, 2], seed))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_those_of_plain_decoding(layout: Layout) -> None:
    """Each kept row has the states of its position, and the token that the model then chose."""
    generator, online = watched(shared_model(layout))
    model = generator.model
    for policy in ("ar", "ls:2-4", "dv:2", "del"):
        for prompt in PROMPTS:
            tokens = generator.generate(prompt, max_new_tokens=20, policy=policy).sequences[0].tolist()
            for ring in (online.learned, online.held_out):
                rows = held_in(ring)
                assert torch.equal(model.choices(rows.states[-1].contiguous()).tokens, rows.tokens)
            assert tokens[: len(prompt)] == prompt
    total = online.learned.seen + online.held_out.seen
    assert total == 4 * len(PROMPTS) * 19  # the first token comes with the prompt
    assert online.held_out.seen > 0
    # An exit's states, layer by layer, against a pass over the whole text.
    fresh, kept = watched(shared_model(layout))
    text = fresh.generate([5, 1, 7], max_new_tokens=12, policy="ls:2-4").sequences[0]
    ring = kept.learned if kept.learned.seen else kept.held_out
    found = held_in(ring).states
    seen: dict[int, torch.Tensor] = {}
    with torch.inference_mode():
        model.run_layers(
            model.embed(text[:-1]), 0, model.num_layers, KVCache(model, len(text)),
            lambda done, hidden: seen.update({done: hidden.clone()}),
        )  # fmt: skip
    for depth, layer in enumerate(kept.layers):
        torch.testing.assert_close(found[depth], seen[layer][3:], rtol=1e-4, atol=1e-5)


@cache
def plain_texts(layout: Layout) -> list[list[int]]:
    """What the model says without drafts."""
    results = bare(shared_model(layout)).generate_batch(PROMPTS, max_new_tokens=24, policy="ar")
    return [result.new_tokens for result in results]


@pytest.mark.parametrize(("layout", "policy"), each_policy(EVERY_POLICY))
def test_greedy_texts_are_the_same_while_adapters_change(layout: Layout, policy: str) -> None:
    model = shared_model(layout)
    expected = plain_texts(layout)
    generator, _ = watched(model)
    restless = let_exits_change(generator)
    chosen = named_policy(policy, 2, generator.model)
    for batch_size, prompts in ((1, PROMPTS[:3]), (4, PROMPTS)):
        results = generator.generate_batch(prompts, max_new_tokens=24, policy=chosen, batch_size=batch_size)
        assert [result.new_tokens for result in results] == expected[: len(prompts)]
    assert restless.rounds > 20
    assert restless.learned.seen + restless.held_out.seen > 200


@pytest.mark.parametrize("policy", ["ls:2-4", "dv:2", "del", "auto:cost=layers"])
def test_a_seed_gives_the_same_text_while_rows_are_kept(policy: str) -> None:
    """Sampled drafts decide how random numbers are used, so this holds until an adapter is replaced."""
    model = shared_model("native")
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": True, "policy": policy, "seed": [*range(8)]}
    results = [one.generate_batch(PROMPTS, **options) for one in (bare(model), watched(model)[0])]
    assert [a.new_tokens for a in results[0]] == [b.new_tokens for b in results[1]]


def test_after_a_replacement_texts_are_those_of_the_new_adapters() -> None:
    """Also sampled ones: nothing of the old adapters stays anywhere."""
    model = shared_model("native")
    generator, online = watched(model, seed=1)
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": True, "policy": "ls:2-4", "seed": [*range(8)]}

    def texts(one: SelfSpecGenerator) -> list[list[int]]:
        return [result.new_tokens for result in one.generate_batch(PROMPTS, **options)]

    before = texts(generator)
    others = random_adapters(model, [1, 2], seed=2)
    online.offer({layer: online.adapter(layer).laid_out(others.at(layer)) for layer in (1, 2)})
    after = texts(generator)
    assert before == texts(bare(model, seed=1)) and after == texts(bare(model, seed=2))
    assert before != after


def test_offered_adapters_wait_for_the_end_of_a_round() -> None:
    model = shared_model("native")
    generator, online = watched(model)
    before = online.adapter(2).matrices
    with generator.engine() as engine:
        engine.add([5, 1, 7], max_new_tokens=8, policy="ls:2-2")
        engine.step()
        offered = online.adapter(2).laid_out(random_adapters(model, [2], 5).at(2))
        online.offer({2: offered})
        assert online.adapter(2).matrices is before
        engine.step()
        assert online.adapter(2).matrices is offered


def test_an_adapter_of_another_shape_is_refused() -> None:
    model = shared_model("plain")
    adapter = lean_adapters(random_adapters(model, [1]), model)[1]
    assert isinstance(adapter, LeanAdapter)
    wider = ExitAdapters(config_for(model, exit_layers=(1,), rank=7))
    with pytest.raises(ValueError, match="of rank 5 cannot become one of rank 7"):
        adapter.use(adapter.laid_out(wider.at(1)))


def test_the_ring_keeps_the_latest_rows_and_no_more_memory() -> None:
    ring = RowRing(2, 4, 10, torch.float32, torch.device("cpu"))
    for first in range(0, 40, 7):
        numbers = torch.arange(first, first + 7, dtype=torch.float32)
        ring.add([numbers[:, None].expand(7, 4), -numbers[:, None].expand(7, 4)], range(first, first + 7))
        rows = held_in(ring)
        assert len(rows) == len(ring) == min(first + 7, 10)
        assert sorted(rows.tokens.tolist()) == [*range(max(first - 3, 0), first + 7)]
        assert torch.equal(rows.states[0, :, 0], rows.tokens.float())
        assert torch.equal(rows.states[1, :, 3], -rows.tokens.float())
    ring.add([torch.arange(25.0)[:, None].expand(25, 4)] * 2, range(25))  # longer than the ring
    assert sorted(held_in(ring).tokens.tolist()) == [*range(15, 25)]
    drawn = ring.drawn(4, np.random.default_rng(0))
    assert len(drawn) == 4 and len({*drawn.tokens.tolist()}) == 4
    assert torch.equal(drawn.states[0, :, 0], drawn.tokens.float())


def test_memory_is_bounded_and_too_little_is_refused() -> None:
    model = shared_model("plain")
    generator, online = watched(model, num_bytes=30_000)
    assert online.num_bytes <= 30_000
    for _ in range(3):
        for prompt in PROMPTS:
            generator.generate(prompt, max_new_tokens=30, policy="ls:2-2")
    assert online.learned.seen > len(online.learned)
    held = sum(held_in(ring).states.nbytes + 8 * len(ring) for ring in (online.learned, online.held_out))
    assert held <= 30_000
    with pytest.raises(
        ValueError, match=f"must be at least {LEAST_ROWS * (3 * model.hidden_size * model.dtype.itemsize + 8):,} bytes"
    ):
        watched(model, num_bytes=100)


def test_a_long_text_gives_a_bounded_number_of_rows() -> None:
    generator, online = watched(shared_model("native"), rows_per_text=10)
    generator.generate([5, 1, 7], max_new_tokens=40, policy="ls:2-4")
    assert online.learned.seen + online.held_out.seen == 10


def test_a_prompt_is_either_learned_from_or_judged_with() -> None:
    _, online = watched(shared_model("plain"))
    prompts = [torch.tensor([number, number % 7]) for number in range(400)]
    held_out = 0
    for prompt in prompts:
        rings = {id(online.begin_text(prompt)._ring) for _ in range(3)}
        assert len(rings) == 1
        held_out += rings == {id(online.held_out)}
    assert abs(held_out - 400 / HELD_OUT) < 40


def test_property_tests_run_models_whose_adapters_change_and_steered_ones() -> None:
    found = [pool_model(index, torch.float32)[1].bound for index in range(24)]
    assert sum(one.online is not None for one in found) >= 6
    assert sum(one.model.steering is not None for one in found) >= 6
