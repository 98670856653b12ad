"""`selfspec-bench gpu` on a CPU: what it measures, and that nothing ends it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from bench.commands import gpu_command
from bench.record import Line, matching, read_record
from bench.report.page import tables, update
from layerskip_models.families import IN_TRANSFORMERS
from tiny_llama import tiny_llama

Run = Callable[..., tuple[list[Line], Path]]
OWN = ["selfspec:ar", "selfspec:ls:1-4", "selfspec:auto", "selfspec:ar, eager"]


@pytest.fixture
def run(invoke: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Measure two families, and speeds of a tiny model. Returns the record's lines and its path."""
    monkeypatch.setattr(gpu_command, "IN_TRANSFORMERS", {name: IN_TRANSFORMERS[name] for name in ("llama", "mistral")})
    monkeypatch.setattr(gpu_command, "load_network", lambda *_: tiny_llama(vocab_size=64, seed=3))

    def gpu(*options: object) -> tuple[list[Line], Path]:
        record = tmp_path / "gpu.jsonl"
        result = invoke("gpu", "--device", "cpu", "--quick", "--commit", "1234567", "--output", record, *options)
        assert result.exit_code == 0, result.output
        return read_record(record), record

    return gpu


def test_all_is_measured_and_makes_tables(run: Run) -> None:
    lines, record = run()
    exact = matching(lines, "exact")
    assert [(line["family"], line["dtype"]) for line in exact[1:3]] == [("mistral", "float32"), ("llama", "bfloat16")]
    assert not any(count for line in exact[:2] for count in line["other"].values())
    speeds = matching(lines, "speed")
    assert [line["engine"] for line in speeds if line["beside"] == "eager"][:8] == [*OWN, *OWN[1:], OWN[0]]  # in turn
    theirs = ["transformers:generate", "transformers:early-exit:1-4"]
    assert {line["engine"] for line in speeds if line["beside"] != "eager"} == {OWN[0], *theirs}
    assert {line["output"] for line in speeds} == {speeds[0]["output"]}
    assert len(matching(lines, "texts")) == 3 * 3 * 2 and not matching(lines, "lost")
    found, speed = tables(lines)
    assert found.rows[0] == ("plain decoding beside transformers", "0 of 6", found.rows[0][2])
    assert [row[1] for row in speed.rows[:2]] == ["selfspec, plain", "selfspec, ls:1-4"] and len(speed.rows) == 7
    plain = [line["tokens"] / line["seconds"] for line in speeds if line["engine"] == OWN[0] and line["repeat"] >= 0]
    assert speed.rows[0][2:4] == (f"{median(plain[:2]):.4g}", "1")
    filled = update(f"<!-- table: {record} speed -->\n<!-- /table -->", Path())
    assert speed.markdown() in filled
    again, _ = run()
    assert again == lines  # a complete record is shown


def test_what_fails_is_a_line_and_the_next_goes_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement that raises, and a process that ends."""
    exact, texts = gpu_command._Measurer._exact, gpu_command._Measurer._texts

    def fails(self: Any, family: str, dtype: str) -> Line:
        if family == "mistral":
            raise FloatingPointError("no number")
        return exact(self, family, dtype)

    def ends(self: Any, **key: Any) -> Line:
        return os._exit(3) if key["engine"] == OWN[2] else texts(self, **key)

    monkeypatch.setattr(gpu_command._Measurer, "_exact", fails)
    monkeypatch.setattr(gpu_command._Measurer, "_texts", ends)
    lines, _ = run()
    reasons = [line["reason"] for line in matching(lines, "lost")]
    assert reasons[0] == "exact mistral float32: FloatingPointError: no number"
    assert reasons[2].startswith("small: ") and "ended with status 3" in reasons[2] and len(reasons) == 3
    assert len(matching(lines, "exact")) == 2 and len(matching(lines, "texts")) == 2
    assert len(matching(lines, "speed", beside="transformers")) == 3 * 3
    assert len(tables(lines)) == 2


def test_no_time_is_left(run: Run) -> None:
    lines, _ = run("--minutes", 0)
    lost = [line["reason"] for line in matching(lines, "lost")]
    assert lost == [f"{step}: no time was left" for step in ("exactness", "small", "transformers")] and not tables(
        lines
    )
