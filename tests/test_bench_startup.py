"""Starts in processes of their own: every stage is there, the stages are the whole, a failure is told."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tiny_llama import tiny_llama, tiny_tokenizer
from typer.testing import CliRunner

from bench.commands.bench_app import app
from bench.machine.startup import SECOND, STAGES, forget_files, start, start_folders
from bench.machine.startup_child import FirstToken, Stages, start_selfspec, start_transformers
from bench.record import read_record
from bench.report.markdown import sections


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-checkpoint")
    tiny_llama(seed=3).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def in_this_process(job: dict[str, Any]) -> dict[str, float]:
    """`start` without the seconds that a process spends on imports."""
    stages = Stages(time.time())
    stages.end("interpreter")
    {"selfspec": start_selfspec, "transformers": start_transformers}[job["engine"]](stages, job)
    return stages.seconds


def test_the_command_and_its_table(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[list[Path]] = []
    monkeypatch.setattr(
        "bench.commands.startup_command.forget_files", forgotten.append
    )  # the machine's files are others', too
    monkeypatch.setattr("bench.commands.startup_command.start", in_this_process)
    record = tmp_path / "startup.jsonl"
    arguments = ["--model", str(checkpoint), "--prompt-tokens", "12", "--repeats", "1", "--device", "cpu"]
    result = CliRunner().invoke(app, ["startup", *arguments, "--output", str(record)])
    assert result.exit_code == 0, result.output
    assert len(forgotten) == 2  # before each cold start
    assert checkpoint in forgotten[0]
    runs = [line for line in read_record(record) if line["kind"] == "start"]
    assert [(line["engine"], line["cold"]) for line in runs] == [
        ("selfspec", True), ("selfspec", False), ("transformers", True), ("transformers", False)
    ]  # fmt: skip
    for line in runs:
        ours = line["engine"] == "selfspec"
        assert set(line["seconds"]) == {*STAGES, SECOND} - (set() if ours else {"layout", "calibration"})
        assert all(seconds >= 0 for seconds in line["seconds"].values())
    table = sections(read_record(record))["startup"]
    assert table.count("| selfspec, ") == table.count("| transformers, ") == 2
    layout = runs[0]["seconds"]["layout"]
    assert f" {layout:.2f} |" in next(row for row in table.splitlines() if row.startswith("| selfspec, cold |"))


def test_a_real_process_accounts_for_its_time(checkpoint: Path) -> None:
    job = {"engine": "selfspec", "model": str(checkpoint), "device": "cpu", "dtype": "float32", "prompt": [1, 2]}
    began = time.time()
    seconds = start(job)
    took = time.time() - began
    assert set(seconds) == {*STAGES, SECOND}
    assert 0.5 * took < sum(seconds.values()) < took
    assert seconds["imports"] > 0.1


def test_stages_are_one_clock() -> None:
    stages = Stages(time.time() - 5)
    stages.end("interpreter")
    streamer = FirstToken(stages, "prefill")
    streamer.put("the prompt")
    assert "prefill" not in stages.seconds
    streamer.put("a token")
    streamer.put("another")
    assert stages.seconds["interpreter"] == pytest.approx(5, abs=0.5)
    assert stages.seconds["prefill"] < 0.5


def test_a_start_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)starting another failed.*KeyError"):
        start({"engine": "another"})


def test_files_that_a_start_reads(checkpoint: Path) -> None:
    folders = start_folders(str(checkpoint))
    assert {"torch", "transformers", "selfspec", checkpoint.name} <= {folder.name for folder in folders}
    assert forget_files([checkpoint]) == sum(file.stat().st_size for file in checkpoint.iterdir())
