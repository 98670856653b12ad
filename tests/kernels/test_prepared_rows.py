"""Rows as the kernels prepare them: many wide ones go through a matrix in batches, and keep the bits that they have alone."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from exact_rooms import exact_rooms
from layerskip_models.kernels import library
from layerskip_models.kernels.native_grouped import NativeGroupedLinear
from layerskip_models.kernels.native_linear import NativeInt8Linear, NativeLinear
from layerskip_models.kernels.threads import on_threads
from layerskip_models.norm import RMSNorm
from test_four_bits import drawn
from test_native import every_variant, needs_native, use
from test_native_four_bits import drawn_weight

WIDE = 4096
ROOT = Path(__file__).parents[2]
EMULATED = ["-DEMULATED_TILES", "-DTILE_BYTES=0"]


def linear_of(kind: str, outputs: int, width: int) -> NativeLinear:
    if kind == "int4":
        return NativeGroupedLinear(drawn_weight(outputs, width, 32, False, False))
    weight = drawn(outputs, width)
    if kind == "int8":
        return NativeInt8Linear(weight)
    return NativeLinear(weight if kind == "float32" else weight.bfloat16())


@needs_native
@every_variant
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
def test_rows_in_several_batches_are_the_rows_alone(variant: str, kind: str) -> None:
    """So many and wide rows that they do not all stay in the second cache: 70 of 4,096 numbers."""
    with use(variant):
        linear = linear_of(kind, 37, WIDE)
    x = drawn(70, WIDE, seed=3)
    with on_threads(1):
        alone = torch.cat([linear(row) for row in x.split(1)])
    norm = RMSNorm(1 + 0.1 * drawn(WIDE, seed=4), 1e-5)
    with on_threads(1):
        normed = torch.cat([linear.of_normalised(norm, row) for row in x.split(1)])
    for threads in (1, 2, 3):
        with on_threads(threads), exact_rooms():
            for _ in range(2):  # from its second call on, a team prepares rows together
                assert torch.equal(linear(x), alone)
                assert torch.equal(linear.of_normalised(norm, x), normed)
                assert torch.equal(linear.choices_of_normalised(norm, x, "token").tokens, normed.argmax(1))


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
