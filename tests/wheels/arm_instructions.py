"""Whether code for aarch64 runs on every processor of that architecture, so on ARMv8.0-A.

Everything that is compiled for it is in one variant, `neon`. A newer instruction could come from a flag of the compiler, from
assembly, or from a library that is linked in. The list here has what ARMv8.0-A has, and everything else is reported. An
instruction that the list lacks may be added after a look into the manual (Arm DDI 0487: A64 instructions without a FEAT_*).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

GENERAL = """
    adc adcs add adds adr adrp and ands asr b bfi bfm bfxil bic bics bl blr br brk cbnz cbz ccmn ccmp cinc cinv clrex cls
    clz cmn cmp cneg csel cset csetm csinc csinv csneg dmb dsb eon eor extr isb ldar ldarb ldarh ldaxp ldaxr ldaxrb ldaxrh
    ldnp ldp ldpsw ldr ldrb ldrh ldrsb ldrsh ldrsw ldur ldurb ldurh ldursb ldursh ldursw ldxp ldxr ldxrb ldxrh lsl lsr
    madd mneg mov movk movn movz msub mul mvn neg negs ngc ngcs nop orn orr prfm prfum rbit ret rev rev16 rev32 ror sbc
    sbcs sbfiz sbfx sdiv smaddl smnegl smsubl smulh smull stlr stlrb stlrh stlxp stlxr stlxrb stlxrh stnp stp str strb
    strh stur sturb sturh stxp stxr stxrb stxrh sub subs svc sxtb sxth sxtw tbnz tbz tst ubfiz ubfx udf udiv umaddl umnegl
    umsubl umulh umull uxtb uxth yield
"""
FLOATS = """
    fabs fadd fccmp fccmpe fcmp fcmpe fcsel fcvt fcvtas fcvtau fcvtms fcvtmu fcvtns fcvtnu fcvtps fcvtpu fcvtzs fcvtzu
    fdiv fmadd fmax fmaxnm fmin fminnm fmov fmsub fmul fneg fnmadd fnmsub fnmul frinta frinti frintm frintn frintp frintx
    frintz fsqrt fsub scvtf ucvtf
"""
VECTORS = """
    abs addhn addhn2 addp addv bif bit bsl cmeq cmge cmgt cmhi cmhs cmle cmlt cmtst cnt dup ext fabd facge facgt faddp
    fcmeq fcmge fcmgt fcmle fcmlt fcvtl fcvtl2 fcvtn fcvtn2 fmaxnmp fmaxnmv fmaxp fmaxv fminnmp fminnmv fminp fminv fmla
    fmls fmulx frecpe frecps frsqrte frsqrts ins ld1 ld1r ld2 ld2r ld3 ld3r ld4 ld4r mla mls movi mvni not rev64 rshrn
    rshrn2 saba sabal sabal2 sabd sabdl sabdl2 sadalp saddl saddl2 saddlp saddlv saddw saddw2 shadd shl shll shll2 shrn
    shrn2 shsub sli smax smaxp smaxv smin sminp sminv smlal smlal2 smlsl smlsl2 smov smull2 sqadd sqrshl sqshl sqshrn
    sqsub sqxtn sqxtn2 sqxtun sqxtun2 srhadd sri srshl srshr srsra sshl sshll sshll2 sshr ssra ssubl ssubl2 ssubw ssubw2
    st1 st2 st3 st4 subhn subhn2 sxtl sxtl2 tbl tbx trn1 trn2 uaba uabal uabal2 uabd uabdl uabdl2 uadalp uaddl uaddl2
    uaddlp uaddlv uaddw uaddw2 uhadd uhsub umax umaxp umaxv umin uminp uminv umlal umlal2 umlsl umlsl2 umov umull2 uqadd
    uqshl uqsub uqxtn uqxtn2 urhadd urshl urshr ursra ushl ushll ushll2 ushr usra usubl usubl2 usubw usubw2 uxtl uxtl2
    uzp1 uzp2 xtn xtn2 zip1 zip2
"""
CONDITIONS = "eq ne hs lo mi pl vs vc hi ls ge lt gt le al nv"
ARM = frozenset((GENERAL + FLOATS + VECTORS).split()).union(f"b.{condition}" for condition in CONDITIONS.split())
"""Instructions of ARMv8.0-A that programs may use, by the names that a disassembler prints."""
CONVERSIONS = frozenset(("fcvt", "fcvtl", "fcvtl2", "fcvtn", "fcvtn2"))
"""All that ARMv8.0-A does with floats of 16 bits; arithmetic came with FEAT_FP16."""
HALVES = re.compile(r"\bh\d|\.[248]?h\b")
SCALABLE = re.compile(r"\b[zp]\d|\bza")
"""Registers of FEAT_SVE and FEAT_SME, whose instructions share names with those of vectors."""


def foreign_arm(code: bytes, address: int) -> list[str]:
    """Instructions that are not known to be in ARMv8.0-A, each with its place.

    address: of the first byte.
    """
    import capstone

    engine = capstone.Cs(capstone.CS_ARCH_ARM64, capstone.CS_MODE_LITTLE_ENDIAN)
    engine.skipdata = True  # else it would stop at what it does not know
    return [
        f"{name} {operands} at {place:#x}"
        for place, name, operands in _disassembled(engine, code, address)
        if not _known(name, operands)
    ]


def _known(name: str, operands: str) -> bool:
    if name == "mrs":  # the address of a thread's variables
        return operands.endswith("tpidr_el0")
    if name.startswith("f") or name in ("scvtf", "ucvtf"):
        return name in ARM and (name in CONVERSIONS or not HALVES.search(operands)) and not SCALABLE.search(operands)
    return name in ARM and not SCALABLE.search(operands)


def _disassembled(engine: Any, code: bytes, address: int) -> Iterable[tuple[int, str, str]]:
    for place, _, name, operands in engine.disasm_lite(code, address):
        yield place, name, operands
