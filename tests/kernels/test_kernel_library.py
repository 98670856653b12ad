"""The native library: built with the package, loaded from nowhere else, and missed without an error."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from compiled import FOLDER, ROOT, build_settings, variants_here
from layerskip_models.kernels import library
from layerskip_models.kernels.library import KernelsUnavailableError, kernels, runnable_variants
from layerskip_models.kernels.pages import use_large_pages

switched_off = os.environ.get("SELFSPEC_NATIVE") == "0"
CUT = re.compile(
    r"from .(?:u?int64_t|s?size_t|(?:unsigned )?long)\b.* to .(?:u?int(?:32_t|16_t|8_t)?|unsigned|short|char)\b"
    r"|loses integer precision: .(?:u?int64_t|s?size_t|(?:unsigned )?long)\b"
)
needs_library = pytest.mark.skipif(not library.LIBRARY.exists(), reason="the library was not built")


@pytest.fixture(autouse=True)
def loaded_anew() -> Iterator[None]:
    """What was loaded and chosen before counts for nothing, and what a test chooses for nothing after it."""
    kept = (library._library, library.load, library.kernels)
    for function in kept:
        function.cache_clear()
    yield
    for function in kept:
        function.cache_clear()


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None or switched_off or not (ROOT / "setup.py").exists(),
    reason="no C compiler here, or switched off",
)
def test_where_there_is_a_compiler_there_are_kernels() -> None:
    """Or a mistake in the source would only skip tests. For every processor it compiles without a warning.

    Nor is a size cut to 32 bits, of which the compiler warns among other conversions, unless the source has a cast.
    """
    assert kernels() is not None, "run `python setup.py build_ext --inplace`"
    flags = [*build_settings()["FLAGS"], "-Wall", "-Wextra", "-Wconversion", "-fsyntax-only"]

    def warned(*command: str, text: str = "") -> list[str]:
        environment = {**os.environ, "LC_ALL": "C"}
        result = subprocess.run(
            ["cc", *flags, *command], input=text, capture_output=True, text=True, check=True, env=environment
        )
        found = [line for line in result.stderr.splitlines() if "warning:" in line]
        return [line for line in found if CUT.search(line) or not re.search(r"\[-W[\w-]*conversion\]", line)]

    assert warned("-x", "c", "-", text="#include <stdint.h>\nint cut(int64_t size) { return size; }")
    for variant, own in variants_here().items():
        assert not warned(*own, f"-DVARIANT={variant}", str(FOLDER / "kernels.c"))
    for path in FOLDER.glob("*.c"):
        assert path.name == "kernels.c" or not warned(str(path))


@needs_library
def test_the_best_variant_is_chosen_and_any_other_that_exists_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SELFSPEC_NATIVE", raising=False)
    names = runnable_variants()
    assert names and list(names) == [name for name in library.VARIANTS if name in names]
    assert [*build_settings()["runnable"](variants_here(), str(library.LIBRARY))][::-1] == [*names]
    chosen = kernels()
    assert chosen is not None and chosen.variant == names[0]
    for name in names:
        monkeypatch.setenv("SELFSPEC_NATIVE", name)
        kernels.cache_clear()
        chosen = kernels()
        assert chosen is not None and chosen.variant == name
    (absent, *_) = [name for name in library.VARIANTS if name not in names]
    monkeypatch.setenv("SELFSPEC_NATIVE", absent)
    kernels.cache_clear()
    with pytest.raises(KernelsUnavailableError, match=f"no variant '{absent}' that can run here; it has {names[0]}"):
        kernels()
    monkeypatch.setenv("SELFSPEC_NATIVE", "sse9")
    kernels.cache_clear()
    with pytest.raises(ValueError, match=r"SELFSPEC_NATIVE must be 0, 1, require or one of amx.*got 'sse9'"):
        kernels()


NEEDS = {
    "avx2": "avx2 fma f16c",
    "avxvnni": "avx2 fma f16c avx_vnni",
    "avx512": "avx2 fma f16c avx512f avx512bw avx512dq avx512vl",
    "vnni": "avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni",
}
"""What Linux calls the features that a variant's instructions need."""


@needs_library
@pytest.mark.skipif(platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists(), reason="for Linux on x86-64")
@pytest.mark.parametrize("variant", NEEDS)
def test_a_variant_runs_exactly_where_the_system_says_so(variant: str) -> None:
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    (flags, *_) = (line.split() for line in cpuinfo.splitlines() if line.startswith("flags"))
    runs = getattr(library._library(), f"runs_{variant}")
    assert bool(runs()) == set(NEEDS[variant].split()).issubset(flags)


def test_switched_off_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFSPEC_NATIVE", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels() is None


WHOLE = library.LIBRARY.read_bytes() if library.LIBRARY.exists() else b"\x7fELF but no library"


@pytest.mark.parametrize("size", [None, 0, 60, 1 << 12, len(WHOLE) // 2, len(WHOLE) - 1, "#!/bin/sh\n"])
def test_a_library_that_is_missing_broken_or_cut_short_is_one_warning(
    size: int | str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half-copied file must not be mapped and run: touching its missing pages would end the process."""
    path = tmp_path / "libkernels.so"
    if size is not None:
        path.write_bytes(size.encode() if isinstance(size, str) else WHOLE[:size])
    monkeypatch.setattr(library, "LIBRARY", path)
    monkeypatch.delenv("SELFSPEC_NATIVE", raising=False)
    with pytest.warns(RuntimeWarning, match="no native kernels.*libkernels.so") as caught:
        assert kernels() is None and kernels() is None
    assert len(caught) == 1
    monkeypatch.setenv("SELFSPEC_NATIVE", "require")
    kernels.cache_clear()
    with pytest.raises(KernelsUnavailableError, match=r"SELFSPEC_NATIVE=require, but libkernels\.so"):
        kernels()


def test_large_pages_change_no_number() -> None:
    weight = torch.randn(3 << 20)[1:]
    before = weight.clone()
    use_large_pages(weight)
    assert torch.equal(weight, before)
    use_large_pages(torch.empty(0))
    use_large_pages(torch.empty(100))


CROSS_COMPILERS = (
    ["aarch64-linux-gnu-gcc", "-static"],
    [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-musl", "-mcpu=generic", "-w"],
)


def cross_compiler() -> list[str] | None:
    """Of programs for ARM that need no library there: Debian's gcc-aarch64-linux-gnu or the package ziglang."""
    gcc, zig = CROSS_COMPILERS
    return gcc if shutil.which(gcc[0]) else zig if importlib.util.find_spec("ziglang") else None


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(shutil.which, ("cc", "qemu-aarch64"))) or cross_compiler() is None,
    reason="needs a C compiler, one for aarch64 (gcc-aarch64-linux-gnu or ziglang) and qemu-user",
)
@pytest.mark.parametrize("variant", ["neon", "dotprod"])
def test_on_an_emulated_arm_processor_a_row_is_the_same_in_any_company(variant: str, tmp_path: Path) -> None:
    """And its numbers are those of the portable code here, but for rounding. The driver compares the bits."""
    sources = [ROOT / "tests" / "kernels" / "kernels_driver.c", FOLDER / "pool.c"]  # the driver has kernels.c in it
    oldest, newest = (["qemu-aarch64", "-cpu", name] for name in ("cortex-a53", "max"))
    numbers = []
    for compiler, run, name in ((["cc"], [], "baseline"), (cross_compiler(), newest, variant)):
        program = tmp_path / name
        options = [
            *build_settings()["FLAGS"],
            *build_settings()["ARM"].get(name, []),
            f"-DVARIANT={name}",
            f"-I{FOLDER}",
        ]
        subprocess.run([*compiler, *options, "-o", str(program), *map(str, sources), "-lm", "-ldl"], check=True)
        result = subprocess.run([*run, str(program)], check=True, capture_output=True, text=True)
        numbers.append([float(line) for line in result.stdout.split()])
    portable, arm = numbers
    assert len(portable) == len(arm) > 90_000
    assert max(abs(a - b) / (1 + abs(a)) for a, b in zip(portable, arm)) < 2e-5
    asks = tmp_path / "asks.c"
    asks.write_text(f"int runs_{variant}(void);\nint main(void) {{ return runs_{variant}(); }}\n")
    subprocess.run(
        [*cross_compiler(), str(asks), str(FOLDER / "processor.c"), "-o", str(tmp_path / "asks")], check=True
    )
    found = [subprocess.run([*run, str(tmp_path / "asks")], check=False).returncode for run in (oldest, newest)]
    assert found == [variant == "neon", True]
