"""The platforms that get a wheel, and what is promised there."""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIBRARY = "layerskip_models/kernels/libkernels.so"
"""The native library, as a wheel names it."""


class ReleaseError(Exception):
    """What keeps a wheel or a release from being good; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """A platform.

    triple: the system and C library to compile for, as `zig cc -target` takes them.
    processor: the oldest processor, as `zig cc -mcpu` takes it. What is no variant's code must run there.
    host: what Python calls the platform; setup.py chooses its variants by the last part.
    tag: the wheel's platform tag.
    """

    triple: str
    processor: str
    host: str
    tag: str

    @property
    def architecture(self) -> str:
        """As setup.py and `platform.machine` call it."""
        return self.host.rpartition("-")[2]

    @property
    def is_linux(self) -> bool:
        return self.host.startswith("linux")

    @property
    def oldest_system(self) -> tuple[int, int]:
        """The oldest version of glibc or of macOS that the tag promises to run with."""
        _, major, minor, *_ = self.tag.split("_")
        return int(major), int(minor)

    @property
    def variants(self) -> dict[str, list[str]]:
        """Compiler flags of each variant, by its name."""
        setup = runpy.run_path(str(ROOT / "setup.py"))
        found: dict[str, list[str]] = setup["VARIANTS"][self.architecture]
        return found


TARGETS = {
    "x86_64": Platform(
        triple="x86_64-linux-gnu.2.17",
        processor="x86_64",
        host="linux-x86_64",
        tag="manylinux_2_17_x86_64",
    ),
    "aarch64": Platform(
        triple="aarch64-linux-gnu.2.17",
        processor="generic",
        host="linux-aarch64",
        tag="manylinux_2_17_aarch64",
    ),
    "macos": Platform(
        triple="aarch64-macos.11.0",
        processor="apple_m1",
        host="macosx-11.0-arm64",
        tag="macosx_11_0_arm64",
    ),
}
"""By the names that `python -m tests.wheels wheels --targets` takes."""


def target_of(wheel: Path) -> Platform:
    """The platform that a wheel's name says. Raises ReleaseError for any other."""
    for target in TARGETS.values():
        if wheel.stem.endswith(f"-{target.tag}"):
            return target
    tags = ", ".join(target.tag for target in TARGETS.values())
    raise ReleaseError(f"{wheel.name} is for none of the platforms {tags}: build wheels with `make wheels`")
