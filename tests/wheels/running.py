"""Install a wheel where there is no compiler, and run every variant that this machine has."""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from tests.wheels.processes import run
from tests.wheels.targets import ReleaseError

INSTALLED = Path(__file__).with_name("installed.py")


def install(wheel: Path, work: Path) -> Path:
    """Install a wheel for this machine into an environment of its own, and return that environment's Python.

    work: an empty folder. PyTorch and the other dependencies come from this environment. Raises ReleaseError.
    """
    run([sys.executable, "-m", "venv", str(work / "env")])
    python = work / "env" / "bin" / "python"
    run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)])
    packages = run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    (Path(packages) / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


def run_installed(python: Path) -> dict[str, str]:
    """Continue a text with every variant that this machine has, where there is no compiler.

    python: from `install`. Returns the text by the variant, best first. Raises ReleaseError.
    """
    _, variants, _ = _continued(python, "require", [])
    texts = {}
    for variant in variants:
        kernels, _, texts[variant] = _continued(python, variant, [])
        if kernels != variant:
            raise ReleaseError(f"the installed wheel ran the kernels {kernels} in place of {variant}")
    return texts


def run_installed_emulated(python: Path, emulator: Sequence[str], variant: str, text: str) -> None:
    """Continue the same text on an emulated processor, PyTorch included: some minutes.

    emulator: the command before a program. variant, text: what must come of it. Raises ReleaseError.
    """
    kernels, _, continued = _continued(python, "require", emulator)
    if (kernels, continued) != (variant, text):
        raise ReleaseError(
            f"`{' '.join(emulator)}` continued a text with {kernels} as {continued!r}, and {variant} here as {text!r}"
        )


def _continued(python: Path, choice: str, emulator: Sequence[str]) -> tuple[str, list[str], str]:
    """The variant that ran, all that could run, and the text. choice: for SELFSPEC_NATIVE."""
    work = python.parents[2]
    bare = {"PATH": "/nowhere", "HOME": str(work), "OMP_NUM_THREADS": "2", "SELFSPEC_NATIVE": choice}
    answer = json.loads(run([*emulator, str(python), "-I", str(INSTALLED)], bare, work))
    if not Path(answer["package"]).is_relative_to(work):
        raise ReleaseError(f"{answer['package']} was imported in place of the installed wheel")
    return answer["kernels"], answer["variants"], answer["text"]
