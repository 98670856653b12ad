"""C programs around the kernels: the team where something goes wrong, and rows as they are prepared."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from os import environ
from pathlib import Path

import pytest

from compiled import FOLDER, ROOT, build_settings, compile_c
from layerskip_models.kernels import library

TESTS = ROOT / "tests" / "kernels"
DISTURBED = ["-Dposix_memalign=scarce", "-DSPIN_QUIET=0", "-DSPIN_BUSY=0", "-DNAPS=0"]
"""Threads that lose some time between any two reads."""
NOT_LINUX = ["-U__linux__"]
"""What is compiled for a Mac, say, but on this system."""
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


@pytest.fixture(scope="module", params=["futex", "crowded", "condition"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Helpers sleep as they do on Linux, with and without those that have no core to themselves, and as they do elsewhere."""
    own = {"futex": [], "crowded": ["-DSTEP_ASIDE=0"], "condition": NOT_LINUX}[request.param]
    sources = ["-include", TESTS / "disturbed.h", TESTS / "pool_failures.c", FOLDER / "pool.c"]
    return compile_c(tmp_path_factory.mktemp("pool") / "program", *DISTURBED, *own, *sources)


@on_linux
@pytest.mark.parametrize("what", ["late", "memory", "stop", "fork"])
def test_the_team_survives(what: str, program: Path) -> None:
    """Late helpers; a caller without memory, whose helpers then write nothing; an end while they fall asleep; a fork."""
    if what == "fork" and "address" in environ.get("CFLAGS", ""):
        pytest.skip("AddressSanitizer's own memory may be locked in a child that is forked beside threads")
    assert subprocess.run([program, what], check=False).returncode == 0


@on_linux
@pytest.mark.parametrize("source", ["processor.c", "pool.c"])
def test_other_systems_get_no_system_calls_of_linux(source: str) -> None:
    """They have no such header, or other numbers in it."""
    flags = [*build_settings()["FLAGS"], *NOT_LINUX, str(FOLDER / source)]
    subprocess.run(["cc", *flags, "-Wall", "-Wextra", "-Werror", "-fsyntax-only"], check=True)
    result = subprocess.run(["cc", *flags, "-E", "-P"], check=True, capture_output=True, text=True)
    assert re.search(r"^(?!extern).*\bsyscall\b", result.stdout, re.MULTILINE) is None


@pytest.mark.parametrize(("variant", "tiles"), [("baseline", True), ("avx2", False), ("vnni", False), ("vnni", True)])
def test_vectors_cut_rows_as_one_number_after_another_would(variant: str, tiles: bool, tmp_path: Path) -> None:
    """Many wide rows go through a matrix in batches, and keep the bits that they have alone."""
    if variant not in library.runnable_variants():
        pytest.skip(f"this processor does not run {variant}")
    options = [*build_settings()["X86"][variant], *(["-DEMULATED_TILES", "-DTILE_BYTES=0"] if tiles else [])]
    program = compile_c(tmp_path / "rows", *options, TESTS / "prepared_rows.c")
    assert subprocess.run([program], check=False).returncode == 0
