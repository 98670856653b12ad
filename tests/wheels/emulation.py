"""Run a wheel's library on emulated processors, old ones and other ones, and compare its numbers.

The driver of tests/kernels calls products, layers and adapters of one variant, and checks that no row depends on its company.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import signal
import subprocess
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.wheels.building import build_program
from tests.wheels.processes import run
from tests.wheels.targets import LIBRARY, ROOT, Platform, ReleaseError

DRIVER = ROOT / "tests" / "kernels" / "kernels_driver.c"
ROUNDING = 2e-5
"""Largest difference of a number of magnitude x between two variants in float32, relative to 1 + x."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """An emulated processor.

    model: as the emulator's -cpu takes it.
    runs: the variants that it must be given, best first.
    lacks: a variant whose instructions must end the process there, or None. It shows that the emulator would notice one.
    """

    model: str
    runs: tuple[str, ...]
    lacks: str | None = None


PROCESSORS = {
    "x86_64": (
        Processor(model="Opteron_G1", runs=("baseline",), lacks="avx2"),  # the first x86-64: SSE2
        Processor(model="Nehalem", runs=("baseline",), lacks="avx2"),  # SSE4.2
        Processor(model="SandyBridge", runs=("baseline",), lacks="avx2"),  # AVX without AVX2, FMA and F16C
        Processor(model="Haswell", runs=("avx2", "baseline"), lacks="avx512"),
    ),
    "aarch64": (
        Processor(model="cortex-a53", runs=("neon",)),  # ARMv8.0-A
        Processor(model="max", runs=("neon",)),
    ),
}
"""By architecture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """Programs that run a library of one architecture."""

    architecture: str
    program: Path
    library: Path

    def command(self, processor: Processor | None) -> list[str]:
        """On this machine's processor, or on an emulated one. Raises ReleaseError if there is no emulator."""
        before = [] if processor is None else emulator(self.architecture, processor)
        return [*before, str(self.program), str(self.library)]

    def variants(self, processor: Processor | None = None) -> tuple[str, ...]:
        """What the library would run there, best first."""
        return tuple(run(self.command(processor)).split())

    def numbers(self, variant: str, processor: Processor | None = None) -> list[str]:
        """What a variant computes there. Raises ReleaseError if a row depended on others."""
        return run([*self.command(processor), variant]).split()


def emulator(architecture: str, processor: Processor) -> list[str]:
    """The command before a program's. Raises ReleaseError if there is no emulator."""
    found = shutil.which(f"qemu-{architecture}")
    if found is None:
        raise ReleaseError(f"qemu-{architecture} is missing: install qemu-user (Debian's name of the package)")
    return [found, "-cpu", processor.model, *_c_library(architecture)]


def driver_of(wheel: Path, target: Platform, work: Path) -> Driver:
    """Compile the driver, and unpack the library of a Linux wheel. work: an empty folder."""
    with zipfile.ZipFile(wheel) as archive:
        library = Path(archive.extract(LIBRARY, work))
    pool = ROOT / Path(LIBRARY).parent / "pool.c"
    program = build_program(target, [DRIVER, pool], work / "driver", "-DVARIANT=driver")
    return Driver(architecture=target.architecture, program=program, library=library)


def native_numbers(driver: Driver) -> dict[str, list[str]]:
    """What each variant that this machine runs computes here; nothing for another architecture's library."""
    if driver.architecture != platform.machine():
        return {}
    return {variant: driver.numbers(variant) for variant in driver.variants()}


def run_emulated(driver: Driver, native: Mapping[str, list[str]]) -> list[str]:
    """Run every variant on every processor of `PROCESSORS`. Returns a line for each processor.

    native: what variants computed on this machine. The same variant must compute the same bits on the emulated one, and
    `neon` must be close to `baseline`. Raises ReleaseError for a variant too many or too few, an illegal instruction, or
    other numbers.
    """
    reports = []
    for processor in PROCESSORS[driver.architecture]:
        runs = driver.variants(processor)
        if runs != processor.runs:
            raise ReleaseError(f"on {processor.model} the library would run {runs}, and should run {processor.runs}")
        compared = []
        for variant in runs:
            numbers = driver.numbers(variant, processor)
            if variant in native:
                if numbers != native[variant]:
                    raise ReleaseError(f"{variant} computes other numbers on an emulated {processor.model} than here")
                compared.append(f"{variant} (the same {len(numbers):,} numbers as here)")
            elif variant == "neon" and "baseline" in native:
                difference = _largest_difference(native["baseline"], numbers)
                if not difference < ROUNDING:
                    raise ReleaseError(f"neon differs from baseline by {difference:.1g}: more than rounding")
                compared.append(f"neon ({len(numbers):,} numbers, within {difference:.1g} of baseline here)")
            else:
                compared.append(f"{variant} ({len(numbers):,} numbers)")
        if processor.lacks is not None:
            _must_be_illegal(driver, processor, processor.lacks)
        reports.append(f"{processor.model}: {', '.join(compared)}")
    return reports


def oldest_with_python(architecture: str) -> Processor | None:
    """The oldest emulated processor that PyTorch runs on; None where a Python for the architecture is not at hand."""
    return {"x86_64": PROCESSORS["x86_64"][1]}.get(architecture) if architecture == platform.machine() else None


def _must_be_illegal(driver: Driver, processor: Processor, variant: str) -> None:
    command = [*driver.command(processor), variant]
    ended = subprocess.run(command, capture_output=True, check=False).returncode
    if ended != -signal.SIGILL:
        raise ReleaseError(
            f"an emulated {processor.model} ran {variant}, which it lacks (status {ended}): "
            "this emulator does not notice illegal instructions"
        )


def _largest_difference(a: list[str], b: list[str]) -> float:
    if len(a) != len(b):
        return float("inf")
    differences = [abs(float(x) - float(y)) / (1 + abs(float(x))) for x, y in zip(a, b)]
    return float("inf") if any(map(math.isnan, differences)) else max(differences)


def _c_library(architecture: str) -> list[str]:
    """Options that tell the emulator where this architecture's C library is, if it is not this machine's."""
    if architecture == platform.machine() or os.environ.get("QEMU_LD_PREFIX"):
        return []
    folder = Path(f"/usr/{architecture.replace('_', '-')}-linux-gnu")
    if not folder.is_dir():
        package = {"aarch64": "libc6-arm64-cross", "x86_64": "libc6-amd64-cross"}[architecture]
        raise ReleaseError(
            f"there is no C library for {architecture} in {folder}: install {package} (Debian's name), "
            "or set QEMU_LD_PREFIX to a folder that has one"
        )
    return ["-L", str(folder)]
