"""A checkpoint whose layers are run in two stages, with adapters behind some of its exits."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny_llama import tiny_llama, tiny_tokenizer
from transformers import LlamaForCausalLM

from bench.trials.random_adapters import random_adapters
from layerskip_models import load_model
from layerskip_models.exits.folder import FOLDER, save_adapters

LAYERS = 5
ADAPTED = [1, 3]


def staged_llama() -> LlamaForCausalLM:
    return tiny_llama(num_layers=LAYERS, late_scale=0.2, dtype=torch.float64, seed=3)


def save_staged(path: Path) -> Path:
    """Write it, its tokenizer and adapters behind the exits in ADAPTED."""
    staged_llama().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    (path / FOLDER).mkdir()
    save_adapters(random_adapters(load_model(path, dtype="float64", device="cpu"), ADAPTED), path / FOLDER)
    return path
