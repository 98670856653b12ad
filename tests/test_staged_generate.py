"""`selfspec generate --two-stages`: text on standard output, a summary beside it, refusals of what does not go with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from staged_models import save_staged, staged_llama
from tiny_llama import reference_greedy, tiny_tokenizer
from typer.testing import CliRunner

from layerskip_models import DEMO_PATH
from selfspec.cli import staged_generate
from selfspec.cli.display import TextWriter
from selfspec.cli.main import app
from selfspec.parallel.two_stages import TwoStages

PROMPT, NEW = "a bed, a fig", 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_staged(tmp_path_factory.mktemp("stages")))


@pytest.fixture(scope="module")
def expected() -> str:
    tokenizer = tiny_tokenizer()
    new = reference_greedy(staged_llama(), tokenizer(PROMPT)["input_ids"], max_new_tokens=NEW)
    text = tokenizer.decode(new, skip_special_tokens=True)
    assert isinstance(text, str)
    return text


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process in milliseconds."""
    monkeypatch.setattr(staged_generate, "TwoStages", partial(TwoStages, start="fork"))


def generate(folder: str, *arguments: str, **options: Any) -> Result:
    base = ["generate", "--two-stages", "--stage-devices", "cpu, cpu", "--dtype", "float64", "--model", folder]
    return CliRunner().invoke(app, [*base, "--max-new-tokens", str(NEW), *arguments], **options)


def test_text_and_summary(folder: str, expected: str, tmp_path: Path) -> None:
    result = generate(folder, PROMPT, "--exit-layer", "2")
    assert (result.exit_code, result.stdout) == (0, expected + "\n")
    assert "24 tokens in " in result.stderr
    assert "stop reason: length\ntwo stages, exit layer 2 on cpu, the rest on cpu: " in result.stderr
    assert " verifications, acceptance rate " in result.stderr
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT + "\n", encoding="utf-8")
    for arguments, piped in ((["--file", str(path)], None), (["-"], PROMPT), ([], PROMPT + "\n")):
        result = generate(folder, *arguments, "--quiet", input=piped)
        assert (result.stdout, result.stderr) == (expected + "\n", "")
    assert "exit layer 1 with its adapter on cpu" in generate(folder, PROMPT).stderr
    assert "exit layer 1 on cpu" in generate(folder, PROMPT, "--exits", "none").stderr


def test_json_and_sampling(folder: str, expected: str) -> None:
    found = json.loads(generate(folder, PROMPT, "--exit-layer", "3", "--json").stdout)
    assert (found["text"], found["exit_layer"], found["adapted"]) == (expected, 3, True)
    assert found["devices"] == ["cpu", "cpu"]
    assert found["stop_reason"] == "length"
    stats = found["stats"]
    assert stats["num_new_tokens"] == len(found["token_ids"]) == NEW
    # The first token, the accepted drafts, and a correction in the place of others.
    assert 1 + stats["accepted"] <= NEW <= 1 + stats["accepted"] + stats["verifications"]
    sampling = ["--do-sample", "--temperature", "1.5", "--seed", "5", "--stop-strings", ",", "-q"]
    drawn = {generate(folder, PROMPT, "--exit-layer", "3", *sampling).stdout for _ in range(2)}
    assert len(drawn) == 1
    assert drawn != {expected + "\n"}


def test_what_does_not_go_with_it(folder: str, tmp_path: Path) -> None:
    trace = str(tmp_path / "trace.jsonl")
    for arguments, said in (
        (["--policy", "del"], "error: --policy does not go with --two-stages: leave it out\n"),
        (["--num-speculations", "4"], "error: --num-speculations does not go with --two-stages"),
        (
            ["--device", "cpu", "--trace", trace],
            "--device, --trace does not go with --two-stages: leave it out; where the",
        ),
        (["--compare"], "--compare does not go"),
        (["--data-parallel"], "--data-parallel does not go"),
        (["--copy-from", str(tmp_path / "text.txt")], "--copy-from does not go"),
        (["--temperature", "0.5"], "error: --temperature has no effect on greedy decoding"),
        (["--exit-layer", "5"], "error: exit_layer must be in [1, 4]"),
        (["--stage-devices", "cpu"], "error: devices (--stage-devices) must be two"),
    ):
        result = generate(folder, PROMPT, *arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert said in result.stderr
        assert result.stderr.count("\n") == 1
    alone = CliRunner().invoke(app, ["generate", "--stage-devices", "cpu,cpu"])
    assert (alone.exit_code, alone.stderr) == (
        2,
        "error: --stage-devices says where two stages run: add --two-stages\n",
    )
    launched = generate(folder, PROMPT, env={"WORLD_SIZE": "2", "RANK": "0"})
    assert "start the command without torchrun" in launched.stderr


def test_ctrl_c_keeps_the_text(folder: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write, count = TextWriter.write, 0

    def pressing(self: TextWriter, text: str, style: Any = None) -> None:
        nonlocal count
        write(self, text, style)
        count += 1
        if count == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TextWriter, "write", pressing)
    handler = signal.getsignal(signal.SIGINT)
    result = generate(folder, PROMPT)
    assert result.exit_code == 130
    assert 0 < len(result.stdout.removesuffix("\n")) < len(expected)
    assert expected.startswith(result.stdout.removesuffix("\n"))
    assert "stop reason: interrupted" in result.stderr
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_ends_both_processes() -> None:
    """It reaches the process that drafts, too, which leaves it to the other one."""
    command = [
        sys.executable,
        "-m",
        "selfspec",
        "generate",
        "Once",
        "--two-stages",
        "--ignore-eos",
        "--max-new-tokens",
        "400",
    ]
    with subprocess.Popen(
        [*command, "--model", str(DEMO_PATH)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as running:  # fmt: skip
        assert running.stdout is not None
        assert running.stdout.read(1)
        os.killpg(running.pid, signal.SIGINT)
        out, err = running.communicate(timeout=60)
        assert running.returncode == 130
        assert out.endswith("\n")
        assert "Traceback" not in err
        assert "stop reason: interrupted" in err
        for _ in range(100):
            try:
                os.killpg(running.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.1)
        raise AssertionError("a process is left")
