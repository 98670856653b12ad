"""A step in one native call gives, bit for bit, what the single calls give, and refuses what would leave its memory."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from scripted_policies import ScriptedExit
from tiny_llama import request_for, tiny_llama

from layerskip_models import from_transformers
from layerskip_models.kernels.library import kernels
from layerskip_models.kernels.native_steps import STEP_ROWS, NativeSteps
from layerskip_models.model import LayerSkipModel
from policies import Needs, NeverStop, Policy
from selfspec.decoding import Decoding
from selfspec.kv_cache import KVCache

pytestmark = pytest.mark.skipif(kernels() is None, reason="needs the native library")


def made(dtype: torch.dtype = torch.float32) -> tuple[LayerSkipModel, NativeSteps, KVCache]:
    model = from_transformers(tiny_llama(num_layers=4, dtype=dtype), layout="native")
    cache = KVCache(model, 12)
    steps = model.steps(cache)
    assert steps is not None
    return model, steps, cache


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
            look = steps.token(token, index, 2, exits[index], head="draft", detail="all", record=record)
            hidden = model.run_layers(model.embed_one(token), 0, 2, expected_cache, index)
            assert torch.equal(exits[index], hidden[0])
            choices = model.draft_choices(hidden, "all")
            assert look == (int(choices.tokens[0]), *choices.numbers[:, 0].tolist())
        assert steps.token(5, 3, 1, exits[0].clone()) is None
        tokens, logits = steps.rows(exits, 2, 4, 0, record=(memory, 0) if recorded else None)
        seen: dict[int, torch.Tensor] = {}
        hidden = model.run_layers(exits, 2, 4, expected_cache, 0, lambda layer, states: seen.update({layer: states}))
        choices = model.choices(hidden)
        assert (tokens, logits) == (choices.tokens.tolist(), choices.logits.tolist())
        assert torch.equal(cache.values[:, :, :3], expected_cache.values[:, :, :3])
        if recorded:
            assert torch.equal(memory[1, :3], exits)
            assert all(torch.equal(memory[layer - 1, :3], states) for layer, states in seen.items())


def test_what_does_not_fit_is_refused() -> None:
    """Before C writes anywhere."""
    model, steps, _ = made()
    last, rows = torch.zeros(model.hidden_size), torch.zeros(3, model.hidden_size)
    for call in (
        lambda: steps.token(model.vocab_size, 0, 2, last),
        lambda: steps.token(-1, 0, 2, last),
        lambda: steps.token(1, 12, 2, last),
        lambda: steps.token(1, 0, 2, last[1:]),
        lambda: steps.token(1, 0, 5, last),
        lambda: steps.token(1, 0, 2, last, record=(torch.zeros(4, 2, model.hidden_size), 2)),
        lambda: steps.rows(rows, 2, 4, 10),
        lambda: steps.rows(rows.double(), 2, 4, 0),
        lambda: steps.rows(rows.t().contiguous().t(), 2, 4, 0),
        lambda: steps.rows(torch.zeros(STEP_ROWS + 1, model.hidden_size), 2, 4, 0),
        lambda: steps.rows(rows, 2, 4, 0, record=(torch.zeros(3, 5, model.hidden_size), 0)),
    ):
        with pytest.raises(ValueError):
            call()


def test_the_history_of_a_text_is_kept_by_steps_as_well() -> None:
    """Rows of drafts, of verification and of plain steps, at every layer that a policy looks back at."""
    model, _, _ = made()
    exits = ScriptedExit([(1, 4), (None, 0), (2, 3), (3, 6)])

    class LooksBack(NeverStop):
        needs = Needs(context_layers=(1, 3))

    prompt = [3, 1, 4]
    decoding = Decoding(
        model, KVCache(model, 40), request_for(model, prompt, max_new_tokens=30), Policy(exits, LooksBack())
    )
    with torch.inference_mode():
        with patch.object(NativeSteps, "token", autospec=True, side_effect=NativeSteps.token) as token:
            for _ in decoding.run():
                pass
        assert token.call_count > 0
        assert decoding.history is not None
        text, seen = decoding.tokens[0, : decoding.length - 1], dict[int, torch.Tensor]()
        capture = seen.__setitem__
        model.run_layers(model.embed(text), 0, 4, KVCache(model, 40), 0, lambda layer, states: capture(layer, states))
        for layer in (1, 3):
            assert torch.equal(decoding.history.rows(layer, 0, len(text)), seen[layer])
