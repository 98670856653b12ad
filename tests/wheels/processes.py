"""Run a program, and say what it said if it fails."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.wheels.targets import ReleaseError


def run(command: Sequence[str], environment: Mapping[str, str] | None = None, folder: Path | None = None) -> str:
    """What a program prints. Raises ReleaseError with its output and how it ended unless that is status 0."""
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        code = result.returncode
        end = signal.Signals(-code).name if code < 0 else f"status {code}"
        raise ReleaseError(f"`{' '.join(command)}` ended with {end}:\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    return result.stdout
