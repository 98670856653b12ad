"""A release ends before anything is published."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

import tests.wheels.__main__ as command
from tests.wheels.building import compiler
from tests.wheels.targets import TARGETS, ReleaseError


def test_files_are_checked_and_summed_and_nothing_is_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs: list[list[str]] = []

    def wheels(folder: Path, targets: list[object]) -> None:
        assert len(targets) == 3
        (folder / "selfspec-9.9-a.whl").write_bytes(b"a wheel")
        (folder / "selfspec-9.9.tar.gz").write_bytes(b"sources")
        (folder / "notes.txt").write_bytes(b"another's")

    monkeypatch.setattr(command, "version_to_release", lambda root: "9.9")
    monkeypatch.setattr(command, "make_wheels", wheels)
    monkeypatch.setattr(command, "run", lambda program: programs.append(program))
    assert command.main(["prepare", str(tmp_path)]) == 0
    files = [str(tmp_path / "selfspec-9.9-a.whl"), str(tmp_path / "selfspec-9.9.tar.gz")]
    assert [program[1:] for program in programs] == [["-m", "twine", "check", "--strict", *files]]
    wheel, sources = (hashlib.sha256(content).hexdigest() for content in (b"a wheel", b"sources"))
    sums = (tmp_path / "SHA256SUMS").read_text(encoding="utf-8")
    assert sums == f"{wheel}  selfspec-9.9-a.whl\n{sources}  selfspec-9.9.tar.gz\n"
    said = capsys.readouterr().out
    assert "nothing has been published" in said
    assert "git tag -a v9.9" in said and f"python -m twine upload {tmp_path}/selfspec-9.9*" in said


def test_a_checkout_that_is_not_ready_builds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def not_ready(root: Path) -> str:
        raise ReleaseError("commit first")

    monkeypatch.setattr(command, "version_to_release", not_ready)
    monkeypatch.setattr(command, "make_wheels", lambda *arguments: pytest.fail("it was built"))
    assert command.main(["prepare", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "error: commit first\n"


def test_only_files_of_earlier_runs_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_sources(*arguments: object) -> Path:
        raise ReleaseError("stop here")

    kept, old = tmp_path / "thesis.txt", tmp_path / "selfspec-0.0.1-a.whl"
    for path in (kept, old):
        path.write_bytes(b"")
    monkeypatch.setattr(command, "build_sdist", no_sources)
    assert command.main(["wheels", str(tmp_path)]) == 1
    assert kept.exists() and not old.exists()


def test_what_keeps_wheels_from_being_built_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert command.main(["wheels", str(tmp_path / "file" / "below")]) == 1
    said = capsys.readouterr().err
    assert said == f"error: cannot write to {tmp_path / 'file' / 'below'}: Not a directory; choose another folder\n"
    monkeypatch.setitem(sys.modules, "ziglang", None)  # as if it were not installed
    monkeypatch.setattr(command, "build_sdist", lambda *arguments: compiler(TARGETS["x86_64"]))
    assert command.main(["wheels", str(tmp_path / "wheels")]) == 1
    assert capsys.readouterr().err == "error: the package ziglang is missing: pip install '.[release]'\n"
