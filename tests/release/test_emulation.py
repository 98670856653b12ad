"""What is concluded from programs on emulated processors. Here an emulator is a script with the answers of one."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.wheels.emulation import Driver, native_numbers, run_emulated
from tests.wheels.targets import ReleaseError

NATIVE = {"baseline": ["1.5", "2"], "avx2": ["1.25", "2"]}
GOOD = {
    "Opteron_G1 ": "echo baseline",
    "Nehalem ": "echo baseline",
    "SandyBridge ": "echo baseline",
    "Haswell ": "echo avx2; echo baseline",
    "Haswell avx2": "echo 1.25; echo 2",
    "Haswell avx512": "kill -s ILL $$",
    "* baseline": "echo 1.5; echo 2",
    "* avx2": "kill -s ILL $$",
}
"""By processor and variant."""
ARM = {"cortex-a53 ": "echo neon", "max ": "echo neon", "* neon": "echo 1.5; echo 2.00001"}
Emulate = Callable[[str, dict[str, str]], Driver]


@pytest.fixture
def emulate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Emulate:
    """An emulator with these answers, and a driver for its architecture."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("QEMU_LD_PREFIX", str(tmp_path))

    def made(architecture: str, answers: dict[str, str]) -> Driver:
        cases = [f"{key.replace(' ', '@')}) {answer};;" for key, answer in answers.items()]
        script = tmp_path / f"qemu-{architecture}"  # -cpu MODEL driver library [variant]
        script.write_text('#!/bin/sh\ncase "$2@$5" in\n' + "\n".join(cases) + "\n*) exit 9;;\nesac\n", encoding="utf-8")
        script.chmod(0o755)
        return Driver(architecture=architecture, program=tmp_path / "driver", library=tmp_path / "library")

    return made


def test_every_processor_runs_what_it_has(emulate: Emulate) -> None:
    assert run_emulated(emulate("x86_64", GOOD), NATIVE) == [
        "Opteron_G1: baseline (the same 2 numbers as here)",
        "Nehalem: baseline (the same 2 numbers as here)",
        "SandyBridge: baseline (the same 2 numbers as here)",
        "Haswell: avx2 (the same 2 numbers as here), baseline (the same 2 numbers as here)",
    ]
    assert "Haswell: avx2 (2 numbers), baseline (2 numbers)" in run_emulated(emulate("x86_64", GOOD), {})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"Nehalem ": "echo avx2; echo baseline"}, r"on Nehalem the library would run \('avx2', 'baseline'\)"),
        ({"Haswell ": "echo baseline"}, r"on Haswell the library would run \('baseline',\), and should run \('avx2'"),
        ({"* baseline": "echo 1.5; echo 2.0000001"}, "baseline computes other numbers on an emulated Opteron_G1"),
        ({"* baseline": "kill -s ILL $$"}, "ended with SIGILL"),
        ({"* baseline": "echo wrong >&2; exit 1"}, "ended with status 1:\nwrong"),
        ({"* avx2": "echo 1.25; echo 2"}, "an emulated Opteron_G1 ran avx2, which it lacks"),
    ],
)
def test_what_is_wrong_on_an_old_processor(changed: dict[str, str], message: str, emulate: Emulate) -> None:
    with pytest.raises(ReleaseError, match=message):
        run_emulated(emulate("x86_64", GOOD | changed), NATIVE)


def test_neon_is_close_to_the_portable_code(emulate: Emulate) -> None:
    (line, _) = run_emulated(emulate("aarch64", ARM), NATIVE)
    assert line == "cortex-a53: neon (2 numbers, within 3e-06 of baseline here)"  # 1e-5 / (1 + 2)
    for answer in ("echo 1.5; echo 2.0001", "echo 1.5", "echo 1.5; echo nan"):
        with pytest.raises(ReleaseError, match="neon differs from baseline"):
            run_emulated(emulate("aarch64", ARM | {"* neon": answer}), NATIVE)


def test_what_is_missing_is_named(emulate: Emulate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = emulate("aarch64", ARM)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.delenv("QEMU_LD_PREFIX")
    monkeypatch.setattr(Path, "is_dir", lambda path: False)
    with pytest.raises(ReleaseError, match=r"install libc6-arm64-cross .*or set QEMU_LD_PREFIX"):
        run_emulated(driver, NATIVE)
    (tmp_path / "qemu-aarch64").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ReleaseError, match="qemu-aarch64 is missing: install qemu-user"):
        run_emulated(driver, NATIVE)


def test_another_architecture_has_no_numbers_here(emulate: Emulate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert native_numbers(emulate("aarch64", ARM)) == {}
