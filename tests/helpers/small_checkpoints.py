"""A small checkpoint of every format that is read, with the model that its files stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import PreTrainedModel

import gguf_models
from fuzz_models import looped_options, random_model, small_config
from layerskip_models import from_transformers
from layerskip_models.checkpoints.module_folder import fingerprint
from layerskip_models.exits.folder import save_adapters
from layerskip_models.families import IN_TRANSFORMERS
from looped_models import LOOPED
from random_adapters import random_adapters
from selfspec.pacer.network import PreVerifierConfig, PreVerifierModule, describe_layer, save_preverifier

VOCAB_SIZE = 24


@dataclass(frozen=True, slots=True)
class Built:
    """What a format's builder made. changed: the folder or file that mutations are tried on; meant: in float32."""

    folder: Path
    changed: Path
    meant: PreTrainedModel


def small(kind: str, seed: int) -> PreTrainedModel:
    """Of a family, in float32, with rows that every format holds."""
    random = Random(f"{kind} {seed}")
    own: dict[str, Any] = {"head_dim": 32} if kind in ("qwen3", *LOOPED) else {}
    if kind in LOOPED:
        own |= looped_options(kind, 2)
    if kind in ("mistral", "phi3"):
        own["sliding_window"] = random.choice([None, 5])
    if kind in ("qwen2", "qwen3") and random.random() < 0.5:
        own |= {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    kv_heads = random.choice([1, 2])
    own |= {"vocab_size": VOCAB_SIZE, "rms_norm_eps": 1e-3, "tie_word_embeddings": random.random() < 0.5}
    config = small_config(kind, 64, 96, 2, 2, kv_heads, **own)
    return random_model(config, late_scale=0.5, sharpness=1.5, seed=seed).float()


def _floats(folder: Path, seed: int, *, shard_size: str = "5GB") -> Built:
    model = small(Random(seed).choice([*IN_TRANSFORMERS]), seed)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return Built(folder, folder, model)


def _gguf(folder: Path, seed: int, *, kind: str) -> Built:
    name = Random(seed).choice([*gguf_models.KINDS])
    model: Any = small(name, seed)
    if name in ("qwen2", "qwen3"):  # whose files have no windows
        model.config.layer_types = ["full_attention"] * 2
        model = type(model)(model.config).eval()
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.2)
    gguf_models.round_to(model, kind)
    path = folder / "model.gguf"
    gguf_models.write(path, name, gguf_models.metadata(model.config), gguf_models.tensors(model, kind))
    return Built(folder, path, model)


def _adapters(folder: Path, seed: int) -> Built:
    model = small("llama", seed)
    model.save_pretrained(folder)
    place = folder / "exits"
    place.mkdir()
    save_adapters(random_adapters(from_transformers(model, layout="plain"), [1], seed=seed), place)
    return Built(folder, place, model)


def _preverifier(folder: Path, seed: int) -> Built:
    model = small("llama", seed)
    model.save_pretrained(folder)
    place = folder / "pacer"
    place.mkdir()
    lean = from_transformers(model, layout="plain")
    torch.manual_seed(seed)
    config = PreVerifierConfig(
        base_model="", fingerprint=fingerprint(lean), exit_layers=(1,), layer=describe_layer(model.config), max_drafts=4
    )
    save_preverifier(PreVerifierModule(config), place)
    return Built(folder, place, model)


Builder = Callable[[Path, int], Built]
FORMATS: Mapping[str, Builder] = {
    "safetensors": _floats,
    "safetensors, sharded": partial(_floats, shard_size="60KB"),
    **{f"gguf {kind}": partial(_gguf, kind=kind) for kind in ("F32", "F16", "Q8_0", "Q4_0", "Q4_1")},
    "adapters": _adapters,
    "pre-verifier": _preverifier,
}
"""By name: builder(folder, seed) fills an empty folder."""
