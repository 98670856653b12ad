"""Files are replaced whole or not at all, and a line ends at a line feed alone."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.datasets import load_prompts
from bench.record import Record, read_record
from layerskip_models.text_files import cut_last_line, read_lines, split_lines, write_text
from layerskip_models.training.examples import read_examples
from layerskip_models.training.run_folder import rewind_log
from policies import parse_policy
from scripted_policies import made_up_cost
from selfspec.cli.batch_file import _results_so_far, read_prompts
from selfspec.exits.training_texts import recorded_answers

ODD = "one\u2028two\u2029three\u0085four\x1cfive\x0bsix\x0cé"
"""Characters at which `str.splitlines` cuts, and JSON does not."""
BOM = "\ufeff"


def in_a_child(do: Callable[[], object], seconds: float | None = None) -> int | None:
    """Run it in a forked process, which is killed after so many seconds if any are given. Returns its exit code."""
    process = multiprocessing.get_context("fork").Process(target=do)
    process.start()
    if seconds is not None:
        time.sleep(seconds)
        process.kill()
    process.join()
    return process.exitcode


# Lines


@settings(max_examples=30)
@given(st.lists(st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), max_size=8), max_size=5))
def test_lines_end_at_a_line_feed(lines: list[str]) -> None:
    text = "".join(f"{line}\n" for line in lines)
    wanted = [lines[0].removeprefix(BOM), *lines[1:]] if lines else []
    assert split_lines(text.encode()) == wanted
    assert split_lines((BOM + text).encode()) == lines
    assert split_lines(text.replace("\n", "\r\n").encode()) == wanted


def test_a_line_cut_within_a_character_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes("whole é\ncut é".encode()[:-1])
    assert read_lines(path)[0] == "whole é"
    assert len(read_lines(path)) == 2
    path.write_bytes("cut é\nwhole\n".encode().replace("é".encode(), b"\xc3"))
    with pytest.raises(UnicodeDecodeError):
        read_lines(path)


@pytest.mark.parametrize("size", [0, 5, 70_000, 200_000])
def test_what_is_behind_the_last_line_feed_is_cut(size: int, tmp_path: Path) -> None:
    path = tmp_path / "lines"
    for before in ("", "a\n", "a\nb\n"):
        path.write_text(before + "x" * size, encoding="utf-8")
        cut_last_line(path)
        assert path.read_text(encoding="utf-8") == before


def _prompts_file(path: Path, *lines: dict[str, Any]) -> Path:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\r\n" for line in lines)
    path.write_text(BOM + text, encoding="utf-8", newline="")
    return path


def test_prompts_keep_what_other_programs_call_line_ends(tmp_path: Path) -> None:
    path = _prompts_file(tmp_path / "p.jsonl", {"prompt": ODD}, {"prompt": "b", "id": ODD})
    first, second = read_prompts(path, path.with_suffix(".out"), {})
    assert (first.prompt, second.id) == (ODD, ODD)
    result = json.dumps({"id": ODD, "key": second.key, "text": ODD}, ensure_ascii=False)
    output = tmp_path / "o.jsonl"
    output.write_text(result + "\n", encoding="utf-8")
    assert _results_so_far(output, [first, second]) == {ODD}
    assert output.read_text(encoding="utf-8") == result + "\n"


def test_so_do_examples_prompts_of_the_benchmark_and_records(tmp_path: Path) -> None:
    (example,) = read_examples(_prompts_file(tmp_path / "texts.jsonl", {"text": ODD}), ())
    assert example.text == ODD
    (tmp_path / "plain.txt").write_text(BOM + "plain\n", encoding="utf-8")
    assert read_examples(tmp_path / "plain.txt", ())[0].text == "plain\n"
    (prompt,) = load_prompts(_prompts_file(tmp_path / "p.jsonl", {"id": "1", "task": "a", "prompt": ODD}))
    assert prompt.prompt == ODD
    header = {"kind": "run", "command": "run", "configuration": {"text": ODD}, "provenance": {}}
    path = tmp_path / "record.jsonl"
    with Record(path, header) as record:
        record.write("sample", text="é")
        begun = path.read_bytes()
    assert read_record(path) == [header, {"kind": "sample", "text": "é"}]
    path.write_bytes(begun.rstrip(b'"}\n')[:-1])  # cut within é
    assert Record(path, header).lines == [header]


# Replaced whole or not at all


def test_a_kill_at_any_moment_leaves_one_of_both_files(tmp_path: Path) -> None:
    path = tmp_path / "state"
    variants = {letter * 300_000 for letter in "ab"}
    write_text(path, "a" * 300_000)

    def write_for_ever() -> None:
        while True:
            for text in variants:
                write_text(path, text)

    for moment in range(8):
        assert in_a_child(write_for_ever, 0.002 + 0.004 * moment) == -signal.SIGKILL
        assert path.read_text(encoding="utf-8") in variants


def _with_a_full_disk(do: Callable[[], object]) -> None:
    """Files end at 100 bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    try:
        do()
    except OSError:
        os._exit(7)
    os._exit(0)


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """Results and answers before the line that was cut short, what a policy has learned, a log."""
    prompts = read_prompts(
        _prompts_file(tmp_path / "p.jsonl", *({"prompt": f"p{i}"} for i in range(6))), tmp_path / "out.jsonl", {}
    )
    output = tmp_path / "o.jsonl"
    whole = "".join(json.dumps({"id": line.id, "key": line.key, "text": "x" * 40}) + "\n" for line in prompts[:4])
    output.write_text(whole + '{"id": 5, "ke', encoding="utf-8")
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps({"step": step, "loss": 1.5}) + "\n" for step in range(20)), encoding="utf-8")
    answers, state = tmp_path / "answers.jsonl", tmp_path / "state.json"
    answered = "".join(json.dumps({"prompt": str(i), "answer": [i] * 30}) + "\n" for i in range(5))
    answers.write_text(answered + '{"pro', encoding="utf-8")
    policy = parse_policy("auto", num_layers=4, measure=lambda: made_up_cost(4))
    policy.save(state)
    assert len(state.read_bytes()) > 100
    for path, do in (
        (output, lambda: _results_so_far(output, prompts)),
        (log, lambda: rewind_log(log, 15)),
        (state, lambda: policy.save(state)),
    ):
        before = path.read_bytes()
        assert in_a_child(lambda do=do: _with_a_full_disk(do)) == 7  # type: ignore[misc]
        assert path.read_bytes() == before
    assert in_a_child(lambda: _with_a_full_disk(lambda: recorded_answers(answers))) == 0  # which only cuts
    assert answers.read_text(encoding="utf-8") == answered
    names = ["answers.jsonl", "log.jsonl", "o.jsonl", "p.jsonl", "state.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert _results_so_far(output, prompts) == {1, 2, 3, 4}
    assert output.read_text(encoding="utf-8") == whole


def test_complete_results_are_not_written_again(tmp_path: Path) -> None:
    prompts = read_prompts(_prompts_file(tmp_path / "p.jsonl", {"prompt": "a"}), tmp_path / "out.jsonl", {})
    output = tmp_path / "o.jsonl"
    output.write_text(json.dumps({"id": 1, "key": prompts[0].key}), encoding="utf-8")  # its line feed was not written
    assert _results_so_far(output, prompts) == {1}
    assert output.read_bytes().endswith(b"}\n")
    before = output.stat()
    assert _results_so_far(output, prompts) == {1}
    assert (output.stat().st_mtime_ns, output.stat().st_ino) == (before.st_mtime_ns, before.st_ino)


def test_links_and_permissions_stay(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("before", encoding="utf-8")
    target.chmod(0o640)
    link.symlink_to(target)
    write_text(link, "after")
    assert link.is_symlink()
    assert target.read_text(encoding="utf-8") == "after"
    assert target.stat().st_mode & 0o777 == 0o640
