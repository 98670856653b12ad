"""`online-exits`: a stream of a tiny model's answers, with adapters that stay and adapters that learn."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from batched_runs import shared_model
from bench.experiments.__main__ import app
from bench.experiments.exit_adapters.chat_prompts import write_chats
from bench.experiments.online_exits.answer_rows import AnswerFiles
from bench.experiments.online_exits.domain_questions import domain_questions
from bench.experiments.online_exits.online_exit_tables import online_headline, online_tables
from bench.experiments.online_exits.stream import OnlineStream, with_exits_only
from bench.provenance import provenance
from bench.record import matching, read_record
from layerskip_models import load_model
from layerskip_models.exits.adapter import ExitAdapters
from layerskip_models.exits.folder import config_for, save_adapters
from layerskip_models.exits.lean import lean_adapters
from selfspec import SelfSpecGenerator
from selfspec.analysis.replay import trace_agreement
from selfspec.engine.online_exits import OnlineExits
from selfspec.exits.learning import ExitLearner, LearnSettings
from tests.fuzz.random_adapters import random_adapters

PROMPTS = [[5, 1, 7], [2], [9, 9, 3, 0, 23], [4, 4], [8, 1]]


def writer(adapters: ExitAdapters) -> SelfSpecGenerator:
    model = shared_model("native")
    return SelfSpecGenerator(model.with_adapters(lean_adapters(adapters, model)))


def test_kept_rows_agree_where_the_engine_says(tmp_path: Path) -> None:
    """Agreement and rounds by the files, against shadow tokens and runs of the engine."""
    model = shared_model("native")
    static = random_adapters(model, [1, 2], seed=3)
    files = AnswerFiles(writer(static), PROMPTS, tmp_path, block=2, max_new_tokens=20)
    assert len(files) == 3
    answers = [one for block in files for one in block]
    assert [one.prompt.tolist() for one in answers] == PROMPTS
    learner: Any = _learner(tmp_path, static)
    stream = OnlineStream(model=model, static=static, learner=learner)
    line = stream.block(answers)
    assert (line["answers"], line["tokens"]) == (5, 100)
    for layer in (1, 2):
        static_line, learning_line = (one for one in line["exits"] if one["exit_layer"] == layer)
        assert {**static_line, "arm": ""} == {**learning_line, "arm": ""}  # nothing is learned yet
        expected = [trace_agreement(writer(static), torch.tensor(prompt), 20).agrees[layer] for prompt in PROMPTS]
        assert static_line["agreeing"] == sum(sum(one) for one in expected)
        assert static_line["rows"] == 5 * 19
        rounds = 0
        for prompt in PROMPTS:
            result = writer(static).generate(prompt, max_new_tokens=20, policy=f"ls:{layer}-2", eos_token_id=[])
            rounds += result.stats.rounds
        drafted = static_line["loaded_layers"]["2"] - rounds * model.num_layers
        assert static_line["new_tokens"]["2"] == 5 * 19
        assert drafted % layer == 0 and 0 < drafted <= 2 * rounds * layer
    assert line["learned"]["rows"] + line["learned"]["held_out"] == 5 * 19


def _learner(folder: Path, static: ExitAdapters) -> ExitLearner:
    model = shared_model("native")
    current = copy.deepcopy(static)
    adapters = lean_adapters(current, model)
    online = OnlineExits(model.with_adapters(adapters), adapters, num_bytes=1 << 20, rows_per_text=100)
    settings = LearnSettings(batch_rows=32, judge_every=2, least_held_out=16, learning_rate=1e-2)
    return ExitLearner(model, online, start=static, current=current, folder=folder, settings=settings)


def test_no_answer_is_written_twice_and_others_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    static = random_adapters(shared_model("native"), [1, 2])
    first = [
        one for block in AnswerFiles(writer(static), PROMPTS, tmp_path, block=2, max_new_tokens=8) for one in block
    ]
    again = writer(static)
    monkeypatch.setattr(again, "generate_batch", None)
    second = [one for block in AnswerFiles(again, PROMPTS, tmp_path, block=2, max_new_tokens=8) for one in block]
    for one, other in zip(first, second):
        assert torch.equal(one.states, other.states) and torch.equal(one.labels, other.labels)
    for changed in ({"max_new_tokens": 9}, {"block": 3}):
        options = {"block": 2, "max_new_tokens": 8, **changed}
        with pytest.raises(ValueError, match="holds answers to other prompts: choose another folder for --work"):
            list(AnswerFiles(writer(static), PROMPTS, tmp_path, **options))
    with pytest.raises(ValueError, match="other prompts"):
        list(AnswerFiles(writer(static), PROMPTS[::-1], tmp_path, block=2, max_new_tokens=8))


def test_the_command_and_its_report(checkpoint: Path, tmp_path: Path, with_studies: None) -> None:
    model = load_model(checkpoint)
    (tmp_path / "exits").mkdir()
    save_adapters(ExitAdapters(config_for(model, exit_layers=(1, 2), rank=5)), tmp_path / "exits")
    write_chats([f"a b {'c' * number} d" for number in range(6)], tmp_path / "chats.jsonl")
    template = {"chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}"}
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    copied = tmp_path / "model"
    copied.mkdir()
    for file in checkpoint.iterdir():
        if file.is_file():
            (copied / file.name).write_bytes(file.read_bytes())
    (copied / "tokenizer_config.json").write_text(json.dumps({**config, **template}))
    command = [
        "online-exits", str(copied), "--chats", str(tmp_path / "chats.jsonl"), "--exits", str(tmp_path / "exits"), "--work",
        str(tmp_path / "work"), "--exit-layer", "2", "--num-answers", "5", "--max-new-tokens", "12", "--block", "2", "-o",
        str(tmp_path / "record.jsonl"),
    ]  # fmt: skip
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    lines = read_record(tmp_path / "record.jsonl")
    assert [block["first"] for block in matching(lines, "block")] == [0, 2, 4]
    assert "5 answers" in online_headline(lines)
    along, done = online_tables(lines)
    assert [row[0] for row in along.rows] == ["2"] * 3
    assert len(done.rows) == 3
    result = CliRunner().invoke(app, [*command[:-4], "--exit-layer", "3", "-o", str(tmp_path / "other.jsonl")])
    assert "there is no adapter for exit 3: choose from 1, 2" in result.stderr


def block(first: int, agreeing: Sequence[int]) -> dict[str, Any]:
    """Ten rows in five rounds of one draft at exit 2 of 4 layers: 10 tokens and 5 * (2 + 4) layers, or fewer rounds."""
    exits = [
        {
            "exit_layer": 2, "arm": arm, "rows": 10, "agreeing": count, "new_tokens": {"1": 10},
            "loaded_layers": {"1": (10 - count) * 6},
        }
        for arm, count in zip(("static", "learning"), agreeing)
    ]  # fmt: skip
    names = ("rows", "held_out", "steps", "judged", "replaced", "returned")
    return {
        "kind": "block",
        "first": first,
        "answers": 3,
        "tokens": 33,
        "exits": exits,
        "learned": dict.fromkeys(names, 1),
    }


def test_tables_by_hand() -> None:
    """4 of 10: 6 rounds of 6 layers, 10 / 36 tokens a layer, 4 times that over plain: 1.111. 5 of 10: 40 / 30 = 1.333."""
    run = {
        "kind": "run",
        "command": "online-exits",
        "configuration": {"model": "m", "exit_layers": [2], "num_layers": 4},
        "provenance": provenance(torch.device("cpu"), torch.float32),
    }
    lines: list[dict[str, Any]] = [run, *(block(3 * place, (4, 5)) for place in range(10))]
    along, _ = online_tables(lines)
    assert len(along.rows) == 5
    assert along.rows[-1] == ("2", "25 to 30", "0.400", "0.500", "1.111", "1.333", "1.200")
    assert "1.20 times as many" in online_headline(lines)


def test_some_exits_of_adapters() -> None:
    adapters = random_adapters(shared_model("plain"), [1, 2, 3])
    some = with_exits_only(adapters, [3, 1])
    assert some.exit_layers == (1, 3)
    hidden = torch.randn(3, some.config.hidden_size)
    assert torch.equal(some.at(3)(hidden), adapters.at(3)(hidden))
    with pytest.raises(ValueError, match="there is no adapter for exit 4: choose from 1, 2, 3"):
        with_exits_only(adapters, [4])
    assert some.config == replace(adapters.config, exit_layers=(1, 3))


def test_questions_of_one_kind(tmp_path: Path) -> None:
    documents = [f"Question: What is {number}?\nAnswer: {number}\n<|endoftext|>" for number in range(30)]
    path = tmp_path / "questions.txt.gz"
    with gzip.open(path, "wt", encoding="utf-8") as stream:
        stream.write("\n".join(documents) + "\n")
    write_chats(["What is 3?", "What is 7?"], tmp_path / "known.jsonl")
    found = domain_questions(path, 100, but=tmp_path / "known.jsonl")
    assert sorted(found) == sorted(f"What is {number}?" for number in range(30) if number not in (3, 7))
    assert found == domain_questions(path, 100, but=tmp_path / "known.jsonl") != sorted(found)
    assert len(domain_questions(path, 5)) == 5
