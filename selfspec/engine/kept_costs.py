"""Costs that were measured once, kept for the next process: a file in the user's cache, by machine, weights and threads.

Whatever is wrong with the file is as good as no file: costs are then measured or estimated again, and it is replaced.
SELFSPEC_CACHE names the folder; set to nothing, it switches the file off.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from layerskip_models import LayerSkipModel
from layerskip_models.kernels.threads import num_threads
from layerskip_models.linear import row_bits
from policies import MeasuredCost
from selfspec.engine.runners.runner import RunnerName

_VERSION = 1  # of the file, and of what its seconds mean
_MOST_ENTRIES = 64
_MOST_BYTES = 1 << 20  # 64 entries take a tenth of that
_MOST_SECONDS = 1e4  # of any one call
_BROKEN = OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError


def kept_cost(model: LayerSkipModel, runner: RunnerName) -> MeasuredCost | None:
    """Return the cost that was kept for this machine, these weights and threads; None without one that makes sense."""
    key = _key(model, runner)
    with suppress(*_BROKEN):
        return _checked(_entries()[key], model.num_layers)
    return None


def keep_cost(model: LayerSkipModel, runner: RunnerName, cost: MeasuredCost) -> None:
    """Keep a cost, in place of the one that there is. Of two processes that write at once, one may lose what it wrote."""
    path = _path()
    if path is None:
        return
    key = _key(model, runner)
    others = [(name, values) for name, values in _entries().items() if name != key]
    entries = dict([*others[1 - _MOST_ENTRIES :], (key, cost.as_dict())])
    with suppress(OSError, ValueError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
        try:
            temporary.write_text(json.dumps({"version": _VERSION, "costs": entries}), encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _path() -> Path | None:
    """Find the place of the file; None if there is to be none."""
    folder = os.environ.get("SELFSPEC_CACHE")
    if folder is not None:
        return Path(folder, "costs.json") if folder else None
    with suppress(RuntimeError):  # no home
        caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (caches if caches.is_absolute() else Path("~/.cache").expanduser()) / "selfspec" / "costs.json"
    return None


def _entries() -> dict[str, Any]:
    """Read all entries, the oldest first; none if the file is missing, broken, too large or of another version."""
    path = _path()
    with suppress(*_BROKEN):
        if path is not None and path.is_file() and path.stat().st_size <= _MOST_BYTES:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["version"] == _VERSION:
                return dict(found["costs"].items())
    return {}


def _checked(values: Any, num_layers: int) -> MeasuredCost:
    """Make the cost of an entry. Raises an error of `_BROKEN` unless it is of so many layers, and its seconds make sense."""
    cost = MeasuredCost.from_dict(values)
    adapters = [seconds for _, seconds in cost.adapter_seconds]
    seconds = [*cost.layer_seconds, *cost.head_seconds, *adapters, cost.draft_seconds, cost.round_seconds]
    if not all(isinstance(value, float) and abs(value) < _MOST_SECONDS for value in seconds):  # not a NaN, either
        raise ValueError("these are no seconds")
    if cost.num_layers != num_layers or cost.fixed or set(values) - set(cost.as_dict()):
        raise ValueError("this is not what was kept")
    for _, other in values.get("rounded", ()):
        _checked(other, num_layers)
    return cost


@cache
def _processor_name() -> str:
    """Name the processor as Linux does; elsewhere as Python does."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].split("\n")
        names = "vendor_id", "cpu family", "model", "model name", "cache size"
        return ", ".join(line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() in names)
    return platform.processor() or platform.machine()


def _key(model: LayerSkipModel, runner: RunnerName) -> str:
    """Make a key of all that costs depend on: what runs the model, and how its matrices are stored. No path, no weights."""
    on_gpu = model.device.type == "cuda"
    device = torch.cuda.get_device_name(model.device) if on_gpu else _processor_name()
    shape = model.hidden_size, model.layer_weights, model.vocab_size, model.num_heads, model.num_kv_heads
    facts = device, model.kernels, num_threads(), runner, model.dtype, model.kv_dtype, shape
    adapters = sorted((layer, one.steering is not None) for layer, one in model.adapters.items())
    linears = [*(linear for layer in model.layers for linear in layer.linears), model.head, model.draft_head]
    stored = [(type(linear).__name__, linear.num_bytes, row_bits(linear)) for linear in linears]
    return hashlib.sha256(repr((facts, adapters, stored)).encode()).hexdigest()[:32]
