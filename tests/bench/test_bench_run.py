"""`selfspec-bench run`: the whole record, sampled runs, synthetic weights; broken off anywhere and resumed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import bench.commands.preparation
import bench.run
import layerskip_models.checkpoints.synthetic
from bench.commands.bench_app import app
from bench.commands.run_command import kept_policies
from bench.record import BEST_FIXED, Line, RecordWriter, read_part, read_record
from bench_runs import counts, run
from known_costs import know_costs
from policies import LayerCost, Policy, parse_policy
from selfspec import SelfSpecGenerator

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


def test_synthetic_weights_are_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
    tiny |= {"intermediate_size": 48, "vocab_size": 4096, "max_position_embeddings": 64}
    monkeypatch.setattr(layerskip_models.checkpoints.synthetic, "SHAPES", {"tiny": tiny})
    monkeypatch.setattr(bench.commands.preparation, "SHAPES", {"tiny": tiny})
    record = tmp_path / "run.jsonl"
    options = ["--policy", "auto:cost=layers", "--runner", "eager", "--num-samples", "1", "--output", record]
    result = run("synthetic:tiny,eps=0.05", *options)
    assert result.exit_code == 0, result.output
    lines = read_record(record)
    assert lines[0]["configuration"]["model"] == "synthetic weights (tiny,eps=0.05)"
    assert lines[0]["configuration"]["runner"] == "eager"
    ours = [line for line in lines if line["kind"] == "sample" and line["engine"].startswith("selfspec:a")]
    assert {line["stats"]["runner"] for line in ours} == {"eager"}
    assert "Synthetic weights (tiny,eps=0.05) on" in CliRunner().invoke(app, ["report", str(record)]).output


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
    learning = [name for name in names if name not in ("ar", "ls:1-2", "svip:1", "del", "del:length=tpl")]
    assert kept_policies(["all", "auto"], names, parse) == learning
    with pytest.raises(ValueError, match="learns nothing that it could keep"):
        kept_policies(["del"], names, parse)


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
    costs = [line for line in read_part(record) if line["kind"] == "costs"]
    if costs:  # whoever measured again would fail, and might decide otherwise
        monkeypatch.delattr(bench.run, "measured_cost")
    result = run(checkpoint, *arguments, "--resume")
    assert result.exit_code == 0, result.output
    lines = read_record(record)
    assert counts(lines) == counts(whole)
    assert not costs or costs == [line for line in lines if line["kind"] == "costs"]
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
