"""The table of policies: what counts as fixed in hindsight and from the other half, and the command end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_llama import tiny_llama, tiny_tokenizer
from typer.testing import CliRunner

from bench.cli import app
from bench.policy_table import (
    etpl_by_task,
    fixed_from_other_half,
    fixed_in_hindsight,
    learn_share,
    policy_names,
    speed_by_task,
)
from bench.record import Line, read_record


def grid(prompt: str, task: str, a: tuple[float, float], b: tuple[float, float]) -> Line:
    cells = {"ls:1-1": [*a, a[1] / 10], "ls:2-2": [*b, b[1] / 10]}
    return {"kind": "grid", "prompt": prompt, "task": task, "cells": cells}


def run(policy: str, prompt: str, task: str, tokens: int, layers: int, seconds: float) -> Line:
    return {
        "kind": "policy", "policy": policy, "prompt": prompt, "task": task, "tokens": tokens, "loaded_layers": layers,
        "decode_seconds": seconds, "seconds": 2 * seconds, "learn_seconds": seconds / 5,
    }  # fmt: skip


LINES = [
    grid("1", "code", (10, 20), (10, 10)),  # half 0: the second setting, 1.0 against .5
    grid("2", "code", (10, 10), (10, 40)),  # half 1: the first, 1.0 against .25
    grid("3", "prose", (10, 10), (10, 50)),
    grid("4", "prose", (10, 10), (10, 50)),
    run("ar", "1", "code", 10, 40, 2.0),
    run("x", "1", "code", 10, 20, 1.0),
    run("ar", "3", "prose", 10, 40, 2.0),
    run("x", "3", "prose", 30, 20, 2.0),
]


def test_fixed_settings_by_hand() -> None:
    # code: the first setting makes 20 tokens of 30 layers, the second 20 of 50.
    assert fixed_in_hindsight(LINES) == {
        "code": ("ls:1-1", 20 / 30), "prose": ("ls:1-1", 1.0), "all": ("ls:1-1", 40 / 50)
    }  # fmt: skip
    assert fixed_in_hindsight(LINES, column=2)["code"] == ("ls:1-1", pytest.approx(200 / 30))
    # Prompt 1 is scored with what was best on prompt 2, the first setting (10 of 20); 2 with the second (10 of 40).
    careful = fixed_from_other_half(LINES)
    assert careful == {"code": 20 / 60, "prose": 1.0, "all": 40 / 80}


def test_policies_by_hand() -> None:
    assert policy_names(LINES) == ["ar", "x"]
    assert etpl_by_task(LINES, "x") == {"code": 0.5, "prose": 1.5, "all": 1.0}
    assert speed_by_task(LINES, "x") == {"code": 2.0, "prose": 3.0, "all": 2.5}
    assert learn_share(LINES, "x") == pytest.approx(0.1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-checkpoint")
    tiny_llama(seed=3).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def test_the_command_and_its_page(checkpoint: Path, tmp_path: Path) -> None:
    record = tmp_path / "policies.jsonl"
    arguments = ["--policy", "auto:cost=layers", "--policy", "del", "--baseline", "1", "--num-per-task", "2"]
    arguments += ["--prompt-tokens", "10", "--max-new-tokens", "8", "--output", str(record)]
    result = CliRunner().invoke(app, ["policies", "--model", str(checkpoint), *arguments])
    assert result.exit_code == 0, result.output
    lines = read_record(record)
    names = policy_names(lines)
    assert names[:3] == ["ar", "auto:cost=layers", "del"]
    assert "spide:1,tau=0.7" in names
    runs = [line for line in lines if line["kind"] == "policy"]
    assert all(line["first_difference"] is None and line["tokens"] == 7 for line in runs)
    assert any(line["kind"] == "costs" and line["num_layers"] == 4 for line in lines)
    page = CliRunner().invoke(app, ["report", str(record)]).output
    assert "| `auto:cost=layers` |" in page
    assert "best fixed per kind, chosen on the other half" in page
    plain = next(line for line in page.splitlines() if line.startswith("| `ar` |"))
    assert set(plain.split("|")[2:-1]) == {" 1.000 "}


def test_a_task_of_one_prompt_has_no_halves(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"id": "a", "task": "code", "prompt": "a bed"}) + "\n", encoding="utf-8")
    result = CliRunner().invoke(app, ["policies", "--model", str(checkpoint), "--prompts", str(path)])
    assert result.exit_code == 2
    assert "at least two prompts" in result.output
