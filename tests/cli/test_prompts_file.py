"""`selfspec generate --prompts FILE --output FILE`: results as they come, resumed where a run broke off."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from layerskip_models.text_files import write_text
from selfspec import SelfSpecGenerator
from selfspec.cli.main import app
from selfspec.engine.engine import Engine
from selfspec.engine.results import StepOutput

PROMPTS: list[dict[str, Any]] = [
    {"prompt": "a bed, a fig"},
    {"prompt": "a", "id": "second", "do_sample": True, "seed": 7, "max_new_tokens": 9},
    {"prompt": "b", "stop_strings": ["a"], "policy": "ar"},
    {"prompt": "c", "max_new_tokens": 100_000},
    {"prompt": "a", "do_sample": True, "seed": 10**22},
]


def written(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def generate(folder: Path, prompts: Path, output: Path, *more: str) -> Result:
    arguments = ["generate", "--model", str(folder), "--prompts", str(prompts), "--output", str(output)]
    return CliRunner().invoke(app, [*arguments, "--policy", "ls:2-3", "--max-new-tokens", "20", "-q", *more])


def results(path: Path) -> dict[Any, dict[str, Any]]:
    """By their ids."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len({line["id"] for line in lines}) == len(lines)
    return {line["id"]: line for line in lines}


def test_every_line_is_what_generate_gives(folder: Path, tmp_path: Path) -> None:
    """With options of its own before the command's; what cannot be decoded says why, and the others are complete."""
    done = generate(folder, written(tmp_path / "p.jsonl", PROMPTS), tmp_path / "o.jsonl")
    assert done.exit_code == 1, done.output
    found = results(tmp_path / "o.jsonl")
    assert found.keys() == {1, "second", 3, 4, 5}
    assert "exceed this model's context" in found[4]["error"]
    assert "seed must be an integer in" in found[5]["error"]
    generator = SelfSpecGenerator.from_pretrained(folder)
    for line, place in zip(PROMPTS[:3], (1, "second", 3)):
        options = {"policy": "ls:2-3", "max_new_tokens": 20, **{k: v for k, v in line.items() if k != "id"}}
        alone = generator.generate(**options)
        assert (found[place]["token_ids"], found[place]["text"]) == (alone.new_tokens, alone.text)
        assert found[place]["stop_reason"] == alone.stop_reason


def test_conversations_are_answered_by_the_chat_template(folder: Path, tmp_path: Path) -> None:
    talking = tmp_path / "talking"
    template = "{% for message in messages %}{{ message['content'] }}, {% endfor %}"
    (shutil.copytree(folder, talking) / "chat_template.jinja").write_text(template, encoding="utf-8")
    messages = [{"role": "user", "content": "a bed"}, {"role": "assistant", "content": "a fig"}]
    lines: list[dict[str, Any]] = [{"messages": [*messages, {"role": "user", "content": "a"}]}, {"prompt": "a"}]
    done = generate(talking, written(tmp_path / "p.jsonl", lines), tmp_path / "o.jsonl")
    assert done.exit_code == 0, done.output
    found = results(tmp_path / "o.jsonl")
    generator = SelfSpecGenerator.from_pretrained(talking)
    alone = generator.generate(messages=lines[0]["messages"], policy="ls:2-3", max_new_tokens=20)
    assert found[1]["token_ids"] == alone.new_tokens
    assert found[1]["messages"] == lines[0]["messages"]
    assert found[2]["prompt"] == "a"
    without = generate(folder, tmp_path / "p.jsonl", tmp_path / "without.jsonl")
    assert without.exit_code == 1
    assert "no chat template" in results(tmp_path / "without.jsonl")[1]["error"]


def test_a_second_run_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a run that broke off within a line: complete results stay as they are, the rest is decoded, and only that."""
    prompts, output = written(tmp_path / "p.jsonl", PROMPTS[:3]), tmp_path / "o.jsonl"
    assert generate(folder, prompts, output).exit_code == 0
    complete = output.read_text(encoding="utf-8").splitlines(keepends=True)
    output.write_text(complete[0] + complete[1][:40], encoding="utf-8")
    joined: list[int] = []
    step = Engine.step

    def counted(self: Engine) -> list[StepOutput]:
        joined.append(len(self))
        return step(self)

    monkeypatch.setattr(Engine, "step", counted)
    assert generate(folder, prompts, output, "--batch-size", "1").exit_code == 0
    assert set(joined) == {1}  # never more at a time than --batch-size
    assert output.read_text(encoding="utf-8").startswith(complete[0])
    before = {line["id"]: line["token_ids"] for line in map(json.loads, complete)}
    assert {key: line["token_ids"] for key, line in results(output).items()} == before


def test_lines_copy_from_files_or_from_texts_of_their_own(folder: Path, tmp_path: Path) -> None:
    """And a run goes on only with the same texts to copy from."""
    said = SelfSpecGenerator.from_pretrained(folder).generate("a bed, a fig", max_new_tokens=20, policy="ar").text or ""
    (tmp_path / "said.txt").write_text("a bed, a fig" + said, encoding="utf-8")
    lines: list[dict[str, Any]] = [
        {}, {"copy_from": ["head, head"]}, {"policy": "ls:1-3"}, {"policy": "ls:1-3", "copy_from": [said]},
        {"copy_from": said},
    ]  # fmt: skip
    prompts = written(tmp_path / "p.jsonl", [{"prompt": "a bed, a fig", **line} for line in lines])
    output, options = tmp_path / "o.jsonl", ["--policy", "copy:8", "--copy-from", str(tmp_path / "said.txt")]
    assert generate(folder, prompts, output, *options).exit_code == 1  # the last two
    found = results(output)
    assert [found[i]["text"] for i in (1, 2, 3)] == [said] * 3
    copied = [found[i]["stats"]["num_copied_accepted"] for i in (1, 2, 3)]
    assert copied[0] > copied[1] and copied[2] == 0
    assert found[3]["stats"]["num_drafted"] > 0
    assert "copy_from changes nothing with policy 'ls:1-3'" in found[4]["error"]
    assert "copy_from takes a list" in found[5]["error"]
    kept = output.read_bytes()
    other = generate(folder, prompts, output, "--policy", "copy:8")
    assert other.exit_code == 2 and "is no result of these prompts and options" in other.stderr
    assert output.read_bytes() == kept


def test_a_line_that_cannot_be_used_is_named(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    for line, told in (
        ('{"prompt": "a", "policy": 7}', "line 1: the policy must be a name, got 7"),
        ('{"prompt": "a", "policy": "ls:1-2+/tmp/x.py:X"}', "line 1: a file of prompts names no code to run"),
        ('{"prompt": "a", "id": ["x"]}', 'line 1: the id must be a text or an integer, got ["x"]'),
        ('{"prompt": "a", "id": NaN}', "line 1: the id must be a text or an integer, got NaN"),
        ('{"prompt": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}", "line 1 cannot be read"),
        ('{"prompt": ' + "1" * 5000 + "}", "line 1 cannot be read"),
    ):
        prompts.write_text(line + "\n", encoding="utf-8")
        done = generate(folder, prompts, tmp_path / "o.jsonl")
        assert (done.exit_code, len(done.output.splitlines())) == (2, 1) and told in done.output, done.output


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes by name here")
def test_results_go_to_regular_files_alone(folder: Path, tmp_path: Path) -> None:
    """Not to a pipe or a device, which would be read without end or replaced, nor into the file of prompts."""
    prompts, pipe = written(tmp_path / "p.jsonl", [{"prompt": "a"}]), tmp_path / "pipe"
    os.mkfifo(pipe)
    done = generate(folder, prompts, pipe)
    assert done.exit_code == 2 and "not a regular file" in done.output
    assert pipe.is_fifo()
    with pytest.raises(OSError, match="not a regular file"):
        write_text(pipe, "x")
    before = prompts.read_bytes()
    done = generate(folder, prompts, prompts)
    assert done.exit_code == 2 and "is no result of these prompts" in done.output
    assert prompts.read_bytes() == before
