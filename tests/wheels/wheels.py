"""What must be true of a wheel, read from the file alone."""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path

from tests.wheels.libraries import problems_of_linux_library
from tests.wheels.mac_libraries import problems_of_mac_library
from tests.wheels.targets import LIBRARY, Platform, ReleaseError, target_of

NATIVE = (".so", ".dylib", ".dll", ".pyd", ".a", ".o")


def problems_of_wheel(wheel: Path) -> list[str]:
    """Every reason not to publish a wheel; none if it is good. Takes some seconds for each variant.

    Raises ReleaseError for a wheel of another platform.
    """
    target = target_of(wheel)
    with zipfile.ZipFile(wheel) as archive:
        broken = archive.testzip()
        if broken is not None:
            return [f"{broken} is damaged"]
        found = problems_of_names(archive, target)
        if LIBRARY not in archive.namelist():
            return found
        library = archive.read(LIBRARY)
    if target.is_linux:
        return [*found, *problems_of_linux_library(library, target), *_problems_of_policy(wheel, target)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "library"
        path.write_bytes(library)
        return [*found, *problems_of_mac_library(path, target)]


def unpacked_library(path: Path, folder: Path) -> Path:
    """The native library in a wheel, unpacked; a path of anything else is the library itself. Raises ReleaseError."""
    if not path.is_file():
        raise ReleaseError(f"there is no file {path}")
    if path.suffix != ".whl":
        return path.resolve()
    with zipfile.ZipFile(path) as archive:
        if LIBRARY not in archive.namelist():
            raise ReleaseError(f"{path} has no {LIBRARY}")
        return Path(archive.extract(LIBRARY, folder))


def problems_of_names(archive: zipfile.ZipFile, target: Platform) -> list[str]:
    """Files and tags."""
    names = archive.namelist()
    found = [f"it has the native file {name}" for name in names if name.endswith(NATIVE) and name != LIBRARY]
    if LIBRARY not in names:
        found.append(f"it lacks {LIBRARY}: the compiler failed, and setup.py goes on without it")
    (metadata,) = (name for name in names if name.endswith(".dist-info/WHEEL"))
    lines = archive.read(metadata).decode().splitlines()
    for line in (f"Tag: py3-none-{target.tag}", "Root-Is-Purelib: false"):
        if line not in lines:
            found.append(f"its file WHEEL lacks the line {line!r}")
    return found


def _problems_of_policy(wheel: Path, target: Platform) -> list[str]:
    """The same question to auditwheel: it knows every library and symbol version of each manylinux policy."""
    from auditwheel.wheel_abi import analyze_wheel_abi

    found = analyze_wheel_abi(None, None, wheel, frozenset(), disable_isa_ext_check=False, allow_graft=False)
    named = found.overall_policy.name
    _, major, minor, *_ = named.split("_") if named.startswith("manylinux_") else ("", "999", "0")
    if (int(major), int(minor)) > target.oldest_system:
        return [f"auditwheel finds it to be {named}, not {target.tag}"]
    return []
