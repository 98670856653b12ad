"""Build the source distribution, and from it a wheel for each platform.

`zig cc` is Clang with the headers and the stubs of many C libraries, so any Linux machine compiles for an old glibc, for
other processors and for macOS. setup.py does the rest as in any installation; only the environment names the compiler.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from tests.wheels.processes import run
from tests.wheels.targets import LIBRARY, ROOT, Platform


def compiler(target: Platform) -> list[str]:
    """The command that compiles and links for a platform. Raises ModuleNotFoundError if there is no `ziglang`."""
    import_module("ziglang")
    return [sys.executable, "-m", "ziglang", "cc", "-target", target.triple, f"-mcpu={target.processor}"]


def build_sdist(folder: Path, work: Path) -> Path:
    """The source distribution, in `folder`. work: an empty folder for what is between. Raises ReleaseError."""
    _setup(ROOT, "egg_info", "--egg-base", str(work), "sdist", "--dist-dir", str(folder), environment=_stamped())
    (found,) = folder.glob("*.tar.gz")
    return found


def build_wheel(sdist: Path, target: Platform, folder: Path, work: Path) -> Path:
    """A platform's wheel, in `folder`, from the files in the source distribution. Raises ReleaseError."""
    with tarfile.open(sdist) as archive:
        archive.extractall(work, filter="data")
    (source,) = work.iterdir()
    command = " ".join(compiler(target))
    environment = {
        **_stamped(),
        "CC": command,
        "LDSHARED": f"{command} -shared -s",
        "CFLAGS": "",
        "LDFLAGS": "",
        "_PYTHON_HOST_PLATFORM": target.host,
    }
    built = work / "wheel"
    _setup(source, "bdist_wheel", "--dist-dir", str(built), "--plat-name", target.tag, environment=environment)
    (found,) = built.glob("*.whl")
    folder.mkdir(parents=True, exist_ok=True)
    return found.replace(folder / found.name)


def build_program(target: Platform, sources: Sequence[Path], program: Path, *flags: str) -> Path:
    """A program for a platform, compiled for its oldest processor. Raises ReleaseError."""
    options = ["-std=gnu11", "-O2", "-ffp-contract=off", "-w", f"-I{ROOT / Path(LIBRARY).parent}", *flags]
    libraries = ["-lm", "-ldl", "-pthread"]
    run([*compiler(target), *options, "-o", str(program), *map(str, sources), *libraries])
    return program


def _stamped() -> dict[str, str]:
    """The environment, with the time of the last commit, so that the same sources give the same files."""
    stamp = os.environ.get("SOURCE_DATE_EPOCH")
    if stamp is None:
        asked = subprocess.run(
            ["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        stamp = asked.stdout.strip() or "1700000000"
    return {**os.environ, "SOURCE_DATE_EPOCH": stamp}


def _setup(source: Path, *arguments: str, environment: dict[str, str]) -> None:
    run([sys.executable, "setup.py", "--quiet", *arguments], environment, source)
