"""`--copy-from FILE` on the command line: one prompt, a file of prompts, a chat, a server; and what each source gave."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from layerskip_models import DEMO_PATH
from selfspec import SelfSpecGenerator
from selfspec.cli.display import SOURCE_STYLES
from selfspec.cli.main import app

PROMPT = "a bed, a fig"
TOKENS = ["--max-new-tokens", "30"]


@pytest.fixture(scope="module")
def said(folder: Path) -> str:
    """What the model says, which is a good text to copy from."""
    return SelfSpecGenerator.from_pretrained(folder).generate(PROMPT, max_new_tokens=30, policy="ar").text or ""


@pytest.fixture(scope="module")
def file(said: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "said.txt"
    path.write_bytes((PROMPT + said).encode().replace(b"\n", b"\r\n"))
    return path


def generate(folder: Path, *arguments: object) -> Result:
    return CliRunner().invoke(app, ["generate", "--model", str(folder), *TOKENS, *map(str, arguments)])


def stats_of(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    stats = json.loads(result.stdout)["stats"]
    assert isinstance(stats, dict)
    return stats


def test_drafts_are_copied_from_the_files(folder: Path, file: Path, said: str, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("head, head, head", encoding="utf-8")
    result = generate(folder, PROMPT, "--policy", "copy:8", "--copy-from", other, "--copy-from", file)
    assert result.stdout == said + "\n"
    without = stats_of(generate(folder, PROMPT, "--policy", "copy:8", "--json"))
    found = stats_of(
        generate(folder, PROMPT, "--policy", "copy:8", "--copy-from", other, "--copy-from", file, "--json")
    )
    assert found["num_copied_accepted"] > without["num_copied_accepted"]
    copied, accepted = found["num_copied"], found["num_copied_accepted"]
    assert f"copied from earlier text: {accepted} of {copied} accepted; drafted by an exit: none" in result.stderr


def test_compare_and_explain_go_with_copies(folder: Path, file: Path, said: str) -> None:
    """Plain decoding, which --compare runs beside it, copies nothing."""
    options = ["--policy", "copy:8", "--copy-from", file, "--compare", "--repeats", 1, "--explain"]
    result = generate(folder, PROMPT, *options)
    assert result.exit_code == 0, result.output
    assert result.stdout == said + "\n"
    assert "outputs equal" in result.stderr and "these settings copy nothing" in result.stderr
    assert "fixed settings, replayed from this run" in result.stderr  # although rounds that copy are not watched


def test_copied_drafts_have_a_colour_of_their_own(
    folder: Path, file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    arguments = ["generate", "--model", str(folder), *TOKENS, PROMPT, "--show-drafts", "--svg", str(tmp_path / "d.svg")]
    copying = CliRunner().invoke(
        app, [*arguments, "--policy", "auto:cost=layers", "--copy-from", str(file)], color=True
    )
    assert copying.exit_code == 0, copying.output
    assert "\x1b[35m" in copying.stdout and "accepted copy" in copying.stderr
    assert "\x1b[32m" in copying.stdout  # drafts of the exit stay as they are
    stats = stats_of(generate(folder, PROMPT, "--policy", "auto:cost=layers", "--copy-from", file, "--json"))
    drafted = stats["num_drafted"] - stats["num_copied"]
    accepted = stats["num_accepted"] - stats["num_copied_accepted"]
    assert drafted > 0 and f"drafted by an exit: {accepted} of {drafted} accepted" in copying.stderr
    drafting = CliRunner().invoke(app, [*arguments, "--policy", "ls:1-3"], color=True)
    assert "\x1b[32m" in drafting.stdout and "\x1b[35m" not in drafting.stdout and "drafted by" not in drafting.stderr
    assert len({str(style) for style in SOURCE_STYLES.values()}) == len(SOURCE_STYLES)


def write_lines(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def generate_lines(folder: Path, prompts: Path, *more: object) -> tuple[Result, list[dict[str, Any]]]:
    output = prompts.with_suffix(".out")
    done = generate(folder, "--prompts", prompts, "--output", output, *more)
    lines = output.read_text(encoding="utf-8").splitlines() if output.exists() else []
    return done, sorted(map(json.loads, lines), key=lambda line: str(line["id"]))


def test_lines_copy_from_the_files_or_from_texts_of_their_own(
    folder: Path, file: Path, said: str, tmp_path: Path
) -> None:
    lines: list[dict[str, Any]] = [
        {"prompt": PROMPT},
        {"prompt": PROMPT, "copy_from": ["head, head"]},
        {"prompt": PROMPT, "policy": "ls:1-3"},
        {"prompt": PROMPT, "policy": "ls:1-3", "copy_from": [said]},
        {"prompt": PROMPT, "copy_from": said},
    ]
    prompts = write_lines(tmp_path / "prompts.jsonl", *lines)
    done, found = generate_lines(folder, prompts, "--policy", "copy:8", "--copy-from", file)
    assert done.exit_code == 1  # the last two
    assert [line["text"] for line in found[:3]] == [said] * 3
    copied = [line["stats"]["num_copied_accepted"] for line in found[:3]]
    assert copied[0] > copied[1] and copied[2] == 0
    assert found[2]["stats"]["num_drafted"] > 0
    assert "copy_from changes nothing with policy 'ls:1-3'" in found[3]["error"]
    assert "copy_from takes a list" in found[4]["error"]


def test_a_run_goes_on_only_with_the_same_texts_to_copy_from(folder: Path, file: Path, tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "prompts.jsonl", {"prompt": PROMPT})
    options = ["--policy", "copy:8", "--copy-from", file]
    assert generate_lines(folder, prompts, *options)[0].exit_code == 0
    again, _ = generate_lines(folder, prompts, *options)
    assert again.exit_code == 0 and "1 of 1 results are in" in again.stderr
    kept = prompts.with_suffix(".out").read_bytes()
    other, _ = generate_lines(folder, prompts, "--policy", "copy:8")
    assert other.exit_code == 2 and "is no result of these prompts and options" in other.stderr
    assert prompts.with_suffix(".out").read_bytes() == kept


def test_a_chat_copies_from_the_files_while_its_policy_copies(tmp_path: Path) -> None:
    """With the demo, whose answer is in the file: as long as the policy copies, the answer is copied from there."""
    question, file = "Tom has 3 apples.", tmp_path / "answers.txt"
    asked = f"Question: {question}\nAnswer:"
    demo = SelfSpecGenerator.from_pretrained(DEMO_PATH)
    file.write_text(asked + (demo.generate(asked, max_new_tokens=16, policy="ar").text or ""), encoding="utf-8")
    arguments = ["chat", "--max-new-tokens", "16", "--copy-from", str(file)]
    typed = f"{question}\n/stats\n/clear\n/policy ls:2-4\n{question}\n/stats\n"
    result = CliRunner().invoke(app, [*arguments, "--policy", "copy:8"], input=typed)
    assert result.exit_code == 0, result.output
    first, _, second = result.stderr.partition("a new conversation")
    assert re.search(r"copied from earlier text: [1-9]", first) and "error" not in result.stderr
    assert "policy ls:2-4: " in second and "copied" not in second
    half = len(result.stdout) // 2
    assert result.stdout[:half] == result.stdout[half:]
    refused = CliRunner().invoke(app, [*arguments, "--policy", "ls:2-4"], input=typed)
    assert refused.exit_code == 2 and "--copy-from has no effect" in refused.stderr
