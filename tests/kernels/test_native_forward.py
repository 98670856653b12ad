"""A step in one native call gives, bit for bit, what the single calls give, and refuses what would leave its memory."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from batched_runs import LAYOUTS, needs_native, shared_model
from decoding import decode
from layerskip_models import from_transformers
from layerskip_models.kernels.native_forward import STEP_ROWS, NativeForward
from layerskip_models.kernels.threads import on_threads
from layerskip_models.kv_cache import KVCache
from layerskip_models.linear import Layout
from layerskip_models.model import LayerSkipModel
from policies import NeverStop, ObservationSpec, Policy
from scripted_policies import ScriptedExit
from selfspec.engine.runners.eager import EagerRunner
from selfspec.engine.sequence import Sequence
from tiny_llama import request_for, tiny_llama


def made(dtype: torch.dtype = torch.float32) -> tuple[LayerSkipModel, NativeForward, KVCache]:
    model = from_transformers(tiny_llama(num_layers=4, dtype=dtype), layout="native")
    steps = model.steps()
    assert steps is not None
    return model, steps, KVCache(model, 12)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recorded", [False, True])
def test_steps_are_the_single_calls(dtype: torch.dtype, recorded: bool) -> None:
    """Three tokens through two layers one by one, then the rest of the layers at once: states, choices and the cache."""
    model, steps, cache = made(dtype)
    expected_cache = KVCache(model, 12)
    memory = torch.zeros(4, 5, model.hidden_size)
    exits = torch.zeros(3, model.hidden_size)
    with torch.inference_mode():
        for index, token in enumerate([7, 3, 9]):
            record = (memory, index) if recorded else None
            looks = steps.tokens([token], [(cache, 1)], 2, exits[index], head="draft", detail="all", record=record)
            hidden = model.run_layers(model.embed(torch.tensor([token])), 0, 2, expected_cache)
            assert torch.equal(exits[index], hidden[0])
            choices = model.draft_choices(hidden, "all")
            assert looks == [(int(choices.tokens[0]), *choices.numbers[:, 0].tolist())]
            assert cache.position(0, 2) == index + 1 and cache.length == 0
        assert steps.tokens([5], [(cache, 1)], 1, exits[0].clone()) == []
        tokens, logits = steps.rows(exits, [(cache, 3)], 2, 4, record=(memory, 0) if recorded else None)
        assert cache.length == cache.position(1, 4) == 3
        seen: dict[int, torch.Tensor] = {}
        hidden = model.run_layers(exits, 2, 4, expected_cache, lambda layer, states: seen.update({layer: states}))
        choices = model.choices(hidden)
        assert (tokens, logits) == (choices.tokens.tolist(), choices.logits.tolist())
        assert torch.equal(cache.values[:, :, :3], expected_cache.values[:, :, :3])
        assert torch.equal(cache.keys[..., :3], expected_cache.keys[..., :3])
        if recorded:
            assert torch.equal(memory[1, :3], exits)
            assert all(torch.equal(memory[layer - 1, :3], states) for layer, states in seen.items())


@needs_native
def test_what_does_not_fit_is_refused() -> None:
    """Before C writes anywhere."""
    model, steps, cache = made()
    last, rows = torch.zeros(model.hidden_size), torch.zeros(3, model.hidden_size)
    wide = torch.zeros(4, 5, model.hidden_size)
    full, drafted, empty = KVCache(model, 12), KVCache(model, 12), KVCache(model, 12)
    full.declare(12)
    drafted.declare(10)
    drafted.extend(0, 2, 2)
    one, two, three, many = [(cache, 1)], [(cache, 1), (empty, 1)], [(cache, 3)], STEP_ROWS + 1
    for tokens, where, stop, states, *record in (
        ([model.vocab_size], one, 2, last),
        ([-1], one, 2, last),
        ([1, -1], two, 2, rows[:2]),
        ([1], [(full, 1)], 2, last),
        ([1, 1], [(cache, 1), (full, 1)], 2, rows[:2]),
        ([1, 1], one, 2, rows[:2]),
        ([1], [(drafted, 1)], 4, last),
        ([1], one, 2, last[1:]),
        ([1], one, 2, last.double()),
        ([1, 1], two, 2, last),
        ([1, 1], two, 2, wide[0, ::2][:2]),
        ([1], one, 5, last),
        ([1] * many, [(cache, 1)] * many, 2, last.expand(many, -1)),
        ([1], one, 2, last, torch.zeros(4, 2, model.hidden_size), 2),
        ([1], one, 4, last, torch.zeros(3, 2, model.hidden_size), 0),
    ):
        with pytest.raises(ValueError):
            steps.tokens(tokens, where, stop, states, record=tuple(record) or None)
    for states, where, *record in (
        (rows, [(drafted, 3)]),
        (rows, [(cache, 2)]),
        (rows, [(cache, 2), (full, 1)]),
        (rows.double(), three),
        (rows.t().contiguous().t(), three),
        (torch.zeros(many, model.hidden_size), [(cache, many)]),
        (rows, three, torch.zeros(3, 5, model.hidden_size), 0),
        (rows, three, wide, 3),
    ):
        with pytest.raises(ValueError):
            steps.rows(states, where, 2, 4, record=tuple(record) or None)
    assert cache.length == cache.position(0, 4) == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_states_of_a_text_are_those_of_a_full_pass(layout: Layout) -> None:
    """Rows of drafts, of verification and of plain steps, at every layer that a policy looks back at."""
    model = shared_model(layout)

    class LooksBack(NeverStop):
        observes = ObservationSpec(context_layers=(1, 3))

    policy = Policy(ScriptedExit([(1, 4), (None, 0), (2, 3), (3, 6)]), LooksBack())
    text = Sequence(model, KVCache(model, 40), request_for(model, [3, 1, 4], max_new_tokens=30), policy)
    watched = patch.object(NativeForward, "tokens", autospec=True, side_effect=NativeForward.tokens)
    with torch.inference_mode(), watched as steps:
        assert [*decode(text, EagerRunner(model))] and (steps.call_count > 0) is (layout == "native")
        ids, seen = text.tokens[0, : text.length - 1], dict[int, torch.Tensor]()
        model.run_layers(model.embed(ids), 0, 4, KVCache(model, 40), seen.__setitem__)
    for layer in (1, 3):
        found, atol = text.states.rows(layer, 0, len(ids)), 0 if layout == "native" else 1e-9
        torch.testing.assert_close(found, seen[layer], atol=atol, rtol=0)


@needs_native
@pytest.mark.parametrize("layout", ["native", "int8"])
@pytest.mark.parametrize("vocab_size", [29, 700, 66_000])  # one chunk, several, and chunks of another size
def test_a_step_stores_the_logits_of_its_head(vocab_size: int, layout: str) -> None:
    """Those of the head alone. The rest is what a step gives that does not store them, alone and on one thread as well."""
    model = from_transformers(tiny_llama(num_layers=2, vocab_size=vocab_size, dtype=torch.bfloat16), layout=layout)
    steps = model.steps()
    assert steps is not None
    tokens = [5, 0, 23]

    def room(*shape: int) -> torch.Tensor:
        return torch.full(shape, torch.nan)

    with torch.inference_mode():
        for head in ("draft", "full"):
            states, logits = torch.zeros(2, 3, model.hidden_size), room(3, vocab_size)
            looks = [
                steps.tokens(tokens, [(KVCache(model, 12), 3)], 2, own, head=head, detail="all", logits=stored)
                for own, stored in zip(states, (logits, None))
            ]
            expected = model.logits(states[0]) if head == "full" else model.draft_logits(states[0])
            assert torch.equal(states[0], states[1]) and looks[0] == looks[1] and torch.equal(logits, expected)
        caches, logits = [KVCache(model, 12) for _ in range(2)], room(3, vocab_size)
        for cache in caches:
            steps.tokens(tokens, [(cache, 3)], 1, states[0])
        found = steps.rows(states[0], [(caches[0], 3)], 1, 2, logits=logits)
        assert found == steps.rows(states[0], [(caches[1], 3)], 1, 2)
        assert found == (logits.argmax(-1).tolist(), logits.amax(-1).tolist())
        alone = room(1, vocab_size)
        with on_threads(1):
            steps.tokens(tokens[:1], [(KVCache(model, 12), 1)], 2, states[1][:1], head="full", logits=alone)
        assert torch.equal(alone, expected[:1])
        for wrong in (room(2, vocab_size), room(3, vocab_size - 1), room(3, vocab_size).double()):
            with pytest.raises(ValueError, match="logits"):
                steps.tokens(tokens, [(KVCache(model, 12), 3)], 2, states[0], head="full", logits=wrong)
