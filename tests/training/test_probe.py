"""A short fit of exit adapters before anybody trains them."""

from __future__ import annotations

import pytest
import torch

from layerskip_models import from_transformers
from random_adapters import adapted
from selfspec import SelfSpecGenerator
from selfspec.analysis.inspection import inspect_model, inspection_lines
from selfspec.exits.probe import probe_exits
from tiny_llama import tiny_llama, tiny_tokenizer

TEXTS = [torch.arange(12) % 24, torch.arange(5)]


@pytest.fixture(scope="module")
def generator() -> SelfSpecGenerator:
    model = from_transformers(tiny_llama(num_layers=8, late_scale=0.8, seed=5), layout="plain")
    return SelfSpecGenerator(adapted(model, [1]), tiny_tokenizer())


def test_a_probe_fits_to_text_of_the_models_own(generator: SelfSpecGenerator) -> None:
    said: list[str] = []
    probe = probe_exits(generator, TEXTS, 1.0, say=said.append)
    assert probe.adapters.exit_layers == (1, 2)
    assert probe.steps > 0
    assert probe.tokens > 100
    assert bool(probe.adapters.at(2).down.weight.any())
    assert any("written" in label for label in said)
    assert sorted(generator.model.adapters) == [1]  # what the generator drafts with is left alone


def test_no_time_is_refused(generator: SelfSpecGenerator) -> None:
    with pytest.raises(ValueError, match="positive"):
        probe_exits(generator, TEXTS, 0.0)


def test_inspect_says_what_adapters_would_give(generator: SelfSpecGenerator) -> None:
    steps: list[str] = []
    texts = ["abcd abc bed cab head fig"]
    found = inspect_model(generator, texts, max_new_tokens=8, repeats=1, probe_seconds=0.5, advance=steps.append)
    assert found.adapted is not None and found.probe is not None
    assert found.probe.adapters.exit_layers == (1, 2)
    assert len(steps) == 2 * len(texts) + 3
    lines = inspection_lines(found)
    assert "with an adapter" in lines[0]
    assert f"{found.adapted.own_agreement[2]:.3f}" in lines[2]
    assert "train-exit" in lines[-1]
    bare = inspect_model(generator, texts, max_new_tokens=8, repeats=1)
    assert bare.adapted is bare.probe is None
    assert "adapter" not in inspection_lines(bare)[0]
