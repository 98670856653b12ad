"""A 7B's weights: loaded within little more memory than they need, layer by layer.

SELFSPEC_LARGE_LAYERS: how many of its 32 layers the checkpoint has; without it as many as half of the free memory and the
free disk hold.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from large_checkpoints import LAYERS, loaded, write_gguf, write_safetensors

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of its memory from Linux"),
]
BASE = 700 << 20
"""Python, PyTorch and what is imported of transformers; of a GGUF file also the embedding, which is float32 in memory."""


def num_layers(folder: Path, layer_bytes: int) -> int:
    room = min(psutil.virtual_memory().available // 2, shutil.disk_usage(folder).free // 3)
    return int(os.environ.get("SELFSPEC_LARGE_LAYERS", max(2, min(LAYERS, room // layer_bytes - 3))))


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
    layers = num_layers(folder, layer_bytes)
    path = write(folder, layers)
    size = path.stat().st_size
    found = loaded(path if path.suffix == ".gguf" else folder)
    assert found["layers_shown"] == [*range(1, layers + 1)]
    assert found["peak"] <= 1.15 * size + (0 if layers == LAYERS else BASE)
