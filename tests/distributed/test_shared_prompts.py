"""Prompts shared out over processes: results in order, those of one process, and resumed from what a lost one left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rank_processes import results_of
from selfspec.cli.main import app

COUNT = 7


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "ab"[: 1 + n % 2] + "c" * n, "id": f"p{n}", "seed": n, "do_sample": n % 2 == 1} for n in range(COUNT)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def _generate(prompts: Path, output: Path, checkpoint: Path, *more: str) -> tuple[int, str]:
    arguments = ["--policy", "ls:1-2", "--max-new-tokens", "6", "--model", str(checkpoint), "--device", "cpu", *more]
    result = CliRunner().invoke(app, ["generate", "--prompts", str(prompts), "-o", str(output), *arguments])
    return result.exit_code, result.output


def _said(path: Path) -> list[tuple[str, list[int]]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["id"], line.get("token_ids")) for line in lines]


def test_results_are_those_of_one_process_in_order(prompts: Path, tmp_path: Path, checkpoint: Path) -> None:
    alone, shared = tmp_path / "alone.jsonl", tmp_path / "shared.jsonl"
    assert _generate(prompts, alone, checkpoint)[0] == 0
    found = results_of(2, _generate, prompts, shared, checkpoint, "--data-parallel")
    assert [code for code, _ in found] == [0, 0], found
    assert _said(shared) == sorted(_said(alone))
    assert not [*tmp_path.glob("*.part-*")]


def test_what_a_lost_process_left_is_not_decoded_again(prompts: Path, tmp_path: Path, checkpoint: Path) -> None:
    """Two lines of a part, the last one cut short, as of a process that was killed; now there are three processes."""
    output = tmp_path / "out.jsonl"
    assert _generate(prompts, output, checkpoint)[0] == 0
    lines = {json.loads(line)["id"]: json.loads(line) for line in output.read_text().splitlines()}
    output.unlink()
    kept = {**lines["p4"], "text": "of the earlier run"}
    part = tmp_path / "out.jsonl.part-1"
    part.write_text(json.dumps(kept) + "\n" + json.dumps(lines["p2"])[:40])
    found = results_of(3, _generate, prompts, output, checkpoint, "--data-parallel")
    assert [code for code, _ in found] == [0, 0, 0], found
    again = {json.loads(line)["id"]: json.loads(line) for line in output.read_text().splitlines()}
    assert list(again) == [f"p{n}" for n in range(COUNT)]
    assert again["p4"]["text"] == "of the earlier run"
    assert again["p2"]["token_ids"] == lines["p2"]["token_ids"]
    assert not part.exists()


def test_failures_of_all_processes_are_counted(prompts: Path, tmp_path: Path, checkpoint: Path) -> None:
    with prompts.open("a") as file:
        file.write(json.dumps({"prompt": "a" * 500, "id": "long"}) + "\n")
    found = results_of(2, _generate, prompts, tmp_path / "out.jsonl", checkpoint, "--data-parallel")
    assert [code for code, _ in found] == [1, 1]
    assert "1 of 8 prompts failed" in found[0][1]


def test_it_is_for_a_file_of_prompts(checkpoint: Path) -> None:
    result = CliRunner().invoke(app, ["generate", "a", "--data-parallel", "--model", str(checkpoint)])
    assert result.exit_code == 2
    assert "--data-parallel shares out the prompts of a file" in result.output
