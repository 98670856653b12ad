"""The first layers of a GGUF file are those of the model, byte for byte, and one more layer can be added."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from gguf_models import metadata, tensors, write
from layerskip_models.checkpoints.gguf_first_layers import write_first_layers
from layerskip_models.checkpoints.gguf_reader import GgufReader
from layerskip_models.checkpoints.loading import load_transformers
from tiny_llama import full_logits, tiny_llama

TEXT = [(7 * i + 3) % 24 for i in range(30)]


def written(path: Path, kind: str = "Q8_0", **keys: object) -> Path:
    llama = tiny_llama(
        num_layers=4, hidden_size=32, heads=2, kv_heads=1, head_dim=16, intermediate_size=64, seed=4
    ).float()
    write(path, "llama", {**metadata(llama.config), **keys}, tensors(llama, kind))
    return path


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("num_layers", [2, 3])
def test_the_model_has_the_first_layers(kind: str, num_layers: int, tmp_path: Path) -> None:
    source = written(tmp_path / "model.gguf", kind)
    write_first_layers(source, tmp_path / "draft.gguf", num_layers)
    whole, draft = GgufReader(source), GgufReader(tmp_path / "draft.gguf")
    assert draft.keys == whole.keys
    assert {key for key in whole.keys if draft.value(key) != whole.value(key)} == {"llama.block_count"}
    stored = {tensor.name: tensor for tensor in whole.tensors}
    assert {tensor.name for tensor in draft.tensors} == {
        name for name in stored if not re.match(rf"blk\.[{num_layers}-9]", name)
    }
    for tensor in draft.tensors:
        assert tensor.tensor_type == stored[tensor.name].tensor_type
        assert tensor.data.tobytes() == stored[tensor.name].data.tobytes()
    model = load_transformers(source, dtype="float32", device="cpu")
    found = load_transformers(tmp_path / "draft.gguf", dtype="float32", device="cpu")
    model.model.layers = model.model.layers[:num_layers]
    model.config.num_hidden_layers = num_layers
    assert torch.equal(full_logits(found, TEXT), full_logits(model, TEXT))


def test_a_layer_can_be_added(tmp_path: Path) -> None:
    source = written(tmp_path / "model.gguf", "F32")
    second = {
        re.sub(r"^blk\.1\.", "blk.2.", tensor.name): np.array(tensor.data)
        for tensor in GgufReader(source).tensors
        if tensor.name.startswith("blk.1.")
    }
    write_first_layers(source, tmp_path / "draft.gguf", 2, second)
    found = load_transformers(tmp_path / "draft.gguf", dtype="float32", device="cpu")
    assert found.config.num_hidden_layers == 3
    layers = found.model.layers
    assert torch.equal(layers[1].mlp.up_proj.weight, layers[2].mlp.up_proj.weight)
    halves = {name: array.astype(np.float16) for name, array in second.items()}
    write_first_layers(source, tmp_path / "half.gguf", 2, halves)
    assert {tensor.tensor_type.name for tensor in GgufReader(tmp_path / "half.gguf").tensors} == {"F32", "F16"}


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    source = written(tmp_path / "model.gguf")
    for num_layers in (0, 4):
        with pytest.raises(
            ValueError, match=rf"num_layers must be in \[1, 3\] for this 4-layer file, got {num_layers}"
        ):
            write_first_layers(source, tmp_path / "draft.gguf", num_layers)
    source = written(tmp_path / "listed.gguf", **{"attention.sliding_window_pattern": [True, False, True, False]})
    with pytest.raises(ValueError, match=r"says llama\.attention\.sliding_window_pattern of each layer"):
        write_first_layers(source, tmp_path / "draft.gguf", 2)
