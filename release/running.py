"""Install a wheel where there is no compiler, and run every variant that this machine has."""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path

from release.processes import run
from release.targets import ReleaseError

INSTALLED = Path(__file__).with_name("installed.py")


def run_installed(wheel: Path, work: Path) -> dict[str, str]:
    """Install a wheel for this machine where there is no compiler, and continue a text with every variant.

    work: an empty folder. PyTorch and the other dependencies come from this environment.
    Returns the text by the variant. Raises ReleaseError.
    """
    run([sys.executable, "-m", "venv", str(work / "env")])
    python = work / "env" / "bin" / "python"
    run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)])
    packages = run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    (Path(packages) / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    bare = {"PATH": "/nowhere", "HOME": str(work), "OMP_NUM_THREADS": "2"}

    def installed(choice: str) -> dict[str, object]:
        command = [str(python), "-I", str(INSTALLED)]
        answer: dict[str, object] = json.loads(run(command, {**bare, "SELFSPEC_NATIVE": choice}, folder=work))
        if not str(answer["package"]).startswith(str(work)):
            raise ReleaseError(f"{answer['package']} was imported in place of the installed wheel")
        return answer

    variants = installed("require")["variants"]
    assert isinstance(variants, list)
    texts = {}
    for variant in variants:
        answer = installed(variant)
        if answer["kernels"] != variant:
            raise ReleaseError(f"the installed wheel ran the kernels {answer['kernels']} in place of {variant}")
        texts[variant] = str(answer["text"])
    return texts
