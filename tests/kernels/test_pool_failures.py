"""The team of threads where something goes wrong, in C alone, with threads that lose some time between any two reads."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from layerskip_models.kernels import library

ROOT = Path(__file__).parents[2]
FOLDER = library.LIBRARY.parent
DISTURBED = ["-Dposix_memalign=scarce", "-DSPIN_QUIET=0", "-DSPIN_BUSY=0", "-DNAPS=0"]
NOT_LINUX = ["-U__linux__"]
"""What is compiled for a Mac, say, but on this system."""
needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs a C compiler, on Linux"
)


@pytest.fixture(scope="module", params=["futex", "crowded", "condition"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Helpers sleep as they do on Linux, with and without those that have no core to themselves, and as they do elsewhere."""
    pytest.importorskip("setuptools.command.bdist_wheel")
    flags = [*runpy.run_path(str(ROOT / "setup.py"))["FLAGS"], "-O1", *os.environ.get("CFLAGS", "").split()]
    own = {"futex": [], "crowded": ["-DSTEP_ASIDE=0"], "condition": NOT_LINUX}[request.param]
    options = [*DISTURBED, *own, f"-I{FOLDER}"]
    sources = [
        "-include",
        ROOT / "tests/kernels/disturbed.h",
        ROOT / "tests/kernels/pool_failures.c",
        FOLDER / "pool.c",
    ]
    path = tmp_path_factory.mktemp("pool") / "program"
    subprocess.run(["cc", *flags, *options, "-o", path, *sources], check=True)
    return path


@needs_compiler
@pytest.mark.parametrize("what", ["late", "memory", "stop", "fork"])
def test_the_team_survives(what: str, program: Path) -> None:
    """Helpers that are late for a job; a caller without memory, whose helpers then write nothing more; an end while they fall
    asleep; and a fork beside jobs."""
    if what == "fork" and "address" in os.environ.get("CFLAGS", ""):
        pytest.skip("AddressSanitizer's own memory may be locked in a child that is forked beside threads")
    assert subprocess.run([program, what], check=False).returncode == 0


@needs_compiler
@pytest.mark.parametrize("source", ["processor.c", "pool.c"])
def test_other_systems_get_no_system_calls_of_linux(source: str) -> None:
    """They have no such header, or other numbers in it."""
    pytest.importorskip("setuptools.command.bdist_wheel")
    flags = [*runpy.run_path(str(ROOT / "setup.py"))["FLAGS"], *NOT_LINUX, str(FOLDER / source)]
    subprocess.run(["cc", *flags, "-Wall", "-Wextra", "-Werror", "-fsyntax-only"], check=True)
    result = subprocess.run(["cc", *flags, "-E", "-P"], check=True, capture_output=True, text=True)
    assert re.search(r"^(?!extern).*\bsyscall\b", result.stdout, re.MULTILINE) is None
