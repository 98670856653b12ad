"""What a wheel's file says about itself, and what the command says of files that are no good wheels."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.wheels.__main__ import main
from tests.wheels.targets import LIBRARY, TARGETS, ReleaseError, target_of
from tests.wheels.wheels import problems_of_names, unpacked_library

TAG = TARGETS["aarch64"].tag
NAME = f"selfspec-0.1.0-py3-none-{TAG}.whl"


def wheel_with(folder: Path, *, tag: str = TAG, files: tuple[str, ...] = (LIBRARY,)) -> Path:
    path = folder / NAME
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "selfspec-0.1.0.dist-info/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-{tag}\n"
        )
        for name in files:
            archive.writestr(name, "content")
    return path


def problems(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        return problems_of_names(archive, target_of(path))


def test_names_and_tags(tmp_path: Path) -> None:
    assert problems(wheel_with(tmp_path)) == []
    assert problems(wheel_with(tmp_path, tag="linux_aarch64")) == [
        f"its file WHEEL lacks the line 'Tag: py3-none-{TAG}'"
    ]
    assert problems(wheel_with(tmp_path, files=(LIBRARY, "selfspec/other.so"))) == [
        "it has the native file selfspec/other.so"
    ]
    (missing,) = problems(wheel_with(tmp_path, files=()))
    assert missing == f"it lacks {LIBRARY}: the compiler failed, and setup.py goes on without it"


def test_each_platform_is_found_by_its_tag_and_others_are_refused() -> None:
    for target in TARGETS.values():
        assert target_of(Path(f"selfspec-0.1.0-py3-none-{target.tag}.whl")) is target
    with pytest.raises(ReleaseError, match=r"is for none of the platforms manylinux_2_17_x86_64, .*make wheels"):
        target_of(Path("selfspec-0.1.0-py3-none-linux_x86_64.whl"))


def test_what_a_platform_promises() -> None:
    assert [target.oldest_system for target in TARGETS.values()] == [(2, 17), (2, 17), (11, 0)]
    assert list(TARGETS["x86_64"].variants) == ["baseline", "avx2", "avx512", "vnni", "amx"]
    assert [list(TARGETS[name].variants) for name in ("aarch64", "macos")] == [["neon"], ["neon"]]


def test_the_library_of_a_wheel_or_the_file_itself(tmp_path: Path) -> None:
    wheel = wheel_with(tmp_path)
    assert unpacked_library(wheel, tmp_path / "unpacked").read_text(encoding="utf-8") == "content"
    other = tmp_path / "lib.so"
    other.write_bytes(b"")
    assert unpacked_library(other, tmp_path) == other
    with pytest.raises(ReleaseError, match="there is no file"):
        unpacked_library(tmp_path / "none.so", tmp_path)


def test_a_wheel_that_is_not_good_ends_with_all_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = wheel_with(tmp_path, tag="any", files=("a.so",))
    assert main(["check", str(wheel)]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"error: {NAME} is not good:"
    assert len(said) == 4 and all(line.startswith("- it") for line in said[1:])
    assert main(["check", str(tmp_path / "none.whl")]) == 1
    assert capsys.readouterr().err == f"error: there is no wheel at {tmp_path / 'none.whl'}\n"
