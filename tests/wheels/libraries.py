"""What a native library asks of the system and what it offers: functions, versions of glibc, sections of code."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

from layerskip_models.kernels.library import Kernels
from tests.wheels.arm_instructions import foreign_arm
from tests.wheels.instructions import foreign_x86
from tests.wheels.targets import Platform

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile

SYSTEM = re.compile(r"(libc|libm|libpthread|libdl|ld-linux-x86-64|ld-linux-aarch64)\.so\.\d+")
"""Libraries that every Linux system with glibc has."""
PLAIN_CODE = {".text", ".plt", ".plt.got", ".plt.sec", ".init", ".fini", ".iplt"}
"""Sections of code that is no variant's: it must run on the oldest processor."""
PAGES = {"x86_64": 4 << 10, "aarch64": 64 << 10}
"""Bytes of the largest pages of memory, by architecture."""
POOL = {"pool_oldest", "pool_stop"}


def expected_functions(variants: Iterable[str]) -> set[str]:
    """What Python calls in a library with these variants."""
    names = ["runs", *(field.name for field in fields(Kernels) if field.name != "variant")]
    return POOL.union(f"{name}_{variant}" for name in names for variant in variants)


def problems_of_functions(exported: set[str], variants: Iterable[str]) -> list[str]:
    """What a library lacks, and what it offers that nobody calls."""
    expected = expected_functions(variants)
    missing = sorted(expected - exported)
    # processor.c asks for every variant of its architecture, and the tests call more of the team of threads.
    other = sorted(name for name in exported - expected if not name.startswith(("pool_", "runs_")))
    return [
        *(f"the function {name} is missing: was its variant left out by the compiler?" for name in missing),
        *(f"the function {name} is visible, and nothing calls it from outside" for name in other),
    ]


def problems_of_linux_library(content: bytes, target: Platform) -> list[str]:
    """Every reason why an ELF library does not run everywhere that its target says; none if it does.

    content: of the file. Its instructions are all disassembled: some seconds.
    """
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        elf = ELFFile(io.BytesIO(content))
        machine = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}.get(elf["e_machine"])
    except ELFError as error:
        return [f"the library is no ELF file: {error}"]
    if machine is None or not target.host.endswith(machine):
        return [f"the library is for {elf['e_machine']}, not for {target.host}"]
    lacking = [name for name in (".dynamic", ".dynsym") if elf.get_section_by_name(name) is None]
    if lacking:
        return [f"the library has no section {', '.join(lacking)}: it is damaged, or no shared library"]
    found = [
        *_problems_of_needs(elf, target.oldest_system),
        *_problems_of_memory(elf, PAGES[machine]),
        *problems_of_functions(_exported(elf), target.variants),
        *_problems_of_code(elf, target.variants, arm=machine == "aarch64"),
    ]
    return list(dict.fromkeys(found))  # each part of the file may have the same one


def _problems_of_needs(elf: ELFFile, newest: tuple[int, int]) -> Iterator[str]:
    """Other libraries, where to find them, and versions of their functions."""
    for tag in elf.get_section_by_name(".dynamic").iter_tags():
        kind = tag.entry.d_tag
        if kind == "DT_NEEDED" and not SYSTEM.fullmatch(tag.needed):
            yield f"it needs {tag.needed}, which a system may lack"
        if kind in ("DT_RPATH", "DT_RUNPATH"):
            yield f"it looks for libraries in a folder of the machine that built it ({kind})"
        if kind == "DT_TEXTREL":
            yield "its code is changed when it is loaded, which some systems forbid (DT_TEXTREL)"
    versions = elf.get_section_by_name(".gnu.version_r")
    for library, needed in versions.iter_versions() if versions else ():
        for version in needed:
            found = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?", version.name)
            if found is None:
                yield f"it needs {version.name} of {library.name}, which is no version of glibc"
            elif (int(found[1]), int(found[2])) > newest:
                yield f"it needs {version.name}, and the wheel promises glibc {newest[0]}.{newest[1]}"


def _problems_of_memory(elf: ELFFile, page: int) -> Iterator[str]:
    """No memory may be written and run, the stack included. page: bytes of the largest pages of memory that systems have."""
    stacks = 0
    for segment in elf.iter_segments():
        runs, writes = segment["p_flags"] & 1, segment["p_flags"] & 2
        stacks += segment["p_type"] == "PT_GNU_STACK"
        if segment["p_type"] == "PT_LOAD" and segment["p_align"] < page:
            yield f"it cannot be loaded where a page of memory has {page >> 10} KiB"
        if runs and writes and segment["p_type"] in ("PT_LOAD", "PT_GNU_STACK"):
            yield f"memory is both written and run ({segment['p_type']})"
    if not stacks:
        yield "it does not say that the stack is never run (PT_GNU_STACK)"


def _exported(elf: ELFFile) -> set[str]:
    symbols = elf.get_section_by_name(".dynsym").iter_symbols()
    return {symbol.name for symbol in symbols if symbol["st_shndx"] != "SHN_UNDEF" and symbol.name}


def _problems_of_code(elf: ELFFile, variants: dict[str, list[str]], *, arm: bool) -> Iterator[str]:
    """Each variant's code has its own instructions and the oldest processor's; all other code has only the latter."""
    flags = {f"kernels_{variant}": of_variant for variant, of_variant in variants.items()}
    code = {section.name: section for section in elf.iter_sections() if section["sh_flags"] & 4}  # SHF_EXECINSTR
    for name in sorted(flags.keys() - code.keys()):
        yield f"there is no section {name}: only Clang puts each variant's code in a section of its own"
    for name, section in code.items():
        if name not in flags and name not in PLAIN_CODE:
            yield f"there is code in the section {name}, and it is not known who runs it"
            continue
        content, address = section.data(), section["sh_addr"]
        foreign = foreign_arm(content, address) if arm else foreign_x86(content, address, flags.get(name))
        if foreign:
            shown = "; ".join(foreign[:3])
            yield f"{len(foreign)} instructions in {name} that not every processor has that runs it: {shown}"
