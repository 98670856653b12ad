"""Costs that were measured once, kept for the next process: a file in the user's cache, by machine, weights and threads.

Whatever is wrong with the file, it is as if there were none, and it is replaced. SELFSPEC_CACHE names the folder; set to
nothing, it switches the file off.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
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
_MOST_ENTRIES, _MOST_BYTES = 64, 1 << 20
_MOST_SECONDS = 1e4  # of any one call
_BROKEN = OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError
_PROCESSOR = re.compile(r"^(?:vendor_id|cpu family|model|model name|cache size)\s*: (.*)$", re.MULTILINE)


def kept_cost(model: LayerSkipModel, runner: RunnerName) -> MeasuredCost | None:
    """Return the cost that was kept for this machine, these weights and threads; None without one that makes sense."""
    key = _key(model, runner)
    with suppress(*_BROKEN):
        return _checked(_entries(_path())[key], model.num_layers)
    return None


def keep_cost(model: LayerSkipModel, runner: RunnerName, cost: MeasuredCost) -> None:
    """Keep a cost, in place of the one that there is. Of two processes that write at once, one may lose what it wrote."""
    path, key = _path(), _key(model, runner)
    others = [(name, values) for name, values in _entries(path).items() if name != key]
    entries = dict([*others[1 - _MOST_ENTRIES :], (key, cost.as_dict())])
    if path is None:
        return
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
    caches = os.environ.get("XDG_CACHE_HOME", "")
    folder = os.environ.get("SELFSPEC_CACHE", f"{caches if caches.startswith('/') else '~/.cache'}/selfspec")
    with suppress(RuntimeError):  # no home
        return Path(folder, "costs.json").expanduser() if folder else None
    return None


def _entries(path: Path | None) -> dict[str, Any]:
    """Read all entries, the oldest first; none if the file is missing, broken, too large or of another version."""
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
    seconds = [*cost.layer_seconds, *cost.head_seconds, *adapters, cost.draft_seconds]
    plausible = all(isinstance(value, float) and abs(value) < _MOST_SECONDS for value in seconds)  # a NaN is not
    interrupted = any(took > 1.5 * rows * cost.layer_seconds[0] for rows, took in enumerate(cost.layer_seconds, 1))
    if interrupted or not plausible or cost.num_layers != num_layers or cost.fixed or set(values) - set(cost.as_dict()):
        raise ValueError("this is not what was kept")
    for _, other in values.get("rounded", ()):
        _checked(other, num_layers)
    return cost


@cache
def _processor_name() -> str:
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
        return ", ".join(_PROCESSOR.findall(first))
    return platform.processor() or platform.machine()


def _key(model: LayerSkipModel, runner: RunnerName) -> str:
    """Make a key of what costs depend on: what runs the model, and how its matrices are stored. No path, no weights."""
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else _processor_name()
    shape = model.hidden_size, model.layer_weights, model.vocab_size, model.num_heads, model.num_kv_heads
    adapters = sorted((layer, one.steering is not None) for layer, one in model.adapters.items())
    linears = [*(linear for layer in model.layers for linear in layer.linears), model.head, model.drafting_head]
    stored = [(type(linear).__name__, linear.num_bytes, row_bits(linear)) for linear in linears]
    facts = device, model.kernels, num_threads(), runner, model.dtype, model.kv_dtype, shape, adapters, stored
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
