"""What differs on GPUs, on a CPU: layouts of attention, rotary in real numbers, masks, shared weights, several devices.

Shared weights are once in memory, and what is written to them is seen at once. Where layers are spread over devices, every
layer counts as a device of its own.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from transformers import LlamaForCausalLM

from layerskip_models import LayerSkipModel, from_transformers
from layerskip_models.checkpoints import conversion, spread_loading
from layerskip_models.checkpoints.conversion import together
from layerskip_models.checkpoints.spread_loading import load_spread, places, spread
from layerskip_models.kv_cache import KVCache
from random_adapters import adapted
from scripted_policies import named_policy
from selfspec import SelfSpecGenerator
from selfspec.engine import model_source
from tiny_llama import full_logits, lean_logits, reference_greedy, tiny_llama, tiny_tokenizer
from weight_updates import UPDATES

TEXT = [3, 8, 1, 0, 22, 5, 7]
SHAPES = [(2, 1), (4, 2), (4, 4)]  # heads, key-value heads


def as_on_cuda(llama: LlamaForCausalLM) -> LayerSkipModel:
    """The lean model, on the paths that it takes on CUDA."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "interleaves", lambda device: False)
        model = from_transformers(llama, layout="plain")
    for name, value in (("_unfused", False), ("_groups_rows", True)):
        assert hasattr(model.operators, name)  # or nothing would be switched
        setattr(model.operators, name, value)
    return model


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
def test_rows_in_any_number_on_the_paths_of_cuda(
    heads: int, kv_heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row, several at the text's beginning and several behind others.

    Attention's result is laid out as by its CUDA kernels: [batch, rows, heads, head_dim] in memory, then transposed. Masks
    have rows of a multiple of eight: else the kernel that takes them copies them in every layer.
    """
    plain, strides = F.scaled_dot_product_attention, list[int]()

    def attention(*args: Any, **options: Any) -> Tensor:
        if options.get("attn_mask") is not None:
            strides.append(options["attn_mask"].stride(-2))
        return plain(*args, **options).transpose(1, 2).contiguous().transpose(1, 2)

    llama = tiny_llama(heads=heads, kv_heads=kv_heads, dtype=dtype, seed=3)
    expected = full_logits(llama, TEXT)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    model = as_on_cuda(llama)
    cache = KVCache(model, 16)
    with torch.inference_mode():
        hidden = model.embed(torch.tensor(TEXT))
        states = [model.run_layers(hidden[start:stop], 0, 4, cache) for start, stop in ((0, 3), (3, 4), (4, 7))]
        bound = 0.3 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(model.logits(torch.cat(states)), expected, rtol=0, atol=bound)
    assert strides and all(stride % 8 == 0 for stride in strides), strides


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 0.0), (torch.float16, 0.0)]
)
def test_rotary_in_real_numbers_is_the_complex_one(dtype: torch.dtype, bound: float) -> None:
    llama = tiny_llama(heads=4, kv_heads=2, dtype=dtype, seed=3)
    theirs, ours = from_transformers(llama, layout="plain"), as_on_cuda(llama)
    theirs.operators._half = dtype.itemsize == 2  # on a CPU such a model computes in float32, on CUDA in its own dtype
    theirs.prepare(32)
    ours.prepare(32)
    assert theirs.rotary.is_complex()
    assert not ours.rotary.is_complex()
    heads = torch.randn(5, 8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    halves = heads.unflatten(-1, (2, -1))
    expected, found = rearrange(halves, "... half pair -> ... (pair half)").clone(), heads.clone()
    positions = torch.tensor([0, 7, 7, 30, 2])
    theirs.operators._rotate(expected, 6, theirs.rotary[positions])
    ours.operators._rotate(found, 6, ours.rotary[positions])
    pairs = rearrange(found, "... (half pair) -> ... (pair half)", half=2)
    torch.testing.assert_close(pairs, expected, rtol=0, atol=bound)
    assert torch.equal(found[:, 6:], heads[:, 6:])
    assert not torch.equal(found[1:, :6], heads[1:, :6])


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


NEW = 20


def test_texts_and_caches_are_those_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = tiny_llama(num_layers=5, dtype=torch.float64, seed=3)
    whole = adapted(from_transformers(llama, layout="plain"), [1, 3])
    cpu = torch.device("cpu")
    model = spread(whole, [cpu] * 5, cpu)
    # Two stretches: groupby tells apart what is not equal.
    monkeypatch.setattr(spread_loading, "groupby", lambda devices: ((cpu, [one]) for one in devices))
    monkeypatch.setattr("layerskip_models.kv_cache.groupby", lambda devices: ((cpu, [one]) for one in devices))
    assert len(KVCache(model, 4).memory) == 2 * 5
    generator = SelfSpecGenerator(model, tiny_tokenizer(), prefix_cache="1MB")
    for index, name in enumerate(("ls:{E}-4", "del", "pacer:random,exit_layer={E},b=2,t=0.3", "copy:3")):
        policy = named_policy(name, 1 + index % 3, model)
        prompt = [5, 1, 7, index]
        result = generator.generate(prompt, max_new_tokens=NEW, policy=policy)
        assert result.new_tokens == reference_greedy(llama, prompt, max_new_tokens=NEW)
        again = generator.generate(result.sequences[0, :-4], max_new_tokens=4, policy="ls:2-2")
        assert again.stats.num_reused_tokens > 0
        assert again.new_tokens == result.new_tokens[-4:]
    drawn = [
        SelfSpecGenerator(one).generate([5, 1], max_new_tokens=NEW, do_sample=True, seed=4, policy="ls:2-3").new_tokens
        for one in (model, whole)
    ]
    assert drawn[0] == drawn[1]
    assert generator.generate([5, 1], max_new_tokens=4, policy="auto").new_tokens  # calibrates


def places_of(config: Any) -> list[str]:
    return [
        "model.embed_tokens",
        *(f"model.layers.{i}" for i in range(config.num_hidden_layers)),
        "model.norm",
        "lm_head",
    ]


def test_accelerate_divides_whole_layers() -> None:
    """A tied head is where the embedding is."""
    config = tiny_llama(num_layers=6).config
    layer = sum(p.numel() for p in tiny_llama(num_layers=2).model.layers[0].parameters()) * 4
    found = places(config, torch.float32, {0: 6 * layer, 1: 6 * layer})
    assert sorted(found) == sorted(places_of(config))
    numbers = [found[f"model.layers.{index}"].index for index in range(6)]
    assert numbers == sorted(numbers)
    assert {*numbers} == {0, 1}
    with pytest.raises(ValueError, match=r"GPUs of this machine do not hold the model: \d of its 9 parts"):
        places(config, torch.float32, {0: 2 * layer, 1: 2 * layer})
    config.tie_word_embeddings = True
    found = places(config, torch.float32, {0: 6 * layer, 1: 6 * layer})
    assert found["lm_head"] == found["model.embed_tokens"] == found["model.norm"]


def test_a_checkpoint_is_read_to_where_its_layers_are(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor in the place of every GPU."""
    asked = []

    def places(config: Any, dtype: torch.dtype, max_memory: object) -> dict[str, torch.device]:
        asked.append(dtype)
        return dict.fromkeys(places_of(config), torch.device("cpu"))

    monkeypatch.setattr(spread_loading, "places", places)
    model = load_spread(checkpoint, dtype="float32", max_memory={0: 1})
    assert asked == [torch.float32]
    whole = SelfSpecGenerator.from_pretrained(checkpoint, policy="ls:2-3")
    expected = whole.generate([5, 1, 7], max_new_tokens=NEW).new_tokens
    assert SelfSpecGenerator(model, policy="ls:2-3").generate([5, 1, 7], max_new_tokens=NEW).new_tokens == expected


def test_what_cannot_be_spread_is_refused(checkpoint: Path) -> None:
    if torch.cuda.device_count() < 2:
        with pytest.raises(ValueError, match="this machine has"):
            SelfSpecGenerator.from_pretrained(checkpoint, device_map="auto")
    with pytest.raises(ValueError, match="goes without device"):
        SelfSpecGenerator.from_pretrained(checkpoint, device_map="auto", device="cpu")
