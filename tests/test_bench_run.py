"""`selfspec-bench run`: the whole record, resumed and shared out exactly; memory and bandwidth."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from tiny_llama import tiny_llama, tiny_tokenizer
from typer.testing import CliRunner

import bench.commands.preparation
import bench.run
import layerskip_models.checkpoints.synthetic
from bench.commands.bench_app import app
from bench.commands.run_command import baseline_policies, kept_policies
from bench.machine.bandwidth import WeightBytes, measure_bandwidth
from bench.machine.memory import peak_bytes
from bench.record import BEST_FIXED, Line, RecordWriter, read_parts, read_record
from layerskip_models import from_transformers
from policies import LayerCost, MeasuredCost, Policy, kept_between_texts, parse_policy
from selfspec import SelfSpecGenerator

SMALL = ["--prompt-tokens", "10", "--max-new-tokens", "8", "--repeats", "2", "--warmups", "0", "--no-peers"]
POLICIES = ["--policy", "auto", "--policy", "del"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-checkpoint")
    tiny_llama(seed=3).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def run(checkpoint: Path, *arguments: object) -> Result:
    return CliRunner().invoke(app, ["run", "--model", str(checkpoint), *SMALL, *map(str, arguments)])


def counts(lines: list[Line]) -> list[Any]:
    """All of a record that does not depend on the clock. Costs are the clock's: cells keep tokens and layers."""
    found: list[Any] = []
    for line in lines:
        if line["kind"] == "sample":
            clock = [name for name in line["stats"] if "second" in name or name == "time_to_first_token"]
            stats = {name: value for name, value in line["stats"].items() if name not in clock}
            found.append((line["engine"], line["prompt"], line["repeat"], line["output"], stats))
        elif line["kind"] == "output":
            found.append((line["engine"], *(line[name] for name in ("prompt", "output", "first_difference"))))
        elif line["kind"] == "grid":
            cells = {name: cell[:2] for name, cell in line["cells"].items()}
            found.append((line["prompt"], cells, line["agreement"]))
        elif line["kind"] not in ("run", "costs", "limits", "fixed", "memory"):
            found.append(line)
    return found


def test_the_record_and_its_page(checkpoint: Path, tmp_path: Path) -> None:
    record = tmp_path / "run.jsonl"
    policies = ["--policy", "auto:cost=layers", "--kept", "auto:cost=layers", "--baseline", 1]
    result = run(checkpoint, "--peers", *policies, "--num-samples", 2, "--output", record)
    assert result.exit_code == 0, result.output
    lines = read_record(record)
    engines = list(lines[0]["engines"])
    assert engines[:2] == ["selfspec:ar", "selfspec:auto:cost=layers"]
    kept = "selfspec:auto:cost=layers:kept"
    assert {"selfspec:spide:1,tau=0.7", kept, "transformers:generate", BEST_FIXED} <= set(engines)
    samples = [line for line in lines if line["kind"] == "sample"]
    assert len(samples) == len(engines) * 8 * 2
    assert len({line["task"] for line in samples}) == 4
    fixed = next(line for line in lines if line["kind"] == "fixed")["by_task"]
    for line in samples:
        if line["engine"] == BEST_FIXED:
            assert line["stats"]["policy"] == fixed[line["task"]]
    outputs = [line for line in lines if line["kind"] == "output"]
    assert all(line["first_difference"] is None and line["reference"] == "selfspec:ar" for line in outputs)
    memory = {line["engine"]: line["peak_bytes"] for line in lines if line["kind"] == "memory"}
    assert set(memory) == set(engines) - {BEST_FIXED}
    assert all(size > 0 for size in memory.values()), json.dumps(memory)
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
        "memory, MiB",
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
        result = run(checkpoint, "--peers", *arguments, "--seed", seed, "--no-memory", "--output", record)
        assert result.exit_code == 0, result.output
    lines, again, other = map(read_record, records)
    configuration = lines[0]["configuration"]
    assert [configuration[name] for name in ("do_sample", "temperature", "top_p", "top_k", "seed")] == [
        True, 0.8, 0.9, 0, 5,
    ]  # fmt: skip
    assert BEST_FIXED not in lines[0]["engines"]

    def drawn(lines: list[Line], repeat: int) -> dict[tuple[str, str], str]:
        samples = [line for line in lines if line["kind"] == "sample" and line["repeat"] == repeat]
        return {(line["engine"], line["prompt"]): line["output"] for line in samples}

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
    ("kind", "number"), [("costs", 1), ("grid", 3), ("sample", 1), ("sample", 19), ("done", 2), ("memory", 2)]
)
def test_killed_anywhere_and_resumed_it_is_the_same(
    kind: str, number: int, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: list[Line]
) -> None:
    record = tmp_path / "run.jsonl"
    arguments = [*POLICIES, "--num-samples", 1, "--output", record]
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
    result = run(checkpoint, *arguments, "--resume")
    assert result.exit_code == 0, result.output
    lines = read_record(record)
    assert counts(lines) == counts(whole)
    assert runs.count("del") == 2 * (4 - done) + 1  # the repeats of what was left, and its memory
    assert not list(tmp_path.glob("*.part*"))


@pytest.fixture
def whole(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Line]:
    """The run that was not killed."""
    record = tmp_path_factory.mktemp("whole") / "run.jsonl"
    assert run(checkpoint, *POLICIES, "--num-samples", 1, "--output", record).exit_code == 0
    return read_record(record)


@pytest.fixture(autouse=True)
def _seconds_that_every_run_measures_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = MeasuredCost(num_layers=4, layer_seconds=(1e-3, 1.1e-3), head_seconds=(5e-4, 6e-4))
    monkeypatch.setattr(bench.run, "measured_cost", lambda model, runner: cost)


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
    arguments = [*POLICIES, "--num-samples", 1, "--output", record]
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
    arguments = [*POLICIES, "--num-samples", 1, "--output", record]
    with monkeypatch.context() as patch:
        kill_after(patch, "done", 4)
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


def test_another_run_cannot_be_resumed(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "run.jsonl"
    with monkeypatch.context() as patch:
        kill_after(patch, "done", 1)
        run(checkpoint, *POLICIES, "--num-samples", 1, "--output", record)
    before = read_parts(record)
    result = run(checkpoint, "--policy", "del", "--num-samples", 1, "--repeats", 3, "--output", record, "--resume")
    assert result.exit_code == 2
    assert "cannot resume: the run that broke off had another repeats" in result.stderr
    assert read_parts(record) == before  # nothing is lost


def test_two_processes_make_the_same_record(checkpoint: Path, tmp_path: Path) -> None:
    """Policies that do not reckon with measured seconds; without --multi_gpu a CPU gets one process only."""
    arguments = ["--policy", "auto:cost=layers", "--policy", "del", "--num-samples", "2", "--no-memory"]
    records = [tmp_path / f"{count}.jsonl" for count in (1, 2)]
    assert run(checkpoint, *arguments, "--device", "cpu", "--output", records[0]).exit_code == 0
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    command = [sys.executable, *launch, "-m", "bench", "run", "--device", "cpu", "--model", str(checkpoint), *SMALL]
    result = subprocess.run(
        [*command, *arguments, "--output", str(records[1])], capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Speed-up over plain decoding") == 1
    one, two = map(read_record, records)
    assert two[0]["provenance"]["processes"] == 2
    differing = {a[0] for a, b in zip(counts(one), counts(two), strict=True) if a != b}
    assert differing <= {BEST_FIXED}  # each run measured its costs
    assert not list(tmp_path.glob("*.part*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "--resume needs --output"),
        (["--resume", "--output", "x.jsonl", "--kept", "auto"], "cannot go on with --kept"),
        (["--kept", "autoo"], "unknown policy"),
        (["--kept", "ls:1-2"], "--kept ls:1-2: this policy learns nothing"),
        (["--task", "poetry"], "no prompts of task poetry; there are code, english"),
        (["--policy", "dell"], "unknown policy"),
        (["--baseline", "9"], "exit_layer must be in [1, 3]"),
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


def test_baselines_are_policies() -> None:
    names = baseline_policies([1, 3])
    assert len(set(names)) == len(names)
    for name in names:
        parse_policy(name, num_layers=4)


def test_peak_memory_counts_what_is_alive() -> None:
    megabyte = 1 << 18  # floats

    def call() -> None:
        first = torch.zeros(megabyte)
        second = first + 1
        del first
        third = second + 1
        del second, third

    assert 2 << 20 <= peak_bytes(torch.device("cpu"), call) < (2 << 20) + 10_000


def test_a_profile_that_saw_nothing_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter([0, 0, 7])
    monkeypatch.setattr("bench.machine.memory._profiled_peak", lambda call: next(peaks))
    assert peak_bytes(torch.device("cpu"), list) == 7


def test_bytes_that_rounds_move() -> None:
    model = from_transformers(tiny_llama(num_layers=3, seed=1), layout="plain")
    weights = WeightBytes.of(model)
    layer = model._layers[0]
    matrices = (layer.qkv, layer.output, layer.gate_up, layer.down)
    assert weights.layer == 4 * (sum(matrix.weight.numel() for matrix in matrices) + 2 * model.hidden_size)  # type: ignore[attr-defined]
    stats = {"num_prompt_tokens": 6, "num_new_tokens": 8, "loaded_layers": 5, "rounds": 2, "num_drafted": 3}
    assert weights.moved(stats) == 5 * (weights.layer + 10 * weights.kv) + 5 * weights.head


def test_bandwidth_is_a_speed() -> None:
    assert 1e8 < measure_bandwidth(torch.device("cpu")) < 1e13


def test_shapes_measures_synthetic_weights_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    tiny |= {"intermediate_size": 96, "vocab_size": 4096, "max_position_embeddings": 128}
    monkeypatch.setattr(layerskip_models.checkpoints.synthetic, "SHAPES", {"tiny": tiny})
    monkeypatch.setattr(bench.commands.preparation, "SHAPES", {"tiny": tiny})
    folder = tmp_path / "out"
    arguments = [
        "--shape",
        "tiny,eps=0.05",
        "--policy",
        "auto:cost=layers",
        "--output-dir",
        str(folder),
        "--repeats",
        "1",
    ]
    result = CliRunner().invoke(app, ["shapes", *arguments, "--prompt-tokens", "8", "--max-new-tokens", "8"])
    assert result.exit_code == 0, result.output
    lines = read_record(folder / "tiny.jsonl")
    assert lines[0]["configuration"]["model"] == "synthetic weights (tiny,eps=0.05)"
    assert {"selfspec:ar", "selfspec:auto:cost=layers", "transformers:generate"} <= set(lines[0]["engines"])
    page = (folder / "tiny.html").read_text(encoding="utf-8")
    assert "Synthetic weights (tiny,eps=0.05) on" in page
    unknown = CliRunner().invoke(app, ["shapes", "--shape", "huge", "--output-dir", str(folder)])
    assert unknown.exit_code == 2
    assert "unknown shape 'huge'" in unknown.stderr


def test_shapes_with_the_captured_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script of the GPU, on the stand-in: captures are made before anything is timed."""
    tiny = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
    tiny |= {"intermediate_size": 48, "vocab_size": 4096, "max_position_embeddings": 64}
    monkeypatch.setattr(layerskip_models.checkpoints.synthetic, "SHAPES", {"tiny": tiny})
    monkeypatch.setattr(bench.commands.preparation, "SHAPES", {"tiny": tiny})
    arguments = ["--shape", "tiny", "--policy", "auto:cost=layers", "--output-dir", str(tmp_path), "--repeats", "1"]
    arguments += ["--runner", "captured", "--prompt-tokens", "8", "--max-new-tokens", "8", "--warmups", "0"]
    result = CliRunner().invoke(app, ["shapes", *arguments])
    assert result.exit_code == 0, result.output
    lines = read_record(tmp_path / "tiny.jsonl")
    assert lines[0]["configuration"]["runner"] == "captured"
    ours = [line for line in lines if line["kind"] == "sample" and line["engine"].startswith("selfspec:a")]
    assert {line["stats"]["runner"] for line in ours} == {"captured"}
    assert {line["stats"]["num_captures"] for line in ours} == {0}
