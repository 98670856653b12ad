"""A small library that has what the checks ask for, and the same with one fault each."""

from __future__ import annotations

import dataclasses
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("elftools", reason="pip install '.[release]'")
pytest.importorskip("iced_x86", reason="pip install '.[release]'")

from tests.wheels.libraries import expected_functions, problems_of_linux_library
from tests.wheels.targets import TARGETS

X86 = TARGETS["x86_64"]
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64" or shutil.which("cc") is None,
    reason="makes libraries with a C compiler for x86-64",
)
EMPTY = 'void {name}(void) __attribute__((section("{section}"))); void {name}(void) {{}}\n'


def source_without(*left_out: str) -> str:
    """Every function that Python calls, each in its variant's section, empty."""
    functions = expected_functions(X86.variants) - set(left_out)
    lines = []
    for name in sorted(functions):
        variant = name.rpartition("_")[2]
        section = f"kernels_{variant}" if variant in X86.variants and not name.startswith("runs_") else ".text"
        lines.append(EMPTY.format(name=name, section=section))
    return "".join(lines)


def built(folder: Path, source: str, *flags: str) -> bytes:
    path = folder / "library.c"
    path.write_text(source, encoding="utf-8")
    options = ["-O1", "-fPIC", "-shared", "-nostdlib", *flags]
    subprocess.run(["cc", *options, "-o", str(folder / "library.so"), str(path)], check=True)
    return (folder / "library.so").read_bytes()


def test_a_library_without_faults_has_no_problems(tmp_path: Path) -> None:
    assert problems_of_linux_library(built(tmp_path, source_without()), X86) == []


INSTRUCTION = '__asm__(".section {section},\\"ax\\",@progbits\\n{text}\\n.text");\n'


@pytest.mark.parametrize(
    ("extra", "flags", "problem"),
    [
        (INSTRUCTION.format(section=".text", text="vaddps %ymm0, %ymm0, %ymm0"), [], "vaddps at 0x.* (AVX)"),
        (INSTRUCTION.format(section="kernels_baseline", text="haddps %xmm0, %xmm0"), [], "haddps at 0x.* (SSE3)"),
        (INSTRUCTION.format(section="kernels_avx2", text="vaddps %zmm0, %zmm0, %zmm0"), [], "vaddps at 0x.* (AVX512F)"),
        (INSTRUCTION.format(section="kernels_avx512", text="vpdpbusd %zmm0, %zmm0, %zmm0"), [], "(AVX512_VNNI)"),
        (INSTRUCTION.format(section="kernels_vnni", text="tilezero %tmm0"), [], "(AMX_TILE)"),
        (INSTRUCTION.format(section="other", text="nop"), [], "code in the section other"),
        ("void helper(void) {}", [], "the function helper is visible"),
        ("", ["-Wl,-rpath,/somewhere"], "a folder of the machine that built it"),
        ("", ["-Wl,-z,execstack"], "memory is both written and run (PT_GNU_STACK)"),
        ("", ["-Wl,-z,max-page-size=2048", "-Wl,-z,common-page-size=2048"], "a page of memory has 4 KiB"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_every_fault_is_found(extra: str, flags: list[str], problem: str, tmp_path: Path) -> None:
    found = problems_of_linux_library(built(tmp_path, source_without() + extra, *flags), X86)
    start, _, end = problem.partition(".*")
    assert len(found) == 1 and start in found[0] and end in found[0], found


def test_a_variant_that_the_compiler_left_out_is_missed(tmp_path: Path) -> None:
    left_out = [name for name in expected_functions(["amx"]) if name.endswith("_amx")]
    found = problems_of_linux_library(built(tmp_path, source_without(*left_out)), X86)
    assert "the function step_amx is missing: was its variant left out by the compiler?" in found
    assert "there is no section kernels_amx: only Clang puts each variant's code in a section of its own" in found


def test_a_newer_glibc_than_the_wheel_promises_is_found(tmp_path: Path) -> None:
    source = source_without() + "void *malloc(unsigned long);\nvoid *pool_extra(void) { return malloc(1); }\n"
    library = built(tmp_path, source, "-Wl,--no-as-needed", "-lc")
    assert problems_of_linux_library(library, X86) == []
    older = dataclasses.replace(X86, tag="manylinux_2_1_x86_64")
    assert problems_of_linux_library(library, older) == ["it needs GLIBC_2.2.5, and the wheel promises glibc 2.1"]


def test_a_library_that_systems_may_lack_is_found(tmp_path: Path) -> None:
    other = tmp_path / "libother.so"
    subprocess.run(
        ["cc", "-shared", "-nostdlib", "-Wl,-soname,libother.so.1", "-o", other, "-x", "c", "/dev/null"], check=True
    )
    library = built(tmp_path, source_without(), "-Wl,--no-as-needed", str(other))
    assert problems_of_linux_library(library, X86) == ["it needs libother.so.1, which a system may lack"]


def test_other_files_are_refused(tmp_path: Path) -> None:
    library = built(tmp_path, source_without())
    assert problems_of_linux_library(library, TARGETS["aarch64"]) == [
        "the library is for EM_X86_64, not for linux-aarch64"
    ]
    (problem,) = problems_of_linux_library(b"#!/bin/sh\n", X86)
    assert problem.startswith("the library is no ELF file")
    subprocess.run(["cc", "-c", "-o", str(tmp_path / "part.o"), str(tmp_path / "library.c")], check=True)
    (problem,) = problems_of_linux_library((tmp_path / "part.o").read_bytes(), X86)
    assert problem.startswith("the library has no section .dynamic")
