"""The default policy, and the best known fixed setting of a checkpoint.

A file `selfspec.json` in a checkpoint's folder, {"policy": "ls:3-4"}, names the fixed setting that was found best for it. The
demo's was written from a sweep (docs/benchmarks.md).
"""

from __future__ import annotations

import json
import re
from pathlib import Path

DEFAULT_POLICY = "auto"
"""It needs no setting and adapts to any checkpoint."""
DEFAULT_BATCH_SIZE = 8
"""Number of texts decoded together. A larger batch raises throughput on a CPU only a little, and makes each text slower."""
SETTINGS_FILE = "selfspec.json"

PUBLISHED = {
    "facebook/layerskip-llama3.2-1B": "ls:3-6",
    "facebook/layerskip-llama3-8B": "ls:3-6",
    "facebook/layerskip-llama2-7B": "ls:7-6",
    "facebook/layerskip-llama2-13B": "ls:7-4",
    "facebook/layerskip-llama2-70B": "ls:9-6",
    "facebook/layerskip-codellama-7B": "ls:7-6",
    "facebook/layerskip-codellama-34B": "ls:9-6",
}
"""The best fixed settings of DEL's grid search (Entezari Zarch et al. 2025): the LS rows of Table 1, and of Table 2 for
CodeLlama."""


def fixed_policy(name: str | None, num_layers: int) -> str:
    """Name the best known fixed setting: measured for this checkpoint, or published, or else exit after L/4 layers, draft 4.

    name: hub name or local folder, None if unknown. Raises ValueError if the checkpoint's `selfspec.json` cannot be read.
    """
    if name is not None:
        path = Path(name) / SETTINGS_FILE
        if path.is_file():
            return _read(path)
        if name in PUBLISHED:
            return PUBLISHED[name]
    return f"ls:{max(1, num_layers // 4)}-4"


def fixed_setting(name: str | None, num_layers: int) -> tuple[int, int]:
    """Return (exit_layer, num_speculations) of `fixed_policy`."""
    exit_layer, _, length = fixed_policy(name, num_layers).removeprefix("ls:").partition("-")
    return int(exit_layer), int(length)


def _read(path: Path) -> str:
    try:
        policy = json.loads(path.read_text(encoding="utf-8"))["policy"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f'{path} must hold {{"policy": "ls:E-GAMMA"}}: mend or delete it ({error!r})') from error
    if not isinstance(policy, str) or not re.fullmatch(r"ls:\d+-\d+", policy):
        raise ValueError(f'{path}: "policy" must be a fixed setting such as "ls:3-4", got {policy!r}')
    return policy
