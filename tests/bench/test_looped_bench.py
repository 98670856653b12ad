"""`selfspec-bench looped` on a tiny shape: texts stay the model's own, and sweeps are as many as the imposed drafts say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.commands.looped_command import fixed_rounds, scripted
from bench.models import open_model
from bench.record import by_value, matching, read_record
from bench.synthetic import LOOPED, _shape

TINY = {**LOOPED["ouro-1.4B"], **_shape(64, 2, 2, 2, 96, 4096, 256), "head_dim": 32}


def test_a_record_of_the_diagonal(invoke: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.synthetic.LOOPED", {"tiny": TINY})
    monkeypatch.setattr("bench.models.LOOPED", {"tiny": TINY})
    asked = ("--model", "synthetic:tiny", "--dtype", "bfloat16", "--contexts", "9,30", "--agreement", "0,1")
    path = tmp_path / "record.jsonl"
    shown = invoke("looped", *asked, "--max-new-tokens", 13, "--repeats", 1, "--output", path).stdout
    lines = read_record(path)
    runs = matching(lines, "decode")
    assert len(runs) == 2 * (1 + 2 * 3)
    assert all(run["outputs_equal"] and run["tokens"] == 12 for run in runs)
    for share, passes in ((None, 4), (0.0, 4), (1.0, (4 + 11) / 12)):  # the first token takes all loops, then each takes one
        policy = "ar" if share is None else "wave:loop=1"
        found = matching(runs, "decode", policy=policy, agreement=share)
        assert [run["passes"] / run["tokens"] for run in found] == pytest.approx([passes] * 2)
    for sweeps in by_value(matching(lines, "sweep"), "context").values():
        assert [line["rows"] for line in sweeps] == [1, 4]
        # Three more rows read the keys and values of their own loops' two layers: 2 heads of 32, in 16 bits.
        assert sweeps[1]["bytes"] - sweeps[0]["bytes"] == 3 * 2 * sweeps[0]["context"] * (2 * 2 * 32 * 2)
    assert "Synthetic weights (tiny)" in shown
    assert "which are set and not the model's" in shown
    invoke("looped", "--agreement", "0.5,2", status=2)


def test_drafts_are_right_as_often_as_asked() -> None:
    own = [token % 7 for token in range(5000)]
    drafts = scripted(3, own, 0.8, 7)[3:5003]
    right = sum(draft == token for draft, token in zip(drafts, own)) / 5000
    assert right == pytest.approx(0.8, abs=0.02)  # a standard deviation is .006
    assert all(draft in (token, (token + 1) % 7) for draft, token in zip(drafts, own))


def test_the_best_rounds_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens a round over its loops, with N = 4 and a head that costs next to nothing: (1 - a^(d+1)) / (1 - a) / (d + 4)."""
    monkeypatch.setattr("bench.models.LOOPED", {"tiny": {**TINY, "vocab_size": 8}})
    monkeypatch.setattr("bench.synthetic.LOOPED", {"tiny": {**TINY, "vocab_size": 8}})
    model = open_model("synthetic:tiny", "bfloat16", "cpu")
    # a = .5: d = 1 gives 1.5 / 5 = .3, d = 2 1.75 / 6 = .29, d = 3 1.875 / 7 = .27; a = .8: 2.952 / 7 = .4217 at d = 3,
    # 3.362 / 8 = .4202 at 4, 2.44 / 6 = .4067 at 2
    assert fixed_rounds(model, 0.5) == ["ls:2-1", "ls:2-2"]
    assert fixed_rounds(model, 0.8) == ["ls:2-3", "ls:2-4"]
