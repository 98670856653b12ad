"""`selfspec-bench run` broken off anywhere: what is kept, and that going on gives the record of a run that was not."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import bench.run
from bench.record import Line, RecordWriter, read_parts, read_record
from bench_runs import counts, run
from known_costs import know_costs
from rank_processes import on_ranks, results_of
from selfspec import SelfSpecGenerator
from tiny_training import begin_as_rank

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
    ("kind", "number"), [("costs", 1), ("grid", 2), ("sample", 1), ("sample", 11), ("done", 2), ("memory", 2)]
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
    done = sum(line["kind"] == "done" for line in read_parts(record))
    assert interrupted.exit_code == 130
    assert f"interrupted: {done} prompt" in interrupted.stderr
    assert interrupted.stderr.endswith("to go on: selfspec-bench run --output run.jsonl --resume\n")
    runs: list[object] = []
    original = SelfSpecGenerator.generate

    def counted(self: SelfSpecGenerator, *args: Any, **options: Any) -> Any:
        runs.append(options.get("policy"))
        return original(self, *args, **options)

    monkeypatch.setattr(SelfSpecGenerator, "generate", counted)
    monkeypatch.setattr(bench.run, "peak_bytes", lambda device, call: call() or 1)  # the true one may call it again
    result = run(checkpoint, *arguments, "--resume")
    assert result.exit_code == 0, result.output
    lines = read_record(record)
    assert counts(lines) == counts(whole)
    assert runs.count("del") == 2 * (2 - done) + 1  # the repeats of what was left, and its memory
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
        kill_after(patch, "memory", 1)  # all was measured
        run(checkpoint, *arguments)
    before = read_parts(record)
    monkeypatch.delattr(bench.run, "measured_cost")  # whoever measured again would fail
    assert run(checkpoint, *arguments, "--resume").exit_code == 0
    costs = [[line for line in lines if line["kind"] == "costs"] for lines in (before, read_record(record))]
    assert len(costs[0]) == 1
    assert costs[0] == costs[1]


def parts(record: Path, attempt: str, *lines: Line, worker: int) -> None:
    """What a process leaves that is killed after these lines."""
    with pytest.raises(KeyboardInterrupt), RecordWriter(record, worker=worker, attempt=attempt) as writer:
        for line in lines:
            writer.write(line)
        raise KeyboardInterrupt


def test_parts_of_one_run_belong_together_and_older_ones_do_not(tmp_path: Path) -> None:
    record = tmp_path / "run.jsonl"
    for worker in range(12):  # by number: .part10 is not before .part2
        parts(record, "a", {"kind": "done", "prompt": worker}, worker=worker)
    assert [line["prompt"] for line in read_parts(record)] == list(range(12))
    left = {part: part.read_text() for part in tmp_path.glob("*.part?*")}
    # Anew, with fewer processes: what is left of the others goes away,
    parts(record, "b", {"kind": "done", "prompt": 20}, worker=0)
    parts(record, "b", {"kind": "done", "prompt": 21}, worker=1)
    assert sorted(part.name for part in tmp_path.iterdir()) == ["run.jsonl.part", "run.jsonl.part1"]
    assert [line["prompt"] for line in read_parts(record)] == [20, 21]
    # and is not taken if the run was killed before it could go.
    for part, text in left.items():
        part.write_text(text)
    assert [line["prompt"] for line in read_parts(record)] == [20]
    (tmp_path / "run.jsonl.part").unlink()  # the first process had not yet begun
    assert read_parts(record) == []


@pytest.mark.parametrize("again", [True, False])
def test_a_left_over_part_is_never_merged_twice(
    again: bool, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: list[Line]
) -> None:
    """Two processes broke off; one goes on alone (or starts anew) and is killed, too; the next takes each line once."""
    record = tmp_path / "run.jsonl"
    arguments = [*POLICIES, *TWO_PROMPTS, "--output", record]
    with monkeypatch.context() as patch:
        kill_after(patch, "done", 2)
        assert run(checkpoint, *arguments).exit_code != 0
    lines = read_parts(record)
    attempt = json.loads((tmp_path / "run.jsonl.part").read_text().splitlines()[0])["attempt"]
    theirs = [line for line in lines if line.get("prompt") == lines[-1]["prompt"]]
    ours = [line for line in lines if line not in theirs]
    for number, share in enumerate((ours, theirs)):
        parts(record, attempt, *share, worker=number)
    assert len(read_parts(record)) == len(lines)
    stale = (tmp_path / "run.jsonl.part1").read_text()
    with monkeypatch.context() as patch:
        kill_after(patch, "memory", 1)
        assert run(checkpoint, *arguments, *(["--resume"] if again else [])).exit_code != 0
    assert not (tmp_path / "run.jsonl.part1").exists()
    (tmp_path / "run.jsonl.part1").write_text(stale)  # as if it had been killed before it could take it away
    assert run(checkpoint, *arguments, "--resume").exit_code == 0
    assert counts(read_record(record)) == counts(whole)
    assert not list(tmp_path.glob("*.part*"))


def _as_rank(checkpoint: Path, arguments: list[object], lost_with: int | None = None) -> tuple[int, list[str]]:
    """Run in this process of several: exit code, and which prompts were measured. The second one may be lost."""
    begin_as_rank()
    measured: list[str] = []
    measure, write = bench.run.measure_prompt, RecordWriter.write
    done = 0

    def counted(engines: Any, prompt: Any, **options: Any) -> None:
        measured.append(prompt.id)
        measure(engines, prompt, **options)

    def lost(self: RecordWriter, line: dict[str, Any]) -> None:
        nonlocal done
        done += line["kind"] == "done"
        if done == lost_with and os.environ["RANK"] == "1":
            os._exit(1)
        write(self, line)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.run, "measure_prompt", counted)
        patch.setattr(RecordWriter, "write", lost)
        return run(checkpoint, *arguments).exit_code, measured


@pytest.mark.slow
def test_when_a_process_is_lost_the_others_prompts_are_not_measured_again(checkpoint: Path, tmp_path: Path) -> None:
    """Prompts 0 to 3, of which the second process had done 1 and begun with 3; then three processes do that one."""
    record, whole = tmp_path / "run.jsonl", tmp_path / "whole.jsonl"
    four = [*POLICIES, *TWO_PROMPTS, "--num-samples", 2]
    assert run(checkpoint, *four, "--output", whole).exit_code == 0
    arguments = [*four, "--device", "cpu", "--output", record]
    first, second = on_ranks(2, _as_rank, checkpoint, arguments, 2)
    assert second is None
    assert first[0] != 0
    assert not record.exists()
    done = [line["prompt"] for line in read_parts(record) if line["kind"] == "done"]
    assert len(done) == 3
    found = results_of(3, _as_rank, checkpoint, [*arguments, "--resume"])
    assert [code for code, _ in found] == [0, 0, 0]
    assert len([prompt for _, measured in found for prompt in measured]) == 1
    assert not {*done} & {prompt for _, measured in found for prompt in measured}
    lines = read_record(record)
    assert counts(lines) == counts(read_record(whole))  # in the order of one process
    assert lines[0]["provenance"]["processes"] == 2  # of the run that was begun
    assert not list(tmp_path.glob("*.part*"))


def test_another_run_cannot_be_resumed(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "run.jsonl"
    with monkeypatch.context() as patch:
        kill_after(patch, "done", 1)
        run(checkpoint, *POLICIES, *TWO_PROMPTS, "--output", record)
    before = read_parts(record)
    result = run(checkpoint, "--policy", "del", *TWO_PROMPTS, "--repeats", 3, "--output", record, "--resume")
    assert result.exit_code == 2
    assert "cannot resume: the run that broke off had another repeats" in result.stderr
    assert read_parts(record) == before  # nothing is lost
