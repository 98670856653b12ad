"""Layers on several devices of one process: the text is the same. Here every layer counts as a device of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from layerskip_models import from_transformers
from layerskip_models.checkpoints import spread_loading
from layerskip_models.checkpoints.spread_loading import load_spread, places, spread
from layerskip_models.kv_cache import KVCache
from random_adapters import adapted
from scripted_policies import named_policy
from selfspec import SelfSpecGenerator
from tiny_llama import reference_greedy, tiny_llama, tiny_tokenizer

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


def test_accelerate_divides_whole_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_llama(num_layers=6).config
    layer = sum(p.numel() for p in tiny_llama(num_layers=2).model.layers[0].parameters()) * 4
    found = places(config, torch.float32, {0: 6 * layer, 1: 6 * layer})
    assert sorted(found) == sorted(places_of(config))
    numbers = [found[f"model.layers.{index}"].index for index in range(6)]
    assert numbers == sorted(numbers)
    assert {*numbers} == {0, 1}
    with pytest.raises(ValueError, match=r"GPUs of this machine do not hold the model: \d of its 9 parts"):
        places(config, torch.float32, {0: 2 * layer, 1: 2 * layer})


def test_a_tied_head_is_where_the_embedding_is() -> None:
    config = tiny_llama(num_layers=6, tie_word_embeddings=True).config
    layer = sum(p.numel() for p in tiny_llama(num_layers=2).model.layers[0].parameters()) * 4
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
