"""Headers of libraries for macOS, made by hand: the format is in Apple's mach-o/loader.h."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

pytest.importorskip("macholib", reason="pip install '.[release]'")

from tests.wheels.libraries import expected_functions
from tests.wheels.mac_libraries import problems_of_mac_library
from tests.wheels.targets import TARGETS

MACOS = TARGETS["macos"]
ARM64, X86 = 0x100000C, 0x1000007
SYSTEM = "/usr/lib/libSystem.B.dylib"


def command(number: int, body: bytes) -> bytes:
    body += bytes(-len(body) % 8)
    return struct.pack("<II", number, 8 + len(body)) + body


def library(
    *,
    processor: int = ARM64,
    oldest: tuple[int, int] | None = (11, 0),
    needs: tuple[str, ...] = (SYSTEM,),
    signed: bool = True,
    folder: str | None = None,
    functions: tuple[str, ...] = tuple(sorted(expected_functions(MACOS.variants))),
) -> bytes:
    """A dylib with load commands and a table of symbols, without code."""
    names, entries = b"\0", b""
    for name in functions:
        entries += struct.pack("<IBBHQ", len(names), 0x0F, 1, 0, 0)  # N_SECT and N_EXT
        names += f"_{name}\0".encode()

    def commands(at: int) -> bytes:
        found = command(0x2, struct.pack("<IIII", at, len(functions), at + len(entries), len(names)))  # LC_SYMTAB
        found += command(0xB, struct.pack("<18I", 0, 0, 0, len(functions), *[0] * 14))  # LC_DYSYMTAB
        for name in needs:
            found += command(0xC, struct.pack("<IIII", 24, 0, 0, 0) + name.encode() + b"\0")  # LC_LOAD_DYLIB
        if oldest is not None:
            found += command(0x32, struct.pack("<IIII", 1, oldest[0] << 16 | oldest[1] << 8, 0, 0))  # LC_BUILD_VERSION
        if folder is not None:
            found += command(0x8000001C, struct.pack("<I", 12) + folder.encode() + b"\0")  # LC_RPATH
        if signed:
            found += command(0x1D, struct.pack("<II", 0, 0))  # LC_CODE_SIGNATURE
        return found

    length, count = len(commands(0)), 3 + len(needs) + (folder is not None) - (oldest is None) + signed
    header = struct.pack("<IIIIIIII", 0xFEEDFACF, processor, 0, 6, count, length, 0, 0)
    return header + commands(32 + length) + entries + names


def problems(content: bytes, folder: Path) -> list[str]:
    path = folder / "library"
    path.write_bytes(content)
    return problems_of_mac_library(path, MACOS)


def test_a_library_without_faults_has_no_problems(tmp_path: Path) -> None:
    assert problems(library(), tmp_path) == []
    assert problems(library(oldest=(10, 9)), tmp_path) == []


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (library(processor=X86), "the library is not for arm64 alone"),
        (library(oldest=(12, 3)), "it needs macOS 12.3, and the wheel promises 11.0"),
        (library(oldest=None), "it does not say which macOS it needs (LC_BUILD_VERSION)"),
        (library(needs=(SYSTEM, "@rpath/libomp.dylib")), "it needs @rpath/libomp.dylib, which a system may lack"),
        (library(signed=False), "it has no signature, and macOS on arm64 loads no such library (LC_CODE_SIGNATURE)"),
        (library(folder="/opt"), "it looks for libraries in a folder of the machine that built it (LC_RPATH)"),
        (
            library(functions=(*sorted(expected_functions(MACOS.variants)), "helper")),
            "the function helper is visible, and nothing calls it from outside",
        ),
        (
            library(functions=tuple(sorted(expected_functions(MACOS.variants) - {"step_neon"}))),
            "the function step_neon is missing: was its variant left out by the compiler?",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_fault_is_found(content: bytes, problem: str, tmp_path: Path) -> None:
    assert problems(content, tmp_path) == [problem]


def test_other_files_are_refused(tmp_path: Path) -> None:
    (problem,) = problems(b"\x7fELF" + bytes(100), tmp_path)
    assert problem.startswith("the library is no Mach-O file")
