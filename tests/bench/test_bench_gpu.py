"""`selfspec-bench gpu` on a CPU: the commands that it gives, and that none of them ends the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import bench.synthetic
from bench.commands import gpu_command
from bench.record import matching, read_record

TINY = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 48, "vocab_size": 4096, "max_position_embeddings": 256,
}  # fmt: skip


def test_every_command_is_given_and_one_that_fails_is_told(
    invoke: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(bench.synthetic.SHAPES, "tiny", TINY)

    def here(arguments: Sequence[str], seconds: float) -> str | None:
        assert 0 < seconds <= 600
        invoke(*arguments)
        return "it ended with status 3" if "eager" in arguments else None

    monkeypatch.setattr(gpu_command, "fault_of", here)
    monkeypatch.setattr(gpu_command, "_TOKENS", 12)
    monkeypatch.setattr(gpu_command, "_REPEATS", 1)
    result = invoke("gpu", "--device", "cpu", "--shapes", "tiny", "--output", tmp_path / "new", status=1)
    assert result.stderr == "eager: it ended with status 3\n"
    records = {path.stem: read_record(path) for path in (tmp_path / "new").iterdir()}
    assert {*records} == {"run-tiny", "batch-tiny", "transformers", "eager", "first-texts"}
    engines = {name: [line["engine"] for line in matching(lines, "engine")] for name, lines in records.items()}
    own = ["selfspec:ar", "selfspec:ls:1-4", "selfspec:auto"]
    assert engines["run-tiny"] == engines["batch-tiny"] == own and engines["eager"] == own[:1]
    assert engines["transformers"][:4] == [*own, "transformers:generate"]
    assert records["eager"][0]["configuration"]["model"] == "synthetic weights (tiny)"
    assert "Synthetic weights (tiny) in" in invoke("report", tmp_path / "new" / "eager.jsonl").output
    assert {line["texts"] for line in matching(records["batch-tiny"], "batch")} == {1, 8, 32}


def test_how_a_command_ends(capfd: pytest.CaptureFixture[str]) -> None:
    """And the program says one line of a mistake."""
    assert gpu_command.fault_of(["--help"], 100.0) is None
    assert gpu_command.fault_of(["report"], 100.0) == "it ended with status 2"
    assert gpu_command.fault_of(["report"], 0.001) == "its time was over"
    assert gpu_command.fault_of(["report"], -1.0) == "no time was left"
    assert capfd.readouterr().err == "error: name at least one record\n"
