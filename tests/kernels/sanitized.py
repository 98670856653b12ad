"""The kernels' tests on a library that is built to find wrong reads, writes and arithmetic: `make sanitize`.

The library has AddressSanitizer and UndefinedBehaviorSanitizer in it, and gives every worker of the team memory of exactly
the size that it asks for. It lies in a copy of this folder below build, where the tests run.

`--short` takes one variant and the tests of memory alone: `make sanitize-short`, a part of `make test`.
"""

from __future__ import annotations

import argparse
import os
import platform
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path("layerskip_models") / "kernels"
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-DEXACT_ROOMS=1"]
FILES = (
    "c_programs", "check_at_load", "choices", "cuda_paths", "draft_vocabulary", "exit_adapters", "families",
    "fewer_bits", "four_bits", "gguf_checkpoint", "integer_rows", "kernel_library", "kv_dtype", "large_sizes",
    "many_rows", "matrix_unit", "native", "native_attention", "native_forward", "native_memory", "native_sampling",
    "no_rerun", "pool", "products", "torch_state", "weights", "without_kernels",
)  # fmt: skip
"""Tests that call the library, by the names of their files."""
SHORT = ("native_memory", "native_forward")


def found() -> dict[str, Path]:
    """Every file of tests by its name, relative to this repository."""
    paths = (path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py"))
    return {path.stem.removeprefix("test_"): path for path in paths}


def missing() -> str | None:
    """Why there are no sanitizers here, or None."""
    if sys.platform != "linux" or shutil.which("gcc") is None:
        return "they need gcc on Linux"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "nothing.c"
        source.write_text("int main(void) { return 0; }")
        command = ["gcc", *SANITIZERS, "-o", f"{folder}/nothing", str(source)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return "this gcc cannot link with -fsanitize=address,undefined"
    return None


def variants(short: bool) -> dict[str, list[str]]:
    """Flags of the variants to build, by their names; the best one that runs here where one is enough."""
    setup = runpy.run_path(str(ROOT / "setup.py"))
    found: dict[str, list[str]] = setup["VARIANTS"].get(platform.machine(), {"baseline": []})
    if not short:
        return found
    library = ROOT / FOLDER / "libkernels.so"
    runs = setup["runnable"](found, str(library)) if library.is_file() else list(found)[:1]
    # Real tiles are left out: what their instructions read and write is hidden from the sanitizers.
    *_, best = (name for name in runs if name != "amx")
    return {best: found[best]}


def build(copy: Path, short: bool) -> None:
    """Copy this folder, with a sanitized library. Two compilers at a time, with few optimisations, which takes seconds."""
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for path in ROOT.iterdir():
        if path.name in ("layerskip_models", "tests"):
            shutil.copytree(path, copy / path.name, ignore=ignored)
        elif path.name not in ("build", ".git", ".venv"):
            (copy / path.name).symlink_to(path)
    flags: Sequence[str] = [
        *runpy.run_path(str(ROOT / "setup.py"))["FLAGS"],
        "-O0" if short else "-O1",
        "-fPIC",
        *SANITIZERS,
    ]
    jobs = [(f"{variant}.o", "kernels.c", [*more, f"-DVARIANT={variant}"]) for variant, more in variants(short).items()]
    jobs += [("pool.o", "pool.c", []), ("processor.o", "processor.c", [])]
    running: list[subprocess.Popen[bytes]] = []
    for name, source, more in jobs:
        if len(running) == 2 and running.pop(0).wait():
            raise SystemExit(1)
        command = ["gcc", *flags, *more, "-c", str(copy / FOLDER / source), "-o", str(copy / name)]
        running.append(subprocess.Popen(command))
    if sum(compiler.wait() for compiler in running):
        raise SystemExit(1)
    objects = [str(copy / name) for name, _, _ in jobs]
    library = copy / FOLDER / "libkernels.so"
    subprocess.run(["gcc", "-shared", *SANITIZERS, "-o", library, *objects, "-lm", "-pthread"], check=True)


def environment() -> Mapping[str, str]:
    """For tests on that library; CFLAGS is for those that compile something by themselves."""
    runtimes = [
        subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return {
        **os.environ,
        "CFLAGS": " ".join(SANITIZERS),
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "SELFSPEC_NATIVE": "require",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the kernels' tests on a sanitized library.")
    parser.add_argument("--short", action="store_true", help="one variant, and the tests of memory alone")
    parser.add_argument("tests", nargs="*", help="arguments of pytest (default: every test of the kernels)")
    arguments = parser.parse_args()
    reason = missing()
    if reason is not None:
        print(f"sanitizers skipped: {reason}")
        return 0
    copy = ROOT / "build" / ("sanitize-short" if arguments.short else "sanitize")
    build(copy, arguments.short)
    chosen = arguments.tests or [str(found()[name]) for name in (SHORT if arguments.short else FILES)]
    # Else pytest keeps what the sanitizers say as they end the process.
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--capture=sys", *chosen]
    return subprocess.run(command, cwd=copy, env=environment(), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
