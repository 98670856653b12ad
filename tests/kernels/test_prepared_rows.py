"""Rows as the kernels prepare them: many wide ones go through a matrix in batches, and keep the bits that they have alone."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from layerskip_models.kernels import library

ROOT = Path(__file__).parents[2]
EMULATED = ["-DEMULATED_TILES", "-DTILE_BYTES=0"]


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(("variant", "tiles"), [("baseline", True), ("avx2", False), ("vnni", False), ("vnni", True)])
def test_vectors_cut_rows_as_one_number_after_another_would(variant: str, tiles: bool, tmp_path: Path) -> None:
    pytest.importorskip("setuptools.command.bdist_wheel")
    if variant not in library.runnable_variants():
        pytest.skip(f"this processor does not run {variant}")
    setup = runpy.run_path(str(ROOT / "setup.py"))
    options = [
        *setup["FLAGS"],
        "-O1",
        *setup["X86"][variant],
        *(EMULATED if tiles else []),
        f"-I{library.LIBRARY.parent}",
        *os.environ.get("CFLAGS", "").split(),
    ]
    program = tmp_path / "rows"
    subprocess.run(["cc", *options, "-o", program, ROOT / "tests" / "kernels" / "prepared_rows.c", "-lm"], check=True)
    assert subprocess.run([program], check=False).returncode == 0
