"""What a library for macOS asks of the system, and what it offers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.wheels.libraries import problems_of_functions
from tests.wheels.targets import Platform

LINKERS = {"__dso_handle", "_mh_dylib_header"}
"""Symbols that the linker adds for the file as a whole."""
SYSTEM = ("/usr/lib/libSystem.B.dylib",)
"""Libraries that every macOS has."""


def problems_of_mac_library(path: Path, target: Platform) -> list[str]:
    """Every reason why a Mach-O library does not run where its target says; none if it does.

    Its instructions are not looked at: every Mac with an arm64 processor has all that are used.
    """
    from macholib.MachO import MachO

    try:
        headers = MachO(str(path)).headers
    except ValueError as error:
        return [f"the library is no Mach-O file: {error}"]
    if len(headers) != 1 or headers[0].header.cputype != 0x100000C:
        return ["the library is not for arm64 alone"]
    return [*_problems_of_needs(headers[0], target), *problems_of_functions(_exported(path), target.variants)]


def _problems_of_needs(header: Any, target: Platform) -> Iterator[str]:
    """Other libraries, the oldest system, and the signature that Apple's processors ask for."""
    from macholib import mach_o

    found: set[int] = set()
    for load, command, data in header.commands:
        found.add(load.cmd)
        if load.cmd in (mach_o.LC_LOAD_DYLIB, mach_o.LC_LOAD_WEAK_DYLIB):
            name = data.rstrip(b"\0").decode()
            if name not in SYSTEM:
                yield f"it needs {name}, which a system may lack"
        if load.cmd == mach_o.LC_RPATH:
            yield "it looks for libraries in a folder of the machine that built it (LC_RPATH)"
        if load.cmd == mach_o.LC_BUILD_VERSION:
            oldest = (int(command.minos) >> 16, int(command.minos) >> 8 & 255)
            if oldest > target.oldest_system:
                major, minor = target.oldest_system
                yield f"it needs macOS {oldest[0]}.{oldest[1]}, and the wheel promises {major}.{minor}"
    if mach_o.LC_BUILD_VERSION not in found:
        yield "it does not say which macOS it needs (LC_BUILD_VERSION)"
    if mach_o.LC_CODE_SIGNATURE not in found:
        yield "it has no signature, and macOS on arm64 loads no such library (LC_CODE_SIGNATURE)"


def _exported(path: Path) -> set[str]:
    from macholib.MachO import MachO
    from macholib.SymbolTable import SymbolTable

    table = SymbolTable(MachO(str(path)))
    return {name.decode().removeprefix("_") for _, name in table.extdefsyms} - LINKERS
