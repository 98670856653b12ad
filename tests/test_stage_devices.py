"""Each stage on a device of its own: nothing is computed with tensors of two devices. The devices are pretended ones."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended_devices import PretendedDevices
from staged_models import LAYERS
from tiny_llama import reference_greedy, tiny_llama, tiny_tokenizer
from transformers import GenerationConfig

from bench.trials.random_adapters import random_adapters
from layerskip_models import load_model
from layerskip_models.checkpoints import conversion
from layerskip_models.exits.folder import FOLDER, save_adapters
from selfspec.parallel import drafting_stage, two_stages
from selfspec.parallel.two_stages import TwoStages

PROMPT, NEW = [5, 1, 7], 10
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {
        "repetition_penalty": 1.3,
        "suppress_tokens": [1, 2],
        "min_new_tokens": 5,
        "eos_token_id": [7],
        "stop_strings": ["fig"],
    },
)


def test_pretended_devices_are_apart() -> None:
    with PretendedDevices():
        one, other = torch.arange(4, device="xla:1"), torch.arange(4, device="xla:0")
        assert (one + one).cpu().tolist() == [0, 2, 4, 6]
        assert one.device == torch.device("xla:1")
        for wrong in (other, torch.arange(4)):
            with pytest.raises(AssertionError, match="of tensors on"):
                one + wrong
        with pytest.raises((RuntimeError, TypeError)):
            one.numpy()


def test_stages_on_devices_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tied, since these devices' tensors have no addresses to tell two weights apart by.
    llama = tiny_llama(num_layers=LAYERS, late_scale=0.2, dtype=torch.float64, seed=3, tie_word_embeddings=True)
    llama.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / FOLDER).mkdir()
    save_adapters(random_adapters(load_model(tmp_path, dtype="float64", device="cpu"), [2]), tmp_path / FOLDER)
    sampling = GenerationConfig(max_new_tokens=NEW, do_sample=True, temperature=1.3, min_p=0.01, suppress_tokens=[3])
    found = {}
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": generator("cpu"))
    monkeypatch.setattr(conversion, "_release", lambda module: None)
    for module in (two_stages, drafting_stage):  # wrapped tensors are not for inference mode
        monkeypatch.setattr(module, "engine_mode", lambda device: torch.no_grad())
    for devices in (("cpu", "cpu"), ("xla:0", "xla:1"), ("cpu", "xla:1")):
        apart = nullcontext() if devices == ("cpu", "cpu") else PretendedDevices()
        with apart, TwoStages(tmp_path, 2, dtype="float64", devices=devices, lead=(2, 3), start="fork") as stages:
            assert stages.plan.adapters is not None
            assert str(stages.model.device) == devices[1]
            configs = [GenerationConfig(max_new_tokens=NEW, **options) for options in OPTIONS]
            texts = [stages.generate(PROMPT, generation_config=config).new_tokens for config in configs]
            found[devices] = stages.generate(PROMPT, generation_config=sampling, seed=4).new_tokens
        assert texts == [reference_greedy(llama, PROMPT, max_new_tokens=NEW, **options) for options in OPTIONS]
    assert len({tuple(text) for text in found.values()}) == 1
