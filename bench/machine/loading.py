"""Measure how long a checkpoint takes to load, beside plain reads of its files, and how long commands take to start.

Run as a program, with a checkpoint and a dtype, it loads one and prints what that took.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.machine.memory import peak_bytes_of, private_bytes

STARTS = {
    "import torch": ["-c", "import torch"],
    "from selfspec import SelfSpecGenerator": ["-c", "from selfspec import SelfSpecGenerator"],
    "selfspec --version": ["-m", "selfspec", "--version"],
    "selfspec --help": ["-m", "selfspec", "--help"],
    "selfspec get --help": ["-m", "selfspec", "get", "--help"],
}
"""What a person waits for, and the arguments of Python that start it."""
_READ_BYTES = 8 << 20


def weight_files(checkpoint: Path) -> list[Path]:
    """List the files with a checkpoint's weights. checkpoint: a folder with safetensors, or a file."""
    return [checkpoint] if checkpoint.is_file() else sorted(checkpoint.glob("*.safetensors"))


def read_speed(files: Sequence[Path], *, cached: bool = False, readers: int = 1) -> float:
    """Bytes per second of plain reads of whole files. cached: as they are; else the system forgets their pages first.

    readers: threads that read a part of each file.
    """
    if not cached:
        forget(files)
    sizes = [file.stat().st_size for file in files]
    parts = [
        (file, size * number // readers, size * (number + 1) // readers)
        for file, size in zip(files, sizes)
        for number in range(readers)
    ]
    start = perf_counter()
    with ThreadPoolExecutor(readers) as pool:
        list(pool.map(_read, *zip(*parts)))
    return sum(sizes) / (perf_counter() - start)


def _read(path: Path, first: int, end: int) -> None:
    with path.open("rb", buffering=0) as file:
        file.seek(first)
        room, left = memoryview(bytearray(_READ_BYTES)), end - first
        while left:
            left -= file.readinto(room[: min(left, len(room))]) or 0


def forget(files: Sequence[Path]) -> None:
    """Have the system forget files' pages, so that they are read from the disk again. Only Linux can."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def loaded(checkpoint: Path, dtype: str = "auto") -> dict[str, Any]:
    """Load a checkpoint in a process of its own.

    Returns seconds, the process's peak of memory before and after (base, peak), bytes that are no file's (held), and the
    layers that its progress showed. Raises RuntimeError, with the last line that it said, if it cannot be loaded.
    """
    command = [sys.executable, "-m", "bench.machine.loading", str(checkpoint), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{checkpoint.name} did not load: {' '.join(done.stderr.strip().splitlines()[-1:])}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def start_seconds(arguments: Sequence[str]) -> tuple[float, float]:
    """Seconds until Python with these arguments has ended, on the clock and of processors."""
    before, start = _processor_seconds(), perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return perf_counter() - start, _processor_seconds() - before


def _processor_seconds() -> float:
    """Return the processor seconds of all child processes that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def main(checkpoint: str, dtype: str) -> None:
    """Run the process that `loaded` starts."""
    import gguf  # noqa: F401 (imports are not part of loading)
    import torch
    from transformers import GenerationConfig, LlamaConfig  # noqa: F401

    from layerskip_models import load_model
    from layerskip_models.checkpoints.conversion import telling
    from layerskip_models.kernels.check import native_works

    native_works(torch.device("cpu"), torch.float32)
    base = peak_bytes_of()
    shown: list[int] = []
    start = perf_counter()
    with telling(lambda done, total: shown.append(done)):
        model = load_model(checkpoint, dtype=dtype, device="cpu", exits=None)
    seconds = perf_counter() - start
    found = {"seconds": seconds, "base": base, "peak": peak_bytes_of(), "held": private_bytes(), "layers_shown": shown}
    print(json.dumps(found))
    assert len(shown) == model.num_layers


if __name__ == "__main__":
    main(*sys.argv[1:])
