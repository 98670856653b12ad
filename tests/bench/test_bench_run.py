"""Prompts, records, and `selfspec-bench run`: whole, sampled, broken off anywhere and gone on with."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.commands.run_command import choose_prompts, warmed_up_policies
from bench.datasets import Prompt, chat_prompts, digest, encode_prompts, load_prompts, select_prompts
from bench.record import Line, Record, matching, read_record
from policies import LayerCost, Policy, parse_policy
from selfspec import SelfSpecGenerator
from tiny_llama import tiny_tokenizer

SMALL = ["--prompt-tokens", "10", "--max-new-tokens", "8", "--repeats", "2", "--warmups", "0"]
Invoke = Callable[..., Any]


@pytest.fixture(scope="module")
def run(invoke: Invoke, checkpoint: Path) -> Invoke:
    """Run `selfspec-bench run`, on a tiny checkpoint unless the arguments name another model."""
    return partial(invoke, "run", "--model", checkpoint, *SMALL)


def test_the_record_and_its_page(run: Invoke, invoke: Invoke, tmp_path: Path) -> None:
    record = tmp_path / "run.jsonl"
    policies = ["--policy", "auto:cost=layers", "--warmed-up", "auto:cost=layers", "--policy", "spide:1"]
    tasks = ["--task", "code", "--task", "english"]
    run(*policies, *tasks, "--num-samples", 3, "--output", record)
    lines = read_record(record)
    engines = [line["engine"] for line in matching(lines, "engine")]
    warmed_up = "selfspec:auto:cost=layers:warmed-up"
    assert engines == ["selfspec:ar", "selfspec:auto:cost=layers", "selfspec:spide:1", warmed_up]
    samples = matching(lines, "sample")
    assert len(samples) == len(engines) * 6 * 2 and {line["task"] for line in samples} == {"code", "english"}
    outputs = matching(lines, "output")
    assert all(line["first_difference"] is None and line["reference"] == "selfspec:ar" for line in outputs)
    page = invoke("report", record).output
    plain = [line for line in page.splitlines() if line.startswith("| selfspec, plain |")][3]
    assert plain.count("(1.00×)") == 3  # two tasks and all
    warmed_up_rows = "rows marked warmed up keep what they learned between prompts"
    for title in ("of bandwidth", "auto:cost=layers, warmed up |", warmed_up_rows, "95 % intervals over 6 prompts"):
        assert title in page
    assert str(tmp_path) not in json.dumps(lines)


def test_ones_own_policy_on_a_busy_machine(
    run: Invoke, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record names no folder, and does not go on with another version of the policy's file."""
    monkeypatch.setattr("psutil.getloadavg", lambda: (999.0, 0.0, 0.0))
    file, record = tmp_path / "mine.py", tmp_path / "run.jsonl"
    file.write_text("from policies import NeverStop\nclass Mine(NeverStop): pass", encoding="utf-8")
    arguments = ["--policy", f"ls:2-3+{file}:Mine", "--task", "code", "--num-samples", 1, "--output", record]
    result = run(*arguments)
    assert result.stderr.count("Busy machine (load average 999.0 on ") == 2
    lines, page = read_record(record), invoke("report", record).output
    assert [line["engine"] for line in matching(lines, "engine")] == ["selfspec:ar", "selfspec:ls:2-3+mine.py:Mine"]
    assert str(tmp_path) not in json.dumps(lines)
    assert "load average 999.0 and 999.0 on " in page and "load average before 999.0, after 999.0 |" in page
    file.write_text("from policies import NeverStop\nclass Mine(NeverStop): ...", encoding="utf-8")
    assert "holds a run with another policy_files: remove it" in run(*arguments, status=2).stderr


def test_a_sampled_run(run: Invoke, invoke: Invoke, tmp_path: Path) -> None:
    """A seed for each repeat, the same for all engines and again the next time; outputs are not compared."""
    arguments = ["--task", "code", "--policy", "ls:2-3", "--do-sample", "--temperature", 0.8, "--top-p", 0.9]
    records = [tmp_path / f"{name}.jsonl" for name in ("a", "b")]
    for record, seed in zip(records, (5, 6)):
        run(*arguments, "--seed", seed, "--output", record)
    lines, other = map(read_record, records)
    sampling = [lines[0]["configuration"][name] for name in ("do_sample", "temperature", "top_p", "top_k", "seed")]
    assert sampling == [True, 0.8, 0.9, 0, 5]

    def drawn(lines: list[Line], repeat: int) -> dict[tuple[str, str], tuple[int, ...]]:
        samples = matching(lines, "sample", repeat=repeat)
        return {(line["engine"], line["prompt"]): tuple(line["token_ids"]) for line in samples}

    first, second = drawn(lines, 0), drawn(lines, 1)
    assert drawn(other, 0) == second  # the second repeat has the next seed
    assert all(first[key] != second[key] for key in first)
    outputs = matching(lines, "output")
    assert all(line["first_difference"] is line["reference"] is line["repeats_that_differ"] is None for line in outputs)
    page = invoke("report", records[0]).output
    for text in ("sampled at temperature 0.8, top-p 0.9, ", "sampled outputs are not compared", "Medians of 2 seeds"):
        assert text in page
    assert "equal" not in page


def test_first_texts_of_fresh_processes(run: Invoke, invoke: Invoke, tmp_path: Path) -> None:
    record = tmp_path / "cold.jsonl"
    run("--cold", "--repeats", 1, "--num-samples", 1, "--task", "code", "--task", "english", "-o", record)
    lines = matching(read_record(record), "cold")
    assert [(line["policy"], line["cache"]) for line in lines] == [
        ("ar", "empty"), ("auto", "empty"), ("ar", "filled"), ("auto", "filled"),
    ]  # fmt: skip
    for line in lines:
        assert line["tokens"] == lines[0]["tokens"] and list(map(len, line["tokens"])) == [8, 8]
        assert len(line["seconds"]) == len(line["processor_seconds"]) == 2 and min(line["seconds"]) > 0
    page = invoke("report", record).output
    row = next(line for line in page.splitlines() if line.startswith("| `auto`, kept costs found |"))
    assert row.count("×)") == 2
    mistaken = run("--cold", "--policy", "ls:99-1", "--task", "code", status=2)
    assert "exit_layer" in mistaken.stderr.splitlines()[-1]
    run("--cold", "--warmed-up", "auto", status=2)


def test_every_policy_that_learns_can_be_warmed_up() -> None:
    def parse(name: str) -> Policy:
        return parse_policy(name, num_layers=4, measure=lambda: LayerCost(4))

    learning = ["auto", "del+spide:tau=0.6", "dv:1", "spide:1"]
    names = ["ar", "ls:1-2", "del", *learning, "svip:1", "fs:1-4", "del:length=tpl"]
    assert warmed_up_policies(["all", "auto"], names, parse) == learning


def counts(lines: list[Line]) -> list[Any]:
    """All of a record that does not depend on the clock."""
    found: list[Any] = []
    for line in lines:
        if line["kind"] == "sample":
            clock = [name for name in line["stats"] if "second" in name or name == "time_to_first_token"]
            stats = {name: value for name, value in line["stats"].items() if name not in clock}
            found.append((line["engine"], line["prompt"], line["repeat"], line["token_ids"], stats))
        elif line["kind"] == "output":
            found.append(line)
    return found


POLICIES = ["--policy", "auto:cost=layers", "--policy", "del", "--warmed-up", "auto:cost=layers"]
TWO_PROMPTS = ["--task", "code", "--task", "english", "--num-samples", 1]


@pytest.fixture(scope="module")
def whole(run: Invoke, tmp_path_factory: pytest.TempPathFactory) -> list[Line]:
    """The run that was not killed."""
    record = tmp_path_factory.mktemp("whole") / "run.jsonl"
    run(*POLICIES, *TWO_PROMPTS, "--output", record)
    return read_record(record)


@pytest.mark.parametrize(("kind", "number"), [("limits", 1), ("sample", 1), ("sample", 15), ("output", 6)])
def test_killed_anywhere_and_given_again_it_is_the_same(
    kind: str, number: int, run: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: list[Line]
) -> None:
    record = tmp_path / "run.jsonl"
    arguments = [*POLICIES, *TWO_PROMPTS, "--output", record]
    original, left = Record.write, [number]

    def write(self: Record, line_kind: str, **fields: Any) -> Line:
        left[0] -= line_kind == kind
        if left[0] == 0:
            raise KeyboardInterrupt
        return original(self, line_kind, **fields)

    with monkeypatch.context() as patch:
        patch.setattr(Record, "write", write)
        interrupted = run(*arguments, status=130)
    assert interrupted.stderr.endswith(f"what was measured is in {record}; the same command goes on with it\n")
    kept = [json.loads(line) for line in record.read_text().splitlines()]
    before = json.dumps(kept[0] | {"provenance": kept[0]["provenance"] | {"commit": "another"}})
    other = tmp_path / "other.jsonl"
    other.write_text(before + "\n")
    refused = run(*POLICIES, *TWO_PROMPTS, "--output", other, "--repeats", 3, status=2)
    assert "holds a run with another repeats, commit: remove" in refused.stderr
    with record.open("a") as stream:
        stream.write('{"kind": "sam')  # what was being written when the power failed
    runs: list[object] = []
    generate = SelfSpecGenerator.generate

    def counted(self: SelfSpecGenerator, *args: Any, **options: Any) -> Any:
        runs.append(options.get("policy"))
        return generate(self, *args, **options)

    monkeypatch.setattr(SelfSpecGenerator, "generate", counted)
    run(*arguments)
    assert counts(read_record(record)) == counts(whole)
    done = matching(kept, "sample", engine="selfspec:del")
    assert runs.count("del") == 2 * 2 - len(done)  # the repeats that were left
    runs.clear()
    run(*arguments)
    assert not runs  # it was complete


def test_without_a_record_nothing_is_kept(run: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bench.measure.Measurement.run", interrupt)
    result = run("--policy", "ls:1-2", "--num-samples", 1, status=130)
    assert "nothing was kept, since there was no --output" in result.stderr.splitlines()[-1]


def write_lines(path, *rows):
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def test_shipped_prompts_that_copy_are_used_where_they_are_named():
    copying = load_prompts(Path("copying"))
    assert len(copying) >= 16
    assert {prompt.task for prompt in copying} == {"copying"}
    assert not {prompt.id for prompt in copying} & {prompt.id for prompt in load_prompts()}
    assert choose_prompts([], ["copying", "math"], 2)[:2] == copying[:2] == choose_prompts([Path("copying")], [], 2)
    assert load_prompts(Path("math")) == [prompt for prompt in load_prompts() if prompt.task == "math"]


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.jsonl.gz", "math"])
def test_a_file_is_read_in_order_and_goes_before_a_shipped_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    rows = [{"id": "b", "task": "x", "prompt": "für\n"}, {"id": "a", "task": "x", "prompt": "two"}]
    write_lines(tmp_path / name, rows[0] | {"source": "s"}, rows[1] | {"reference": "ignored"})
    assert load_prompts(Path(name)) == [Prompt(**row) for row in rows]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": "b", "task": "x", "prompt": ""}, 'line 2: "prompt" must be'),
        ({"id": 3, "task": "x", "prompt": "p"}, 'line 2: "id" must be'),
        (["b", "x", "p"], "line 2: expected an object"),
        ({"id": "a", "task": "x", "prompt": "p"}, "ids must differ"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, row, message):
    path = write_lines(tmp_path / "p.jsonl", {"id": "a", "task": "x", "prompt": "p"}, row)
    with pytest.raises(ValueError, match=message):
        load_prompts(path)


def test_a_few_prompts_cover_all_tasks():
    prompts = [Prompt(id=name, task=name[0], prompt=name) for name in ("a1", "a2", "a3", "b1", "c1", "c2")]
    assert [prompt.id for prompt in select_prompts(prompts, 5)] == ["a1", "b1", "c1", "a2", "c2"]
    assert len(select_prompts(prompts, 99)) == 6


def test_long_prompts_keep_their_end_and_the_digest_sees_every_token():
    tokenizer = tiny_tokenizer()
    prompts = [Prompt(id="1", task="t", prompt="abcdefgh"), Prompt(id="2", task="t", prompt="cd")]
    encoded = encode_prompts(prompts, tokenizer, 4)
    assert [tokenizer.decode(prompt.ids) for prompt in encoded] == ["efgh", "cd"]
    assert digest(encoded) == digest(encode_prompts(prompts, tokenizer, 4))
    assert digest(encoded) != digest(encode_prompts(prompts, tokenizer, 3))


def test_messages_in_a_chat_template() -> None:
    tokenizer = tiny_tokenizer()
    prompts = [Prompt(id=text, task="t", prompt=text) for text in ("ab", "abcdefgh", "cd")]
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}h"
    found = chat_prompts(prompts, tokenizer, 4, 9)
    assert [(prompt.id, tokenizer.decode(prompt.ids)) for prompt in found] == [("ab", "abh"), ("cd", "cdh")]
    with pytest.raises(ValueError, match="no prompt has at most 2 tokens"):
        chat_prompts(prompts, tokenizer, 2, 9)
