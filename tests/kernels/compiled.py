"""What tests compile in C, with the flags of setup.py."""

from __future__ import annotations

import os
import platform
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "layerskip_models" / "kernels"


def build_settings() -> dict[str, Any]:
    """Return what setup.py says; skip the test where setuptools is too old for it."""
    pytest.importorskip("setuptools.command.bdist_wheel")
    return runpy.run_path(str(ROOT / "setup.py"))


def variants_here() -> dict[str, list[str]]:
    """Flags of each variant that a wheel for this kind of processor has."""
    found: dict[str, list[str]] = build_settings()["VARIANTS"].get(platform.machine().lower(), {"baseline": []})
    return found


def compile_c(to: Path, *options: str | Path) -> Path:
    """Compile the sources among `options`, with few optimisations, and with CFLAGS, which hold the sanitizers if any."""
    flags = [*build_settings()["FLAGS"], "-O1", *os.environ.get("CFLAGS", "").split(), f"-I{FOLDER}"]
    subprocess.run(["cc", *flags, "-o", to, *options, "-lm"], check=True)
    return to
