"""`selfspec-bench run` broken off anywhere: what is kept, and that going on gives the record of a run that was not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import bench.run
from bench.record import Line, RecordWriter, read_part, read_record
from bench_runs import counts, run
from known_costs import know_costs
from selfspec import SelfSpecGenerator

pytestmark = pytest.mark.usefixtures("known_costs")
POLICIES = ["--policy", "auto", "--policy", "del"]
TWO_PROMPTS = ["--task", "code", "--task", "english", "--num-samples", 1]


def kill_after(monkeypatch: pytest.MonkeyPatch, kind: str, number: int) -> None:
    """The process dies when it writes the number-th line of a kind, in the middle of it."""
    original = RecordWriter.write
    left = [number]

    def write(self: RecordWriter, line: dict[str, Any]) -> None:
        if line["kind"] == kind:
            left[0] -= 1
            if left[0] == 0:
                assert self._stream is not None
                self._stream.write('{"kind": "' + kind)
                self._stream.flush()
                raise KeyboardInterrupt
        original(self, line)

    monkeypatch.setattr(RecordWriter, "write", write)


@pytest.mark.parametrize(
    ("kind", "number"),
    [("costs", 1), ("grid", 2), ("sample", 1), ("sample", 11), ("output", 3), ("output", 8)],
)
def test_killed_anywhere_and_resumed_it_is_the_same(
    kind: str, number: int, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: list[Line]
) -> None:
    record = tmp_path / "run.jsonl"
    arguments = [*POLICIES, *TWO_PROMPTS, "--output", record]
    with monkeypatch.context() as patch:
        kill_after(patch, kind, number)
        patch.setattr(sys, "argv", ["selfspec-bench", "run", "--output", "run.jsonl"])
        interrupted = run(checkpoint, *arguments)
    assert not record.exists()
    kept = [line for line in read_part(record) if line["kind"] == "sample"]
    assert interrupted.exit_code == 130
    assert f"interrupted: {len(kept)} measurement" in interrupted.stderr
    assert interrupted.stderr.endswith("to go on: selfspec-bench run --output run.jsonl --resume\n")
    runs: list[object] = []
    original = SelfSpecGenerator.generate

    def counted(self: SelfSpecGenerator, *args: Any, **options: Any) -> Any:
        runs.append(options.get("policy"))
        return original(self, *args, **options)

    monkeypatch.setattr(SelfSpecGenerator, "generate", counted)
    result = run(checkpoint, *arguments, "--resume")
    assert result.exit_code == 0, result.output
    lines = read_record(record)
    assert counts(lines) == counts(whole)
    done = sum(line["engine"] == "selfspec:del" for line in kept)
    assert runs.count("del") == 2 * 2 - done  # the repeats that were left
    assert not list(tmp_path.glob("*.part*"))


@pytest.fixture(scope="module")
def whole(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Line]:
    """The run that was not killed."""
    record = tmp_path_factory.mktemp("whole") / "run.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        know_costs(patch)
        assert run(checkpoint, *POLICIES, *TWO_PROMPTS, "--output", record).exit_code == 0
    return read_record(record)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing was kept, since there was no --output"),
        (["--output", "run.jsonl", "--kept", "del"], "is in run.jsonl.part; the command has to be run again"),
    ],
)
def test_ctrl_c_says_what_was_kept(
    arguments: list[str], message: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench.run, "measure_prompt", interrupt)
    result = run(checkpoint, "--policy", "ls:1-2", "--num-samples", 1, *arguments)
    assert result.exit_code == 130
    assert message in result.stderr.splitlines()[-1]


def test_a_resumed_run_keeps_the_first_ones_costs(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reckons with seconds decides as before the run was killed, though the machine may measure others by now."""
    record = tmp_path / "run.jsonl"
    arguments = [*POLICIES, *TWO_PROMPTS, "--output", record]
    with monkeypatch.context() as patch:
        kill_after(patch, "output", 8)  # all was measured
        run(checkpoint, *arguments)
    before = read_part(record)
    monkeypatch.delattr(bench.run, "measured_cost")  # whoever measured again would fail
    assert run(checkpoint, *arguments, "--resume").exit_code == 0
    costs = [[line for line in lines if line["kind"] == "costs"] for lines in (before, read_record(record))]
    assert len(costs[0]) == 1
    assert costs[0] == costs[1]


def test_another_run_cannot_be_resumed(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "run.jsonl"
    with monkeypatch.context() as patch:
        kill_after(patch, "output", 1)
        run(checkpoint, *POLICIES, *TWO_PROMPTS, "--output", record)
    before = read_part(record)
    result = run(checkpoint, "--policy", "del", *TWO_PROMPTS, "--repeats", 3, "--output", record, "--resume")
    assert result.exit_code == 2
    assert "cannot resume: the run that broke off had another repeats" in result.stderr
    assert read_part(record) == before  # nothing is lost
