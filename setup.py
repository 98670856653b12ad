"""Builds the native library of `layerskip_models.kernels`; everything else about the package is in pyproject.toml.

kernels.c is compiled once for each variant in `VARIANTS`, all into one library, which chooses none of them: library.py does
that when it is loaded. The library is optional. Without a C compiler the installation goes on, and decoding is slower.

For work on the sources: `python setup.py build_ext --inplace` puts the library where the package looks for it. In place, as
in an editable installation, it has only the variants that run on this processor, each of which takes up to half a minute. A
wheel has all of them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

FOLDER = "layerskip_models/kernels"
# The same numbers from every copy of a loop: the compiler may neither fuse nor reorder arithmetic by itself.
FLAGS = [
    "-std=gnu11",
    "-O3",
    "-g0",  # Python's own flags may ask for debugging information, which takes time and space
    "-fno-fast-math",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-pthread",
]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
VNNI = [*AVX512, "-mavx512vnni"]
AMX = [*VNNI, "-mamx-tile", "-mamx-int8", "-mamx-bf16"]
AVXVNNI = [*AVX2, "-mavxvnni"]
X86 = {"baseline": [], "avx2": AVX2, "avxvnni": AVXVNNI, "avx512": AVX512, "vnni": VNNI, "amx": AMX}
ARM = {"neon": [], "dotprod": ["-march=armv8.2-a+dotprod"]}
VARIANTS = {"x86_64": X86, "amd64": X86, "aarch64": ARM, "arm64": ARM}
"""Flags of each variant by the last part of the platform's name; other processors get the baseline."""


def runnable(variants: Mapping[str, list[str]], library: str) -> dict[str, list[str]]:
    """Those of the variants that run here. library: any that has processor.c in it."""
    asked = ctypes.CDLL(library)
    return {name: flags for name, flags in variants.items() if getattr(asked, f"runs_{name}", int)()}


class BuildKernels(build_ext):
    """Compiles the kernels once per variant. A variant that the compiler cannot make is left out."""

    def finalize_options(self) -> None:
        """Remember `inplace`, which setuptools unsets while it builds."""
        super().finalize_options()
        self.only_here = bool(self.inplace)

    def get_ext_filename(self, fullname: str) -> str:
        """Name a plain library: it uses nothing of Python, so any version of Python can load it."""
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Compile and link. Raises CompileError, which setuptools turns into a warning for an optional extension."""
        machine = self.plat_name.rpartition("-")[2].lower()

        def compiled(name: str, variant: str, *flags: str) -> list[str]:
            return self.compiler.compile(
                [f"{FOLDER}/{name}"],
                output_dir=f"{self.build_temp}/{variant}",
                macros=[("VARIANT", variant)],
                depends=ext.depends,
                extra_postargs=[*FLAGS, *flags],
            )

        processor = compiled("processor.c", "any")
        objects = processor + compiled("pool.c", "any")
        variants = VARIANTS.get(machine, {"baseline": []})
        if self.only_here:
            asked = str(Path(self.build_temp, "processor.so").resolve())
            self.compiler.link_shared_object(processor, asked)
            with suppress(OSError):  # nothing may be run from there, or it is for another system: all variants
                variants = runnable(variants, asked)
        with ThreadPoolExecutor(os.cpu_count()) as compilers:
            # The last ones take longest, and begin first.
            made = {
                name: compilers.submit(compiled, "kernels.c", name, *flags)
                for name, flags in reversed(variants.items())
            }
        for variant in variants:
            try:
                objects += made[variant].result()
            except CompileError:
                if variant in ("baseline", "neon"):
                    raise
                self.warn(f"this compiler cannot make the {variant} kernels: they are left out")
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(objects, str(target), libraries=["m", "pthread"], target_lang="c")


class PlatformWheel(bdist_wheel):
    """One wheel for every version of Python on this platform."""

    def get_tag(self) -> tuple[str, str, str]:
        """Python, ABI and platform."""
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    sources = [f"{FOLDER}/{name}" for name in ("kernels.c", "pool.c", "processor.c")]
    headers = sorted(path.as_posix() for path in Path(FOLDER).glob("*.h"))
    library = Extension("layerskip_models.kernels.libkernels", sources, depends=[*sources, *headers], optional=True)
    setup(ext_modules=[library], cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel})
