"""Which instructions a library's code for x86-64 has, and whether a processor that runs it must have them.

All of it is disassembled, not only what a test happens to run. Each instruction says which features a processor needs for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

BASELINE = frozenset(
    (
        "INTEL8086", "INTEL186", "INTEL286", "INTEL386", "INTEL486", "X64", "CPUID", "CMOV", "CX8", "FPU", "FPU287", "FPU387",
        "FXSR", "MMX", "MULTIBYTENOP", "SSE", "SSE2", "SYSCALL", "TSC",
    )
)  # fmt: skip
"""What every x86-64 processor has."""
HINTS = frozenset(("PAUSE", "CET_IBT"))
"""Instructions that older processors take as no operation."""
FEATURES = {
    "-mavx2": frozenset(("SSE3", "SSSE3", "SSE4_1", "SSE4_2", "AVX", "AVX2")),
    "-mfma": frozenset(("FMA",)),
    "-mf16c": frozenset(("F16C",)),
    "-mavx512f": frozenset(("AVX512F",)),
    "-mavx512bw": frozenset(("AVX512BW",)),
    "-mavx512dq": frozenset(("AVX512DQ",)),
    "-mavx512vl": frozenset(("AVX512VL",)),
    "-mavx512vnni": frozenset(("AVX512_VNNI",)),
    "-mamx-tile": frozenset(("AMX_TILE",)),
    "-mamx-int8": frozenset(("AMX_INT8",)),
    "-mamx-bf16": frozenset(("AMX_BF16",)),
}
"""What a compiler may use with each flag of setup.py. `runs_NAME` in processor.c asks the processor for the same features."""
GUARDED = frozenset(("xgetbv",))
"""Instructions that processor.c runs only after the processor has said that it has them."""


def foreign_x86(code: bytes, address: int, flags: Sequence[str] | None = None) -> list[str]:
    """Instructions that a processor may lack, each with its place and the features that it needs.

    address: of the first byte. flags: the compiler flags of the variant whose code it is; None for code that runs everywhere.
    """
    from iced_x86 import Code, Decoder, Formatter, FormatterSyntax

    allowed = BASELINE.union(HINTS, *(FEATURES[flag] for flag in flags or ()))
    names, formatter = _feature_names(), Formatter(FormatterSyntax.INTEL)
    kinds: dict[int, tuple[str, set[str]]] = {}  # every instruction of a kind needs the same
    found: list[str] = []
    for instruction in Decoder(64, code, ip=address):
        if instruction.code not in kinds:
            mnemonic = str(formatter.format_mnemonic(instruction))
            needs = {names[feature] for feature in instruction.cpuid_features()} - allowed
            if instruction.code == Code.INVALID:
                needs = {"unknown"}
            elif flags is None and mnemonic in GUARDED:
                needs = set()
            kinds[instruction.code] = (mnemonic, needs)
        mnemonic, needs = kinds[instruction.code]
        if needs:
            found.append(f"{mnemonic} at {instruction.ip:#x} ({', '.join(sorted(needs))})")
    return found


@cache
def _feature_names() -> dict[int, str]:
    from iced_x86 import CpuidFeature

    return {number: name for name, number in vars(CpuidFeature).items() if isinstance(number, int)}
