"""A folder's weights come from the files that transformers would read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from layerskip_models import load_model
from layerskip_models.checkpoints.conversion import from_transformers
from layerskip_models.linear import Layout
from tiny_llama import lean_logits, tiny_llama

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
TEXT = [3, 1, 4, 1, 5, 9, 2, 6]
PLAIN: Layout = "plain"


def small(**options: Any) -> LlamaForCausalLM:
    return tiny_llama(num_layers=2, hidden_size=32, heads=2, kv_heads=1, head_dim=16, intermediate_size=64, **options)


def read(folder: Path) -> Tensor:
    return lean_logits(load_model(folder, dtype="float32", device="cpu", layout=PLAIN), TEXT)


def sharded(folder: Path, **options: Any) -> LlamaForCausalLM:
    model = small(**options)
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len([*folder.glob("model-*.safetensors")]) > 2
    return model


def change(path: Path, **changed: Tensor | None) -> None:
    """Write some tensors of a file anew, or leave them out."""
    tensors = load_file(path)
    for name, tensor in changed.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor.contiguous()
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("single", [True, False])
def test_one_file_goes_before_an_index(single: bool, tmp_path: Path) -> None:
    """Both are there, and differ."""
    sharded(tmp_path, seed=2)
    if single:
        small(seed=1).save_pretrained(tmp_path / "other")
        shutil.copy(tmp_path / "other" / FILE, tmp_path)
    save_file({"model.norm.weight": torch.zeros(32)}, tmp_path / "consolidated.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = lean_logits(from_transformers(theirs, layout=PLAIN), TEXT)
    assert torch.equal(read(tmp_path), expected)
    meant = lean_logits(from_transformers(small(seed=1 if single else 2), layout=PLAIN), TEXT)
    assert torch.equal(expected, meant)


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_head_that_is_in_the_file(same: bool, tmp_path: Path) -> None:
    """transformers ties the two only if they are equal."""
    model = small(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    head = model.lm_head.weight.detach()
    change(tmp_path / FILE, **{"lm_head.weight": head if same else head.flip(0)})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(theirs.lm_head.weight, theirs.model.embed_tokens.weight) == same
    assert torch.equal(read(tmp_path), lean_logits(from_transformers(theirs, layout=PLAIN), TEXT))


def index_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / INDEX).read_text())


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def rename(folder: Path, file: str) -> None:
    listed = index_of(folder)["weight_map"]
    write_index(folder, {**listed, "model.norm.weight": file})


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no such file": (lambda folder: rename(folder, "model-9.safetensors"), "has no model-9.safetensors, which its"),
    "a file elsewhere": (lambda folder: rename(folder, "../x.safetensors"), r"names \.\./x\.safetensors"),
    "no safetensors": (lambda folder: rename(folder, "config.json"), r"names config\.json"),
    "no tensor of that name": (
        lambda folder: write_index(
            folder, index_of(folder)["weight_map"] | {"model.x.weight": next(folder.glob("model-*")).name}
        ),
        r"lacks model\.x\.weight, which its",
    ),
    "no weight_map": (lambda folder: (folder / INDEX).write_text("{}"), "is damaged .*weight_map"),
    "no metadata": (
        lambda folder: (folder / INDEX).write_text(json.dumps({"weight_map": index_of(folder)["weight_map"]})),
        "is damaged .*metadata",
    ),
    "an empty list": (lambda folder: write_index(folder, {}), "is damaged .it lists nothing"),
    "no JSON": (lambda folder: (folder / INDEX).write_text("{"), "is damaged .*JSONDecodeError"),
    "a cut file": (
        lambda folder: [path.write_bytes(path.read_bytes()[:-8]) for path in [next(folder.glob("model-*"))]],
        r"model-0.*\.safetensors is incomplete or damaged",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_named(name: str, tmp_path: Path) -> None:
    sharded(tmp_path)
    breaks, message = BROKEN[name]
    breaks(tmp_path)
    with pytest.raises(OSError, match=message):
        read(tmp_path)


WRONG: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "missing": ({"model.layers.1.mlp.up_proj.weight": None}, r"(lacks weights|holds no).*layers\.1\.mlp\.up_proj"),
    "too many rows": ({"model.embed_tokens.weight": torch.zeros(30, 32)}, r"shape.*embed_tokens\.weight|model.emb.*30"),
    "too few": ({"model.norm.weight": torch.ones(31)}, r"shape.*model\.norm\.weight|norm\.weight has shape \[31\]"),
    "8-bit floats": (
        {"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}, r"model\.norm\.weight in .*is of type F8_E4M3"
    ),
    "integers": ({"model.norm.weight": torch.ones(32, dtype=torch.int32)}, r"model\.norm\.weight in .*is of type I32"),
    "NaN": ({"model.norm.weight": torch.full((32,), torch.nan)}, r"NaN or infinite weights,.* in model\.norm\.weight"),
    "infinite": ({"lm_head.weight": torch.full((24, 32), torch.inf)}, r"NaN or infinite weights,.* in lm_head\.weight"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tensors_are_named(name: str, tmp_path: Path) -> None:
    small().save_pretrained(tmp_path)
    changed, message = WRONG[name]
    change(tmp_path / FILE, **changed)
    with pytest.raises(ValueError, match=message):
        read(tmp_path)
