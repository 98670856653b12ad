"""A replayed session of edits: the edits, the prompts, what the model is made to say, and the table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bench.experiments.__main__ import app
from bench.experiments.answers.session import Says, make_edits, prompt_text
from bench.record import matching, read_record
from bench.report.markdown import sections

TEXT = "def window(total):\n    # the offset\n    return total + 12\n"


def test_each_edit_changes_a_line_of_the_file_before_it() -> None:
    edits = make_edits(TEXT, 40)
    before = TEXT
    kinds = set()
    for edit in edits:
        old, new = before.splitlines(), edit.text.splitlines()
        kind, number = edit.request.split()[0], int(re.findall(r"line (\d+)", edit.request)[0]) - 1
        kinds.add(kind)
        if kind == "Add":
            assert new[:number] + new[number + 1 :] == old and new[number].strip() in edit.request
        elif kind == "Remove":
            assert old[:number] + old[number + 1 :] == new and old[number].strip() in edit.request
        else:
            assert [place for place in range(len(old)) if old[place] != new[place]] == [number]
        before = edit.text
    assert kinds == {"Add", "Remove", "In"}
    assert make_edits(TEXT, 40) == edits != make_edits(TEXT, 40, seed=1)


def test_what_a_prompt_holds() -> None:
    edits = make_edits(TEXT, 3)
    assert edits[1].request in prompt_text("request", TEXT, edits, 1) and TEXT not in prompt_text(
        "request", TEXT, edits, 1
    )
    assert prompt_text("file", TEXT, edits, 0).startswith(TEXT)
    assert prompt_text("file", TEXT, edits, 2).startswith(edits[1].text)


def test_the_model_says_what_it_is_made_to_say() -> None:
    says = Says(2, [5, 3])
    scores = torch.randn(1, 8)
    assert [int(says(torch.zeros(1, length, dtype=torch.long), scores).argmax()) for length in (2, 3, 4)] == [5, 3, 3]


@pytest.mark.usefixtures("with_studies")
def test_the_command_and_its_table(tmp_path: Path) -> None:
    file, path = tmp_path / "code.py", tmp_path / "session.jsonl"
    file.write_text(TEXT, encoding="utf-8")
    arguments = [
        "--file",
        str(file),
        "--edits",
        "3",
        "--max-new-tokens",
        "6",
        "--policy",
        "copy:4",
        "--output",
        str(path),
    ]
    result = CliRunner().invoke(app, ["answers", *arguments])
    assert result.exit_code == 0, result.output
    lines = read_record(path)
    answers = matching(lines, "answer")
    assert len(answers) == 2 * 3 * 3 and all(line["same_text"] for line in answers)
    forced = matching(answers, "answer", forced=True, prompt="request")
    assert [line["store"] for line in forced] == [True, False, False, True, True, False]
    assert sum(line["rounds"] for line in forced if line["store"]) < sum(
        line["rounds"] for line in forced if not line["store"]
    )
    assert forced[0]["store_bytes"] == 0 < forced[2]["store_bytes"]
    for line in answers:  # so that the table does not depend on this machine
        line.update(
            seconds=1.0 if line["store"] else 3.0, prefill_seconds=0.5, tokens=20, rounds=4 if line["store"] else 10
        )
    parts = sections(lines)
    assert (
        "| the request alone | the edited file | copy:10 | 9 | 3 | 3.00 | 5.00 | 2.00 | 5.00 | all |"
        in parts["session"]
    )
    assert "every text is the same" in parts["headline"]
    missing = CliRunner().invoke(app, ["answers", "--file", str(tmp_path / "none.py")])
    assert missing.exit_code == 2 and missing.stderr.startswith("error: ")
