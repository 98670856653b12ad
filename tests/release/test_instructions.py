"""Which instructions may be where. Bytes as an assembler gives them; all of them are in the manuals of Intel and Arm."""

from __future__ import annotations

import itertools
import struct

import pytest

pytest.importorskip("iced_x86", reason="pip install '.[release]'")
pytest.importorskip("capstone", reason="pip install '.[release]'")

from tests.wheels.arm_instructions import foreign_arm
from tests.wheels.instructions import FEATURES, foreign_x86
from tests.wheels.targets import TARGETS

AVX2, FMA = ("-mavx2",), ("-mavx2", "-mfma")
AVX512 = (*FMA, "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
VNNI = (*AVX512, "-mavx512vnni")
AMX = (*VNNI, "-mamx-tile", "-mamx-int8", "-mamx-bf16")


@pytest.mark.parametrize(
    ("code", "flags", "needs"),
    [
        ("0f 58 c1", None, None),  # addps xmm0, xmm1
        ("f2 0f 58 c1", None, None),  # addsd xmm0, xmm1
        ("0f 18 08", None, None),  # prefetcht0 [rax]
        ("f3 90", None, None),  # pause
        ("f3 0f 1e fa", None, None),  # endbr64
        ("0f 01 d0", None, None),  # xgetbv, after cpuid
        ("0f 01 d0", AVX2, "XSAVE"),
        ("f2 0f 7c c1", None, "SSE3"),  # haddps xmm0, xmm1
        ("66 0f 38 40 c1", None, "SSE4_1"),  # pmulld xmm0, xmm1
        ("66 0f 38 40 c1", AVX2, None),
        ("f3 0f b8 c1", AVX2, "POPCNT"),  # popcnt eax, ecx
        ("c5 f8 58 c1", None, "AVX"),  # vaddps xmm0, xmm0, xmm1
        ("c5 f8 58 c1", AVX2, None),
        ("c4 e2 75 b8 c2", AVX2, "FMA"),  # vfmadd231ps ymm0, ymm1, ymm2
        ("c4 e2 75 b8 c2", FMA, None),
        ("62 f1 7c 48 58 c1", FMA, "AVX512F"),  # vaddps zmm0, zmm0, zmm1
        ("62 f1 7c 48 58 c1", AVX512, None),
        ("62 f2 7d 48 50 c1", AVX512, "AVX512_VNNI"),  # vpdpbusd zmm0, zmm0, zmm1
        ("62 f2 7d 48 50 c1", VNNI, None),
        ("c4 e2 73 5e c2", VNNI, "AMX_INT8"),  # tdpbssd tmm0, tmm2, tmm1
        ("c4 e2 73 5e c2", AMX, None),
        ("c5 fc", AMX, "unknown"),  # cut short
    ],
)  # fmt: skip
def test_an_x86_instruction_runs_where_its_features_are(
    code: str, flags: tuple[str, ...] | None, needs: str | None
) -> None:
    before = bytes.fromhex("48 89 c3")  # mov rbx, rax
    found = foreign_x86(before + bytes.fromhex(code), 0x1000, flags)
    if needs is None:
        assert found == []
    else:
        (line,) = found
        assert "at 0x1003" in line and needs in line


def test_what_every_flag_of_the_build_allows_is_known() -> None:
    flags = {flag for target in TARGETS.values() for of_variant in target.variants.values() for flag in of_variant}
    assert flags == FEATURES.keys()


def test_each_variant_may_do_more_than_the_one_before() -> None:
    allowed = [set().union(*(FEATURES[flag] for flag in flags)) for flags in TARGETS["x86_64"].variants.values()]
    assert all(fewer < more for fewer, more in itertools.pairwise(allowed))


@pytest.mark.parametrize(
    ("word", "allowed"),
    [
        (0x4E21D400, True),  # fadd v0.4s, v0.4s, v1.4s
        (0x4E21CC00, True),  # fmla v0.4s, v0.4s, v1.4s
        (0x0E217820, True),  # fcvtl v0.4s, v1.4h
        (0x1E23C020, True),  # fcvt h0, s1
        (0x54000040, True),  # b.eq
        (0x885FFC20, True),  # ldaxr w0, [x1]
        (0xD53BD040, True),  # mrs x0, tpidr_el0
        (0xD5380600, False),  # mrs x0, id_aa64isar0_el1, for the system alone
        (0xB8E00020, False),  # ldaddal w0, w0, [x1]: FEAT_LSE
        (0x88A07C41, False),  # cas w0, w1, [x2]: FEAT_LSE
        (0x38BFC020, False),  # ldaprb w0, [x1]: FEAT_LRCPC
        (0x4E80941F, False),  # sdot v31.4s, v0.16b, v0.16b: FEAT_DotProd
        (0x4E401420, False),  # fadd v0.8h, v1.8h, v0.8h: FEAT_FP16
        (0x04A00000, False),  # add z0.s, z0.s, z0.s: FEAT_SVE
        (0x7EE00000, False),  # not assigned
    ],
)
def test_an_arm_instruction_is_of_the_first_version(word: int, allowed: bool) -> None:
    before = struct.pack("<I", 0xD503201F)  # nop
    found = foreign_arm(before + struct.pack("<I", word), 0x1000)
    assert (found == []) is allowed
    assert all("0x1004" in line for line in found)
