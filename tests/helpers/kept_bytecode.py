"""Bytecode of what the tests import is kept, also where PYTHONDONTWRITEBYTECODE says that none should be written.

Every program that a test starts would compile PyTorch and transformers anew, which takes ten seconds. The bytecode lies in
a folder of its own below build, for this and the next run: no source gets a `__pycache__` beside it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def keep_bytecode() -> None:
    """Here and in every process that is started from here. Nothing changes where bytecode is written anyway."""
    if sys.dont_write_bytecode:
        sys.pycache_prefix = str(Path(__file__).parents[2] / "build" / "bytecode")
        sys.dont_write_bytecode = False
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
