"""What makes thousands of small tests fast: kept bytecode, modules built once, and objects that no collector visits."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def keep_bytecode() -> None:
    """Keep bytecode below build, here and in programs that tests start, where PYTHONDONTWRITEBYTECODE says not to write any.

    They would compile PyTorch and transformers anew, which takes ten seconds.
    """
    if sys.dont_write_bytecode:
        sys.pycache_prefix = str(Path(__file__).parents[2] / "build" / "bytecode")
        sys.dont_write_bytecode = False
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def build_once() -> None:
    """Build once what transformers builds from a configuration to compare a model with: 20 ms of a tiny model's conversion.

    The check reads what was built and leaves it as it is.
    """
    from layerskip_models.checkpoints import as_built

    build = as_built.built_on_meta
    built: dict[tuple[type, str], PreTrainedModel] = {}

    def built_before(config: Any, name: str) -> PreTrainedModel:
        key = (type(config), config.to_json_string(use_diff=False))
        if key not in built:
            built[key] = build(config, name)
        return built[key]

    as_built.built_on_meta = built_before


def freeze() -> None:
    """Have Python's collector leave alone what exists now: its full collections took a quarter of the tests' time."""
    gc.collect()
    gc.freeze()
