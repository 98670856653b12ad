"""The papers: presets, whole prompts in the data sets' layout, verdicts by hand, and runs that break off and go on."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bench_report import WHERE, write

from bench.papers.calibration import best_setting, etpl
from bench.papers.preset import PAPERS, arms_in, arms_of, load_preset, policy_of
from bench.papers.prompts import paper_prompts
from bench.papers.verdicts import METRICS, decide, finding, loops, rouge_2
from bench.record import Line, Record, matching, read_record
from bench.report.page import tables, update
from policies import fixed, parse_policy
from records import finished
from selfspec.analysis.replay import AgreementTrace
from tiny_llama import tiny_llama, tiny_tokenizer
from tiny_training import write_checkpoint

FOUND = {
    "ls": "2-3", "fs": "1-2", "layer": "2", "published": "7-6", "published_layer": "7", "judged": "1",
    "assist": f"{fixed.__file__}:AssistLength",
}  # fmt: skip
VERDICTS = ("not testable here", "not measured", "not shown")


@pytest.mark.parametrize("paper", PAPERS)
def test_presets_are_valid(paper: str) -> None:
    preset = load_preset(paper)
    found = FOUND | {f"ls_{task}": "1-2" for task in preset["tasks"]}
    for arm in preset["arms"]:
        for task in preset["tasks"]:
            policy = policy_of(preset, arm, task, found)
            assert (policy is None) == ("preverifier" in str(preset["arms"][arm]))
            if policy is not None:
                parse_policy(policy, num_layers=32)
    assert {*preset["quick"], *preset["trained"]} <= {*preset["arms"]}
    temperatures = {float(name) for name in preset["sampling"]}
    for claim in preset["claims"]:
        assert {"table", "claim", "theirs"} <= {*claim} and len(claim["claim"]) < 75
        if "of" in claim:
            assert {*arms_in(claim)} <= {*preset["arms"], *preset.get("simulated", [])} and claim["metric"] in METRICS
            assert {*claim.get("tasks", [])} <= {*preset["tasks"]} and claim.get("temperature", 0) in temperatures
            assert decide(claim, 0.0, 2.0) == "not shown"
        if "of" not in claim or "verdict" in claim:
            assert claim["verdict"] in VERDICTS and claim["why"]
    assert arms_of(preset, 0, next(iter(preset["tasks"])), quick=True)[0] == "ar"


ROWS: dict[str, dict[str, Any]] = {
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "  pass", "test": ""},
    "mbpp": {"task_id": 11, "text": "Add.", "code": "a + b", "test_list": ["assert 1", "assert 2"]},
    "mbpp.prompt": {"task_id": 2, "text": "SHOT", "code": "c", "test_list": ["assert 3"]},
    "gsm8k": {"question": "How many?", "answer": "2 #### 2"},
    "gsm8k.train": {"question": "SHOT", "answer": "1 #### 1"},
    "aqua_rat": {"question": "Which?", "options": ["A)1", "B)2"], "rationale": "So.", "correct": "B"},
    "aqua_rat.train": {"question": "SHOT", "options": ["A)1", "B)2"], "rationale": "So.", "correct": "A"},
    "cnn_dm": {"article": "word " * 300, "highlights": "One.\nTwo.", "id": "x"},
    "cnn_dm.train": {"article": "SHOT", "highlights": "One.\nTwo.", "id": "y"},
    "cnn_dm_lm": {"article": "word " * 300, "highlights": "One.\nTwo.", "id": "x"},
    "xsum": {"document": "Long.", "summary": "Short.", "id": "z"},
    "wmt14": {"translation": {"de": "Hallo.", "en": "Hello."}},
    "mt_bench": {"category": "writing", "prompt": ["Write.", "Again."], "prompt_id": 1},
    **{f"mgsm.{code}": {"question": f"Frage {code}?", "answer": None} for code in ("de", "th")},
}
"""A row of each data set, with the fields of the hub's."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eleven rows of each."""
    path = tmp_path_factory.mktemp("hub")
    for name, row in ROWS.items():
        (path / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 11, encoding="utf-8")
    return path


def test_prompts_are_whole_in_the_layout_of_the_data_sets(folder: Path) -> None:
    preset = load_preset("del")
    found = paper_prompts(preset["tasks"], str(folder), None)
    assert {task: len(own) for task, own in found.items()} == {
        task: 20 if task == "mgsm" else 11 for task in preset["tasks"]
    }
    first = {task: own[0].turns for task, own in found.items()}
    shots = {task: turns[0].count("SHOT") for task, turns in first.items() if "SHOT" in turns[0]}
    assert shots == {"mbpp": 3, "gsm8k": 5, "aqua_rat": 5, "cnn_dm": 1}
    assert first["cnn_dm_lm"] == (("word " * 100).strip(),)
    assert "Summary: One. Two.\n" in first["cnn_dm"][0] and first["cnn_dm"][0].count("word") == 300
    assert first["mt_bench"] == ("Write.", "Again.") and first["wmt14"][0].endswith("German: Hallo.\nEnglish:")
    assert first["aqua_rat"][0].endswith("Question: Which?\nAnswer Choices: A)1 B)2\nAnswer:")
    assert first["mbpp"][0].endswith("assert 1\nassert 2\n[BEGIN]\n") and found["humaneval"][0].reference == "  pass"
    assert [one.id for one in found["mgsm"][:3]] == ["mgsm/de/0", "mgsm/th/0", "mgsm/de/1"]
    few = paper_prompts(preset["tasks"], str(folder), 3)
    assert {len(own) for own in few.values()} == {3}


def test_missing_examples_and_ready_prompts(tmp_path: Path) -> None:
    tasks = {name: load_preset("del")["tasks"][name] for name in ("gsm8k", "cnn_dm_lm")}
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps(ROWS["gsm8k"]) + "\n")
    with pytest.raises(ValueError, match="gsm8k needs 5 examples; its split train has 0 rows"):
        paper_prompts(tasks, str(tmp_path), None)
    ready = {"id": "a", "task": "summarization", "prompt": f"Article: {'word ' * 300}\nSummary:", "reference": "Short."}
    (tmp_path / "gsm8k.jsonl").write_text("")
    (tmp_path / "summarization.jsonl").write_text(json.dumps(ready) + "\n")
    found = paper_prompts(tasks, str(tmp_path), None)
    assert found["gsm8k"] == [] and found["cnn_dm_lm"][0].turns == (("word " * 100).strip(),)


def test_assist_and_the_search_by_hand() -> None:
    policy = fixed.AssistLength()
    policy.observe(finished(5, 5))
    assert policy.length == 7
    for _ in range(9):
        policy.observe(finished(2, 1))
    assert policy.length == 1
    # Layer 1 of 4 agrees everywhere. ls:1-3 on 9 tokens: 2 rounds of 3 drafts, 14 layers, and 4 of the prompt: 9 / 18.
    trace = AgreementTrace(tokens=(0,) * 9, agrees={1: (1.0,) * 8, 2: (0.0,) * 8, 3: (0.0,) * 8}, num_layers=4)
    assert etpl(trace, 1, 3) == 9 / 18
    assert etpl(trace, 1, 3, adapts=True) == 9 / 18  # the second round has room for 3 drafts only
    assert best_setting([trace]) == "1-8"  # one round of 7 drafts


def test_loops_and_rouge_by_hand() -> None:
    assert loops([5, 6, *[1, 2, 3] * 7]) and loops([1] * 17) and loops([9, *range(12), *range(12), *range(12)])
    assert not loops([1] * 12) and not loops([*[1, 2, 3] * 9, 7]) and not loops([*range(20), *range(20)])
    # Pairs of "a b c" and "a b d": 1 of 2 and 2.
    assert rouge_2("A b, c!", "a b d") == 0.5 and rouge_2("a", "b") == 0


def record(ours: float = 12, *, count: int = 8, looping: int = 0, runs: int = 1, **changes: Any) -> list[Line]:
    """Texts of 10 tokens; "del" loads fewer layers than "ar" by `ours` a text. eTPL: 10 / (40 - ours) over 10 / 40."""
    asked = {"model": "the demo model", "paper": "del", "quick": False, "tables": [], "num_layers": 2, "prompts": []}
    asked |= {"missing": [], "too_long": {"xsum": 2}, "source": "files at hand", "max_new_tokens": 10}
    lines: list[Line] = [{"kind": "run", "command": "paper", "configuration": asked, "provenance": WHERE | changes}]
    for number in range(count + looping):
        for arm, saved in (("ar", 0), ("ls", 1), ("fs", 2), ("dv", 0), ("del", ours + number % 2)):
            for repeat in range(runs):
                line = {"kind": "sample", "engine": arm, "temperature": 0.0, "prompt": f"p{number}", "repeat": repeat}
                line |= {"task": "humaneval", "turn": 0, "tokens": 10, "layers": 40 - saved, "rounds": 5, "accepted": 4}
                line |= {"loops": number >= count, "seconds": 2.0 - saved / 20, "learn_seconds": 0.01}
                lines.append(line | {"preverify_seconds": 0.0, "verify_seconds": 1.0})
    return lines


PRESET: dict[str, Any] = {"trained": {}}
LEADS = {"of": "del", "over": ["ls", "fs", "dv"], "metric": "etpl", "expect": "more"}


@pytest.mark.parametrize(
    ("claim", "lines", "verdict"),
    [
        (LEADS, record(), "reproduced"),
        (LEADS, record(-8), "refuted here"),
        (LEADS, record(1.5), "not shown"),  # 1.5 or 2.5 over fs: as often behind as ahead
        (LEADS, record(count=5, looping=9), "not shown: 5 free texts"),
        (LEADS | {"temperature": 1}, record(), "not measured: no run of these arms"),
        (LEADS | {"metric": "memory"}, record(), "not testable here: needs a GPU"),
        (LEADS | {"metric": "seconds"}, record(), "not shown: 1 run"),
        (LEADS | {"metric": "seconds"}, [], "not shown: seconds need --repeats 3"),
        (LEADS | {"metric": "seconds"}, record(runs=3, load_average=9.0), "not shown: busy machine"),
        (LEADS | {"metric": "seconds"}, record(runs=3), "reproduced"),
        (LEADS | {"expect": "less"}, record(-8), "reproduced"),
        (LEADS | {"expect": "same", "within": 0.02}, record(), "refuted here"),
        (LEADS | {"expect": "same", "within": 0.9}, record(), "reproduced"),
        ({"of": "del", "metric": "learning", "expect": "below", "limit": 0.1}, record(runs=3), "reproduced"),
        ({"of": "del", "metric": "learning", "expect": "below", "limit": 0.001}, record(runs=3), "refuted here"),
        ({"verdict": "not measured", "why": "no such run"}, record(), "not measured: no such run"),
    ],
)  # fmt: skip
def test_each_verdict(claim: dict[str, Any], lines: list[Line], verdict: str) -> None:
    assert finding(claim, PRESET, lines).verdict == verdict
    assert decide(LEADS, 1.001, 1.004) == "not shown"


def test_the_best_baseline_counts_and_looping_texts_stand_apart() -> None:
    lines = record(looping=4)
    for line in matching(lines, "sample", engine="del", loops=True):
        line["layers"] = 1000
    found = finding(LEADS, PRESET, lines)
    # Free: mean of 10/28 and 10/27, over fs' 10/38: 1.382. Looping: 10/1000 over it: .04.
    assert found.ours.startswith("1.38 (") and found.ours.endswith(" over fs, n 8") and found.verdict == "reproduced"
    assert found.looping.startswith("0.04 (") and found.looping.endswith(" over fs, n 4")
    assert finding(LEADS, {"trained": {"del": {}}}, record()).verdict == "not shown: one seed of training"


def test_records_of_two_models_in_one_table(tmp_path: Path) -> None:
    other = record(-8)
    other[0]["configuration"]["model"] = "smollm2"
    write(tmp_path / "a.jsonl", record())
    write(tmp_path / "b.jsonl", other)
    page = update("<!-- table: a.jsonl,b.jsonl claims -->\n<!-- /table -->", tmp_path)
    row = next(line for line in page.splitlines() if line.startswith("| Table 2: DEL leads on code, greedy |"))
    assert row.endswith("| demo: reproduced; smollm2: refuted here |") and row.count(" n 8") == 2
    assert "without 2 too long of xsum" in page and "leave out the drift between runs" in page
    assert [table.name for table in tables(record())] == ["claims"]


KEY, COUNTS = ("engine", "temperature", "prompt", "turn"), ("tokens", "layers", "rounds", "accepted")
Invoke = Callable[..., Any]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Three prompts a task, one of them too long, in words of the tiny tokenizer; two turns in one task."""
    path = tmp_path / "prompts"
    path.mkdir()
    for name in ("humaneval", "gsm8k"):
        rows = [
            {"id": f"{i}", "task": name, "prompt": "ab cab fig" + " a bed" * i * 20, "reference": "a"}
            for i in (3, 0, 0)
        ]
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "mt_bench.jsonl").write_text(json.dumps({"prompt": ["a bed.", "a fig."]}) + "\n")
    return path


@pytest.fixture
def run(invoke: Invoke, checkpoint: Path, prompts: Path, tmp_path: Path) -> Invoke:
    return partial(invoke, "paper", "--model", checkpoint, "--prompts", prompts, "--max-new-tokens", 12)


def test_quick_runs_break_off_and_go_on(run: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, original = tmp_path / "spide.jsonl", Record.write

    def broken(self: Record, kind: str, **fields: Any) -> Line:
        if fields.get("engine") == "ls" and fields["prompt"] == "mt_bench/0":
            raise KeyboardInterrupt
        return original(self, kind, **fields)

    with monkeypatch.context() as patch:
        patch.setattr(Record, "write", broken)
        run("spide", "--quick", "-o", path, status=130)
    before = path.read_text().splitlines()
    result = run("spide", "--quick", "-o", path)
    lines = read_record(path)
    run("spide", "--quick", "-o", tmp_path / "whole.jsonl")
    whole = matching(read_record(tmp_path / "whole.jsonl"), "sample")
    assert [line["layers"] for line in matching(lines, "sample")] == [line["layers"] for line in whole]
    assert [json.dumps(line, ensure_ascii=False) for line in lines][: len(before)] == before
    samples = matching(lines, "sample")
    assert {line["engine"] for line in samples} >= {"ar", "ls", "svip", "dv", "spide", "SPIDE on two devices"}
    assert {(line["prompt"], line["turn"]) for line in samples} == {
        *((f"{task}/{place}", 0) for task in ("humaneval", "gsm8k/main") for place in (1, 2)),
        *(("mt_bench/0", turn) for turn in (0, 1)),
    }
    assert all("first_difference" not in line for line in samples) and str(tmp_path) not in path.read_text()
    assert "without mgsm, 1 too long of humaneval" in result.output


def test_arms_that_share_passes_count_as_those_that_run_alone(run: Invoke, tmp_path: Path) -> None:
    """Alone: those that are timed, where their claims are."""
    paths, samples = (tmp_path / "together.jsonl", tmp_path / "timed.jsonl"), []
    for path, repeats in zip(paths, (2, 3)):
        run("spide", "--table", "5", "--table", "1", "--samples", 2, "--repeats", repeats, "-o", path)
        samples.append(matching(read_record(path), "sample"))
    counted = [
        {tuple(line[name] for name in KEY): [line[name] for name in COUNTS] for line in own if line["repeat"] == 0}
        for own in samples
    ]
    assert counted[0] == counted[1] and len(samples[0]) == len(counted[0])
    assert {line["temperature"] for line in samples[0]} == {0.0, 1.0}
    untimed, timed = ([line for line in own if "seconds" in line] for own in samples)
    assert not untimed and {(line["temperature"], line["repeat"]) for line in timed} == {(0.0, 0), (0.0, 1), (0.0, 2)}
    assert {line["engine"] for line in timed} == {"ar", "spide", "ls", "svip", "dv"}
    assert len({line["engine"] for line in samples[0] if line["temperature"] == 0}) == 11  # six of them simulated


def test_adapters_are_trained_beside_the_record(run: Invoke, tmp_path: Path) -> None:
    text = write_checkpoint(tmp_path / "texts") / "text.txt"
    path = tmp_path / "sd2.jsonl"
    result = run("sd2", "--quick", "--data", text, "-o", path)
    assert {line["engine"] for line in matching(read_record(path), "sample")} == {"ar", "bare", "distilled", "steered"}
    assert {one.name for one in (tmp_path / "sd2.adapters").iterdir()} == {"distilled", "steered"}
    assert "not shown: " in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eagle"], "there is no paper 'eagle', but del, spide, pacer, sd2, dpace"),
        (["del", "--table", "9"], "del has no table '9', but 1, 3, 2"),
        (["del", "--prompts", "nowhere"], "there is no folder nowhere; one has files such as humaneval.jsonl"),
        (["pacer", "--preverifier", "nowhere"], "nowhere"),
        (["sd2"], "sd2 trains adapters: give --output, beside which they go"),
        (["del", "--prompts", "hub"], "--prompts FOLDER"),
        (["del", "--adapters", "there"], "trains nothing"),
        (["spide", "--preverifier", "there"], "has no pre-verifier"),
    ],
)  # fmt: skip
def test_mistakes_in_one_line(run: Invoke, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    error = run(*arguments, status=2).stderr
    assert message in error.splitlines()[-1]


def test_a_published_checkpoint_needs_nothing_else(
    invoke: Invoke, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder as that repository has it: shards with an index, and 16 bits."""
    path = tmp_path / "facebook" / "layerskip-llama2-7B"
    tiny_llama(num_layers=9, dtype=torch.float16).save_pretrained(path, max_shard_size="20KB")
    tiny_tokenizer().save_pretrained(path)
    assert len([*path.glob("*.safetensors")]) > 1
    monkeypatch.chdir(tmp_path)
    options = ["--prompts", prompts, "--samples", 1, "--max-new-tokens", 12, "--table", "1", "-o", "del.jsonl"]
    invoke("paper", "del", "--model", "facebook/layerskip-llama2-7B", *options)
    lines = read_record(Path("del.jsonl"))
    assert matching(lines, "settings")[0]["found"]["published"] == "7-6"
    samples = matching(lines, "sample", temperature=0.0, task="humaneval")
    assert {"ls, published", "dv, published"} <= {line["engine"] for line in samples}
