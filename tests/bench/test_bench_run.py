"""`selfspec-bench run`: the whole record, sampled runs, synthetic weights, mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import bench.commands.preparation
import layerskip_models.checkpoints.synthetic
from bench.commands.bench_app import app
from bench.commands.run_command import kept_policies
from bench.record import BEST_FIXED, Line, read_record
from bench_runs import run
from policies import LayerCost, Policy, kept_between_texts, parse_policy

pytestmark = pytest.mark.usefixtures("known_costs")


def test_the_record_and_its_page(checkpoint: Path, tmp_path: Path) -> None:
    record = tmp_path / "run.jsonl"
    policies = ["--policy", "auto:cost=layers", "--kept", "auto:cost=layers", "--policy", "spide:1"]
    tasks = ["--task", "code", "--task", "english"]
    result = run(checkpoint, "--peers", *policies, *tasks, "--num-samples", 2, "--output", record)
    assert result.exit_code == 0, result.output
    lines = read_record(record)
    engines = list(lines[0]["engines"])
    assert engines[:2] == ["selfspec:ar", "selfspec:auto:cost=layers"]
    kept = "selfspec:auto:cost=layers:kept"
    assert {"selfspec:spide:1", kept, "transformers:generate", BEST_FIXED} <= set(engines)
    samples = [line for line in lines if line["kind"] == "sample"]
    assert len(samples) == len(engines) * 4 * 2
    assert {line["task"] for line in samples} == {"code", "english"}
    fixed = next(line for line in lines if line["kind"] == "fixed")["by_task"]
    for line in samples:
        if line["engine"] == BEST_FIXED:
            assert line["stats"]["policy"] == fixed[line["task"]]
    outputs = [line for line in lines if line["kind"] == "output"]
    assert all(line["first_difference"] is None and line["reference"] == "selfspec:ar" for line in outputs)
    assert not list(tmp_path.glob("*.part*"))
    page = CliRunner().invoke(app, ["report", str(record)]).output
    plain = next(line for line in page.splitlines() if line.startswith("| `ar` |"))
    assert set(plain.split("|")[2:-1]) == {" 1.000 "}
    for title in (
        "of bandwidth",
        "auto:cost=layers, kept |",
        "rows marked kept keep what they learned between prompts",
        "× transformers",
        "chosen on the other half",
        "draft passes",
    ):
        assert title in page
    assert str(tmp_path) not in json.dumps(lines)


def test_a_run_that_copies_says_where_each_source_pays(checkpoint: Path, tmp_path: Path) -> None:
    prompts, record = tmp_path / "prompts.jsonl", tmp_path / "run.jsonl"
    text = "a bed, a fig, a bed, a fig, "
    lines = [{"id": f"{task}-1", "task": task, "prompt": text * times} for task, times in (("edit", 2), ("list", 3))]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    options = ["--prompts", prompts, "--policy", "copy:4", "--no-grid", "--max-new-tokens", 20]
    result = run(checkpoint, *options, "--prompt-tokens", 24, "--output", record)
    assert result.exit_code == 0, result.output
    found = {line["engine"]: line["stats"] for line in read_record(record) if line["kind"] == "sample"}
    assert found["selfspec:copy:4"]["num_copied"] >= found["selfspec:copy:4"]["num_copied_accepted"]
    assert found["selfspec:copy:4"]["num_copied"] > 0 == found["selfspec:ar"]["num_copied"]
    page = CliRunner().invoke(app, ["report", str(record)]).output
    assert "**New tokens by source, task by task" in page
    assert "| **edit** |" in page and "| **list** |" in page


def test_a_sampled_run(checkpoint: Path, tmp_path: Path) -> None:
    """A seed for each repeat, the same for all engines and again the next time; speeds are compared and outputs are not."""
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": str(i), "task": "words", "prompt": "abc", "reference": "def"} for i in range(2)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    arguments = ["--prompts", prompts, "--policy", "ls:2-3", "--do-sample", "--temperature", 0.8, "--top-p", 0.9]
    records = [tmp_path / f"{name}.jsonl" for name in ("a", "b", "c")]
    for record, seed in zip(records, (5, 5, 6)):
        result = run(checkpoint, "--peers", *arguments, "--seed", seed, "--output", record)
        assert result.exit_code == 0, result.output
    lines, again, other = map(read_record, records)
    configuration = lines[0]["configuration"]
    assert [configuration[name] for name in ("do_sample", "temperature", "top_p", "top_k", "seed")] == [
        True, 0.8, 0.9, 0, 5,
    ]  # fmt: skip
    assert BEST_FIXED not in lines[0]["engines"]

    def drawn(lines: list[Line], repeat: int) -> dict[tuple[str, str], tuple[int, ...]]:
        samples = [line for line in lines if line["kind"] == "sample" and line["repeat"] == repeat]
        return {(line["engine"], line["prompt"]): tuple(line["token_ids"]) for line in samples}

    first, second = drawn(lines, 0), drawn(lines, 1)
    assert (first, second) == (drawn(again, 0), drawn(again, 1))
    assert drawn(other, 0) == second  # the second repeat has the next seed
    assert all(first[key] != second[key] for key in first)
    assert len({output for (engine, _), output in first.items() if engine == "transformers:generate"}) == 1
    outputs = [line for line in lines if line["kind"] == "output"]
    assert all(line["first_difference"] is line["reference"] is line["repeats_that_differ"] is None for line in outputs)
    assert all(set(line["scores"]) == {"ROUGE-1", "ROUGE-2", "ROUGE-L"} for line in lines if line["kind"] == "sample")
    page = CliRunner().invoke(app, ["report", str(records[0])]).output
    assert "sampled at temperature 0.8, top-p 0.9: " in page
    assert "sampled outputs are not compared" in page
    assert "Medians of 2 seeds" in page
    assert "| engine | words, ROUGE-1 | words, ROUGE-2 | words, ROUGE-L |" in page
    assert "equal" not in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", 0.5], "--temperature has no effect on greedy decoding"),
        (["--do-sample", "--top-p", 0], "--top-p must be in (0, 1]"),
        (["--do-sample", "--temperature", 0], "--temperature must be above 0"),
        (["--do-sample", "--grid"], "--grid replays greedy texts"),
    ],
)
def test_wrong_sampling_options(arguments: list[object], message: str, checkpoint: Path) -> None:
    result = run(checkpoint, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("runner", ["eager", pytest.param("captured", marks=pytest.mark.slow)])
def test_synthetic_weights_are_called_so(runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With captures, which are made on the stand-in before anything is timed."""
    tiny = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
    tiny |= {"intermediate_size": 48, "vocab_size": 4096, "max_position_embeddings": 64}
    monkeypatch.setattr(layerskip_models.checkpoints.synthetic, "SHAPES", {"tiny": tiny})
    monkeypatch.setattr(bench.commands.preparation, "SHAPES", {"tiny": tiny})
    record = tmp_path / "run.jsonl"
    options = ["--policy", "auto:cost=layers", "--runner", runner, "--num-samples", "1", "--output", record]
    result = run("synthetic:tiny,eps=0.05", *options)
    assert result.exit_code == 0, result.output
    lines = read_record(record)
    assert lines[0]["configuration"]["model"] == "synthetic weights (tiny,eps=0.05)"
    assert lines[0]["configuration"]["runner"] == runner
    ours = [line for line in lines if line["kind"] == "sample" and line["engine"].startswith("selfspec:a")]
    assert {line["stats"]["runner"] for line in ours} == {runner}
    assert {line["stats"]["num_captures"] for line in ours} == {0}
    assert "Synthetic weights (tiny,eps=0.05) on" in CliRunner().invoke(app, ["report", str(record)]).output
    unknown = run("synthetic:huge")
    assert unknown.exit_code == 2
    assert "unknown shape 'huge'" in unknown.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "--resume needs --output"),
        (["--resume", "--output", "x.jsonl", "--kept", "auto"], "cannot go on with --kept"),
        (["--kept", "autoo"], "unknown policy"),
        (["--kept", "ls:1-2"], "--kept ls:1-2: this policy learns nothing"),
        (["--task", "poetry"], "no prompts of task poetry; there are code, english"),
        (["--policy", "dell"], "unknown policy"),
        (["--policy", "dv:9"], "exit_layer must be in [1, 3]"),
    ],
)
def test_mistakes_are_told_before_anything_runs(arguments: list[str], message: str, checkpoint: Path) -> None:
    result = run(checkpoint, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_every_policy_that_learns_can_be_kept() -> None:
    def parse(name: str) -> Policy:
        return parse_policy(name, num_layers=4, measure=lambda: LayerCost(4))

    names = [
        "ar",
        "ls:1-2",
        "auto",
        "del",
        "del+spide:tau=0.6",
        "svip:1",
        "fs:1-4",
        "dv:1",
        "spide:1",
        "del:length=tpl",
    ]
    learning = [name for name in names if name not in ("ar", "ls:1-2", "svip:1")]
    assert kept_policies(["all", "del"], names, parse) == learning
    assert kept_between_texts("del:omega=0.9+spide") == "del:omega=0.9,state=kept+spide"
    assert kept_between_texts("ls:3-9+del") == "ls:3-9+del:state=kept"
    assert kept_between_texts("spide:3") == "spide:3"
