"""`selfspec-bench context --agreement` on a tiny looped shape: texts stay plain, and passes follow from the right drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.record import matching, read_record
from bench.report.page import tables
from bench.synthetic import LOOPED, _shape

TINY = {**LOOPED["ouro-1.4B"], **_shape(64, 2, 2, 2, 96, 4096, 256), "head_dim": 32}


def test_a_record_of_imposed_drafts(
    invoke: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("synthetic", "models"):
        monkeypatch.setattr(f"bench.{module}.LOOPED", {"tiny": TINY})
    asked = ["--model", "synthetic:tiny", "--dtype", "bfloat16", "--contexts", "9,30", "--repeats", 1]
    asked += ["--policy", "ls:2-3", "--policy", "wave:loop=1", "--max-new-tokens", 13]
    shares = [part for share in (0, 0.8, 1) for part in ("--agreement", share)]
    path = tmp_path / "record.jsonl"
    shown = invoke("context", *asked, *shares, "--output", path).stdout
    lines = read_record(path)
    assert all(line["first_difference"] is None for line in matching(lines, "output"))
    found = {line["engine"]: line["stats"]["loaded_layers"] / 2 for line in matching(lines, "sample")}
    # 12 tokens after the first. Three wrong drafts take 3 + 4 loops a token, fewer at the end; right ones 7 for 4 tokens.
    assert (found["selfspec:ls:2-3@0"], found["selfspec:ls:2-3@1"]) == pytest.approx((12 * 7 - 6, 3 * 7))
    # A wave takes all four loops where a draft is wrong, and one where it is right.
    assert (found["selfspec:wave:loop=1@0"], found["selfspec:wave:loop=1@1"]) == (12 * 4, 4 + 11)
    assert 15 < found["selfspec:wave:loop=1@0.8"] < 48
    assert found["selfspec:ar"] == 12 * 4
    speeds, passes = tables(lines)
    assert "which is set, not the model's; weights in bfloat16" in speeds.title
    assert [row[:2] for row in passes.rows] == [(size, share) for size in ("9", "30") for share in ("0", "0.8", "1")]
    assert [row[-1].split()[0] for row in passes.rows[::2]] == ["4.00", "1.25", passes.rows[4][-1].split()[0]]
    assert "Synthetic weights (tiny)" in shown
    invoke("context", "--agreement", 2, status=2)
