"""A 7B's weights: loaded within little more memory than they need, layer by layer.

SELFSPEC_LARGE_LAYERS: how many of its 32 layers the checkpoint has; without it as many as half of the free memory and the
free disk hold.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from gguf import GGMLQuantizationType, get_tensor_name_map
from gguf.constants import MODEL_ARCH
from transformers import PreTrainedConfig

import gguf_models
from fuzz_models import small_config
from layerskip_models.checkpoints.parameters import parameter_shapes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of its memory from Linux"),
]
LAYERS = 32
"""Of a Llama 2 7B, whose other sizes are those of `config_of`."""
BASE = 700 << 20
"""Python, PyTorch and what is imported of transformers; of a GGUF file also the embedding, which is float32 in memory."""
LOAD = """
import json, sys
import gguf, torch  # imports are not part of loading
from transformers import GenerationConfig, LlamaConfig
from layerskip_models import load_model
from layerskip_models.checkpoints.conversion import telling
from layerskip_models.kernels.check import native_works

native_works(torch.device("cpu"), torch.float32)
shown = []
with telling(lambda done, total: shown.append(done)):
    load_model(sys.argv[1], device="cpu", exits=None)
with open("/proc/self/status") as status:
    (peak,) = (1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
print(json.dumps({"peak": peak, "layers_shown": shown}))
"""


def config_of(num_layers: int) -> PreTrainedConfig:
    own = {"vocab_size": 32000, "tie_word_embeddings": False, "dtype": "bfloat16"}
    return small_config("llama", 4096, 11008, num_layers, 32, 32, **own)


def write_safetensors(folder: Path, num_layers: int) -> Path:
    """In bfloat16. Every number is in [0.5, 2): finite, and with all mantissas. Returns what `load_model` takes."""
    config = config_of(num_layers)
    config.save_pretrained(folder)
    header: dict[str, Any] = {}
    at = 0
    for name, shape in parameter_shapes(config).items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    said = json.dumps(header).encode()
    said += b" " * (-len(said) % 8)
    numbers = np.random.default_rng(0).integers(0x3F00, 0x4000, 1 << 25, np.uint16).tobytes()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(said)) + said)
        while at:
            at -= file.write(numbers[:at])
    return folder


def write_gguf(folder: Path, num_layers: int) -> Path:
    """The same in Q8_0, norms in F32; the blocks of all matrices are those of the largest one."""
    config, names = config_of(num_layers), get_tensor_name_map(MODEL_ARCH.LLAMA, num_layers)
    blocks = np.random.default_rng(0).integers(0, 256, (32000 * 4096 // 32, 34), np.uint8)
    blocks[:, :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)  # the scale of each block
    contents = {}
    for name, shape in parameter_shapes(config).items():
        numbers, kind = np.ones(shape, np.float32), GGMLQuantizationType.F32
        if len(shape) == 2:
            rows, columns = shape
            numbers, kind = blocks.reshape(-1)[: rows * columns // 32 * 34].reshape(rows, -1), GGMLQuantizationType.Q8_0
        contents[str(names.get_name(name, (".weight",)))] = numbers, kind
    gguf_models.write(folder / "model.gguf", "llama", gguf_models.metadata(config), contents)
    return folder / "model.gguf"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path)  # pytest would keep three of them


@pytest.mark.parametrize(
    ("write", "layer_bytes"), [(write_safetensors, 405 << 20), (write_gguf, 215 << 20)], ids=["bfloat16", "Q8_0"]
)
def test_loading_takes_the_memory_of_the_model(
    write: Callable[[Path, int], Path], layer_bytes: int, folder: Path
) -> None:
    room = min(psutil.virtual_memory().available // 2, shutil.disk_usage(folder).free // 3)
    layers = int(os.environ.get("SELFSPEC_LARGE_LAYERS", max(2, min(LAYERS, room // layer_bytes - 3))))
    path = write(folder, layers)
    size = sum(file.stat().st_size for file in folder.iterdir())
    done = subprocess.run([sys.executable, "-c", LOAD, str(path)], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    assert found["layers_shown"] == [*range(1, layers + 1)]
    assert found["peak"] <= 1.15 * size + (0 if layers == LAYERS else BASE)
