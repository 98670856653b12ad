"""Checkpoints of the size of a real model, written as fast as the disk takes them, and how they load.

Run as a program, with a checkpoint, it loads it and prints what that took.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

LAYERS = 32
"""Of a Llama 2 7B, whose other sizes are these."""
HIDDEN, INNER, HEADS, VOCAB = 4096, 11008, 32, 32000
_BLOCK = 1 << 26  # bytes of random numbers, which are written again and again


def tensors(num_layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """transformers' names and shapes."""
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for layer in range(num_layers):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"model.layers.{layer}.self_attn.{name}.weight", (HIDDEN, HIDDEN)
        yield f"model.layers.{layer}.mlp.gate_proj.weight", (INNER, HIDDEN)
        yield f"model.layers.{layer}.mlp.up_proj.weight", (INNER, HIDDEN)
        yield f"model.layers.{layer}.mlp.down_proj.weight", (HIDDEN, INNER)
        yield f"model.layers.{layer}.input_layernorm.weight", (HIDDEN,)
        yield f"model.layers.{layer}.post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)


def config_of(num_layers: int) -> Any:
    from fuzz_models import small_config

    sizes = HIDDEN, INNER, num_layers, HEADS, HEADS
    return small_config("llama", *sizes, vocab_size=VOCAB, tie_word_embeddings=False, dtype="bfloat16")


def write_safetensors(folder: Path, num_layers: int) -> Path:
    """A Llama in bfloat16; returns the file of its weights. Every number is in [0.5, 2): finite, and with all mantissas."""
    config_of(num_layers).save_pretrained(folder)
    header: dict[str, Any] = {}
    at = 0
    for name, shape in tensors(num_layers):
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    said = json.dumps(header).encode()
    said += b" " * (-len(said) % 8)
    numbers = np.random.default_rng(0).integers(0x3F00, 0x4000, _BLOCK // 2, np.uint16)
    path = folder / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(said)) + said)
        while at:
            at -= file.write(numbers.view(np.uint8).data[: min(_BLOCK, at)])
    return path


def write_gguf(folder: Path, num_layers: int) -> Path:
    """The same in Q8_0, norms in F32."""
    from gguf import GGMLQuantizationType, get_tensor_name_map
    from gguf.constants import MODEL_ARCH

    import gguf_models

    names, path = get_tensor_name_map(MODEL_ARCH.LLAMA, num_layers), folder / "model.gguf"
    contents = {}
    rows = np.random.default_rng(0).integers(0, 256, (_BLOCK // 34 // 128 * 128, 34), np.uint8)
    rows[:, :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)  # the scale of each block
    blocks = rows.reshape(-1)
    for name, shape in tensors(num_layers):
        stored = str(names.get_name(name, (".weight",)))
        if len(shape) == 1:
            contents[stored] = np.ones(shape, np.float32), GGMLQuantizationType.F32
        else:
            size = shape[0] * shape[1] // 32 * 34
            data = np.resize(blocks, size).reshape(shape[0], -1)
            contents[stored] = data, GGMLQuantizationType.Q8_0
    gguf_models.write(path, "llama", gguf_models.metadata(config_of(num_layers)), contents)
    return path


def loaded(checkpoint: Path) -> dict[str, Any]:
    """Load a checkpoint in a process of its own. Returns its peak of memory, and the layers that progress showed."""
    done = subprocess.run([sys.executable, __file__, str(checkpoint)], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main(checkpoint: str) -> None:
    import gguf  # noqa: F401 (imports are not part of loading)
    import torch
    from transformers import GenerationConfig, LlamaConfig  # noqa: F401

    from bench.machine import memory_bytes
    from layerskip_models import load_model
    from layerskip_models.checkpoints.conversion import telling
    from layerskip_models.kernels.check import native_works

    native_works(torch.device("cpu"), torch.float32)
    shown: list[int] = []
    with telling(lambda done, total: shown.append(done)):
        load_model(checkpoint, device="cpu", exits=None)
    print(json.dumps({"peak": memory_bytes("VmHWM"), "layers_shown": shown}))


if __name__ == "__main__":
    main(*sys.argv[1:])
