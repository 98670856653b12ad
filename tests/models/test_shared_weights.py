"""Weights that a transformers model and the engine share: once in memory, and what is written to them is seen at once.

That is so on CUDA. Here the same code runs on a CPU, with weights that are kept as they are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from layerskip_models import from_transformers
from layerskip_models.checkpoints.conversion import together
from selfspec import SelfSpecGenerator
from selfspec.engine import model_source
from tiny_llama import full_logits, lean_logits, reference_greedy, tiny_llama
from weight_updates import UPDATES

TEXT = [3, 8, 1, 0, 22, 5, 7]
PROMPT = [5, 1, 7]
IN_PLACE = ("data.copy_", "data +=", "fused AdamW", "foreach SGD", "load_state_dict", "adapter", "head")


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generators do here as on CUDA."""
    monkeypatch.setattr(model_source, "why_not_shared", lambda source: None)
    monkeypatch.setattr(model_source, "from_transformers", partial(from_transformers, layout="plain"))


def storages(llama: LlamaForCausalLM) -> dict[int, int]:
    """Bytes of all memory that parameters are in, by address."""
    found = [parameter.untyped_storage() for parameter in llama.parameters()]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-5), (torch.float32, 1e-4)])
def test_shared_weights_are_the_model_s_own_and_once_in_memory(dtype: torch.dtype, bound: float, tied: bool) -> None:
    llama = tiny_llama(dtype=dtype, seed=3, tie_word_embeddings=tied)
    before, expected = sum(storages(llama).values()), full_logits(llama, TEXT)
    values = {name: value.clone() for name, value in llama.state_dict().items()}
    model = from_transformers(llama, layout="plain", share=True)
    torch.testing.assert_close(lean_logits(model, TEXT), expected, rtol=0, atol=bound)
    assert sum(storages(llama).values()) == before
    for layer in model.layers:
        for linear in layer.linears:
            assert linear.weight.untyped_storage().data_ptr() in storages(llama)  # type: ignore[attr-defined]
    assert model._embedding.data_ptr() == llama.model.embed_tokens.weight.data_ptr()
    assert all(torch.equal(value, values[name]) for name, value in llama.state_dict().items())
    torch.testing.assert_close(full_logits(llama, TEXT), expected, rtol=0, atol=1e-12)


def test_a_second_engine_finds_the_weights_together() -> None:
    llama = tiny_llama(dtype=torch.float64, seed=3)
    from_transformers(llama, layout="plain", share=True)
    places = [parameter.data_ptr() for parameter in llama.parameters()]
    from_transformers(llama, layout="plain", share=True)
    assert [parameter.data_ptr() for parameter in llama.parameters()] == places


def test_rows_that_only_seem_to_be_together_are_not_taken_for_one_tensor() -> None:
    whole = torch.arange(24.0).view(6, 4)
    top, gap, bottom = (torch.nn.Parameter(part) for part in (whole[:2], whole[3:5], whole[2:6]))
    assert together([top, bottom]).data_ptr() == whole.data_ptr()
    apart = together([top, gap])
    assert apart.data_ptr() != whole.data_ptr()
    assert apart.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [12, 13, 14, 15], [16, 17, 18, 19]]
    assert top.data_ptr() == apart.data_ptr() and gap.tolist() == apart[2:].tolist()
    turned = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())  # not contiguous
    assert together([turned]).tolist() == [[0, 3], [1, 4], [2, 5]]
    assert turned.is_contiguous()


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.bfloat16, {"layout": "plain"}), (torch.float32, {}), (torch.float32, {"layout": "native"})],
)
def test_weights_that_are_not_kept_as_they_are_cannot_be_shared(dtype: torch.dtype, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="kept as they are"):
        from_transformers(tiny_llama(dtype=dtype, seed=3), share=True, **options)


def test_weights_made_in_inference_mode_cannot_be_shared() -> None:
    with torch.inference_mode():
        llama = tiny_llama(dtype=torch.float64, seed=3)
    with pytest.raises(ValueError, match="inference mode"):
        from_transformers(llama, share=True, layout="plain")
    assert SelfSpecGenerator(llama, policy="ls:2-3").generate(PROMPT, max_new_tokens=3).stats.num_new_tokens == 3


@pytest.mark.usefixtures("shares")
@pytest.mark.parametrize("name", UPDATES)
def test_the_next_call_runs_on_updated_weights(name: str) -> None:
    """In place they are there already, and what was captured stays; else they are taken anew. What was read is forgotten."""
    llama = tiny_llama(dtype=torch.float64, seed=3)
    engine = SelfSpecGenerator(llama, policy="ls:2-3", prefix_cache="1MB")
    assert engine.generate(PROMPT, max_new_tokens=12).new_tokens == reference_greedy(llama, PROMPT, max_new_tokens=12)
    assert engine.generate(PROMPT, max_new_tokens=12).stats.num_reused_tokens > 0
    model = engine.model
    UPDATES[name](llama)
    expected = reference_greedy(llama, PROMPT, max_new_tokens=12)
    result = engine.generate(PROMPT, max_new_tokens=12)
    assert result.new_tokens == expected
    assert result.stats.num_reused_tokens == 0
    assert (engine.model is model) == (name in IN_PLACE)
    assert set(IN_PLACE) < set(UPDATES)
