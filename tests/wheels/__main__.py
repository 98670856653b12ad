"""Build wheels and check them: `make wheels` and `make release`. Nothing is published."""

from __future__ import annotations

import argparse
import hashlib
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.wheels.building import build_sdist, build_wheel
from tests.wheels.emulation import driver_of, emulator, native_numbers, oldest_with_python, run_emulated
from tests.wheels.processes import run
from tests.wheels.readiness import version_to_release
from tests.wheels.running import install, run_installed, run_installed_emulated
from tests.wheels.speed import compare, variants_of_both
from tests.wheels.targets import ROOT, TARGETS, Platform, ReleaseError, target_of
from tests.wheels.wheels import problems_of_wheel, unpacked_library


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1, after one message, if something is not good."""
    parser = argparse.ArgumentParser(prog="python -m tests.wheels", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    wheels = commands.add_parser("wheels", help="build wheels, check them and run them")
    wheels.add_argument("folder", type=Path, help="where they are written; files of earlier runs are removed")
    wheels.add_argument(
        "--targets",
        nargs="+",
        choices=TARGETS,
        default=list(TARGETS),
        metavar="TARGET",
        help=f"of {', '.join(TARGETS)} (default: all)",
    )
    check = commands.add_parser("check", help="check wheels that are there, without running them")
    check.add_argument("wheels", type=Path, nargs="+")
    prepare = commands.add_parser("prepare", help="all that a release needs, but publishing it")
    prepare.add_argument("folder", type=Path, help="where its files are written; files of earlier runs are removed")
    speed = commands.add_parser(
        "speed", help="times of products in two builds of the library, relative to the first one"
    )
    speed.add_argument(
        "libraries", type=Path, nargs=2, metavar="LIBRARY", help="a library, or a wheel for this machine"
    )
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "wheels":
            make_wheels(chosen.folder.resolve(), [TARGETS[name] for name in chosen.targets])
        elif chosen.command == "check":
            for wheel in chosen.wheels:
                check_wheel(wheel)
        elif chosen.command == "speed":
            print_speed(*chosen.libraries)
        else:
            prepare_release(chosen.folder.resolve())
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(f"error: the package {error.name} is missing: pip install '.[release]'", file=sys.stderr)
        return 1
    return 0


def make_wheels(folder: Path, targets: Sequence[Platform]) -> list[Path]:
    """The source distribution and wheels, built, checked and run. Raises ReleaseError if one is not good."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReleaseError(f"cannot write to {folder}: {error.strerror}; choose another folder") from error
    for old in (*folder.glob("selfspec-*.whl"), *folder.glob("selfspec-*.tar.gz"), folder / "SHA256SUMS"):
        old.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        sdist = build_sdist(folder, _made(work / "sdist"))
        say(f"built {sdist.name}")
        wheels = []
        for target in targets:
            wheels.append(build_wheel(sdist, target, folder, _made(work / target.tag)))
            say(f"built {wheels[-1].name} ({wheels[-1].stat().st_size / 2**20:.1f} MiB)")
        for wheel in wheels:
            check_wheel(wheel)
        run_wheels(wheels, work)
    return wheels


def check_wheel(wheel: Path) -> None:
    """Raises ReleaseError with everything that is wrong."""
    if not wheel.is_file():
        raise ReleaseError(f"there is no wheel at {wheel}")
    problems = problems_of_wheel(wheel)
    if problems:
        raise ReleaseError(f"{wheel.name} is not good:\n" + "\n".join(f"- {problem}" for problem in problems))
    say(f"checked {wheel.name}")


def run_wheels(wheels: Sequence[Path], work: Path) -> None:
    """This machine's wheel installed; every Linux wheel's library on emulated processors. Raises ReleaseError."""
    native: dict[str, list[str]] = {}
    linux = [wheel for wheel in wheels if target_of(wheel).is_linux]
    # This machine's first: its numbers are what the others' are compared with.
    for wheel in sorted(linux, key=lambda one: target_of(one).architecture != platform.machine()):
        target = target_of(wheel)
        if target.architecture == platform.machine():
            run_own_wheel(wheel, target, _made(work / "installed"))
        driver = driver_of(wheel, target, _made(work / f"{target.architecture}-driver"))
        native = native or native_numbers(driver)
        for report in run_emulated(driver, native):
            say(f"emulated {report}")
    for wheel in wheels:
        if not target_of(wheel).is_linux:
            say(f"not run: {wheel.name}, since nothing here runs programs of macOS")


def run_own_wheel(wheel: Path, target: Platform, work: Path) -> None:
    """The wheel for this machine, installed, on its processor and on an old one. Raises ReleaseError."""
    python = install(wheel, work)
    texts = run_installed(python)
    say(f"installed {wheel.name} where there is no compiler: {', '.join(texts)} continue a text")
    oldest = oldest_with_python(target.architecture)
    if oldest is not None:
        variant = oldest.runs[0]
        run_installed_emulated(python, emulator(target.architecture, oldest), variant, texts[variant])
        say(f"emulated {oldest.model}: Python continues the same text with {variant}")


def print_speed(first: Path, second: Path) -> None:
    """A table of what the second build's products take, relative to the first one's. Raises ReleaseError."""
    with tempfile.TemporaryDirectory() as temporary:
        libraries = (unpacked_library(first, Path(temporary) / "1"), unpacked_library(second, Path(temporary) / "2"))
        variants = variants_of_both(*libraries)
        columns = {variant: compare(*libraries, variant) for variant in variants}
    print(f"| weights | rows | {' | '.join(variants)} |\n|---|--:|{'--:|' * len(variants)}")
    for row in zip(*columns.values()):
        print(f"| {row[0].weights} | {row[0].rows} | {' | '.join(f'{one.ratio:.2f}' for one in row)} |")


def prepare_release(folder: Path) -> None:
    """Everything up to publishing. Raises ReleaseError."""
    version = version_to_release(ROOT)
    make_wheels(folder, list(TARGETS.values()))
    describe_files(folder)
    print(
        f"\nselfspec {version} is ready in {folder}, and nothing has been published. To publish it:\n\n"
        f"    git tag -a v{version} -m 'selfspec {version}' && git push origin v{version}\n"
        f"    python -m twine upload {folder}/selfspec-{version}*\n"
    )


def describe_files(folder: Path) -> None:
    """Check how an index would show the files, and write their sums to SHA256SUMS. Raises ReleaseError."""
    files = sorted(folder.glob("selfspec-*"))
    run([sys.executable, "-m", "twine", "check", "--strict", *map(str, files)])
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    (folder / "SHA256SUMS").write_text(sums, encoding="utf-8")


def say(line: str) -> None:
    """A line of progress, with the time since the start."""
    print(f"{time.monotonic() - START:6.0f} s  {line}", flush=True)


START = time.monotonic()


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
