"""Bytes and limits by hand, and the whole command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.commands.bench_app import app
from bench.machine.bandwidth import WeightBytes
from bench.machine.roofline import calls, phase_bytes
from bench.record import read_record
from bench.report.markdown import tables
from policies import MeasuredCost
from records import finished, shadow
from tiny_llama import tiny_llama, tiny_tokenizer

WEIGHTS = WeightBytes(layer=100, head=30, kv=2, draft_head=30)
COST = MeasuredCost(
    num_layers=4, layer_seconds=(1.0, 1.5), head_seconds=(0.5, 0.75), draft_seconds=0.25, round_seconds=0.0
)


def test_calls_by_hand() -> None:
    found = {call.name: (call.seconds, call.num_bytes) for call in calls(
        COST, WEIGHTS, context=10, exit_layers=[2], learning={1: 0.1}
    )}  # fmt: skip
    layer = 100 + 2 * 10
    assert found == {
        "plain step": (4.5, 4 * layer + 30),
        "one layer, 1 row": (1.0, layer),
        "norm and head, 1 row": (0.5, 30),
        "draft step, E = 2": (2 + 0.75, 2 * layer + 30),
        "all layers and head, 1 row": (4.5, 4 * layer + 30),
        "all layers and head, 2 rows": (6.75, 4 * layer + 30),
        "learning, 1 row": (0.1, 30),
    }


def test_bytes_of_phases_by_hand() -> None:
    """`finished` rounds begin with 5 committed tokens: a layer reads 100 + 2 * 5."""
    layer = 110
    seen = shadow([1, 2, 3], [[1]] * 3, [[0.5]] * 3)
    kept = finished(3, 2, exit_layer=2, cause="cap", seen=seen)
    read, seconds = phase_bytes([kept], WEIGHTS, 4, COST)
    # Three steps of two layers and a head; the last row's two layers are the verification's, with the two above.
    assert read == {"draft": 3 * (2 * layer + 30), "verify": 4 * layer + 30, "learn": 30}
    assert seconds == COST.round(2, 3)
    dropped = finished(3, 2, exit_layer=2, cause="before_draw")
    read, seconds = phase_bytes([dropped], WEIGHTS, 4, COST)
    assert read == {"draft": 4 * (2 * layer + 30), "verify": 2 * layer + 30, "learn": 0}
    assert seconds == COST.round(2, 3) + COST.look(2)
    copied = replace(finished(3, 2, cause="cap"), exit_layer=None, num_copied=3)
    read, seconds = phase_bytes([copied], WEIGHTS, 4, COST)
    assert read == {"draft": 0, "verify": 4 * layer + 30, "learn": 0}
    assert seconds == COST.copying(3) != COST.autoregressive()


def test_copied_tokens_take_no_pass_of_their_own() -> None:
    stats = {
        "num_prompt_tokens": 10, "num_new_tokens": 20, "loaded_layers": 8, "preverifier_layers": 0, "rounds": 2,
        "num_drafted": 9,
    }  # fmt: skip
    assert WEIGHTS.moved(stats) - WEIGHTS.moved({**stats, "num_copied": 6}) == 6 * WEIGHTS.draft_head


def test_the_command_and_its_tables(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    tiny_llama(seed=3).save_pretrained(checkpoint)
    tiny_tokenizer().save_pretrained(checkpoint)
    record = tmp_path / "roofline.jsonl"
    arguments = ["--prompt-tokens", "12", "--max-new-tokens", "10", "--repeats", "2", "--num-samples", "1"]
    result = CliRunner().invoke(app, ["roofline", "--model", str(checkpoint), "--output", str(record), *arguments])
    assert result.exit_code == 0, result.output
    lines = read_record(record)
    runs = [line for line in lines if line["kind"] == "phases"]
    assert {line["policy"] for line in runs} >= {"ar", "auto"}
    assert len(runs) == 3 * 2
    for line in runs:
        assert line["tokens"] == 9
        assert sum(line["seconds"].values()) == pytest.approx(line["decode_seconds"], rel=0.05)
        assert (line["bytes"]["draft"] > 0) == (line["policy"].startswith("ls:") or line["seconds"]["draft"] > 0)
    # The limit that the table shows is the bandwidth over the bytes of a plain step, which are those of its whole weights.
    limits = next(line for line in lines if line["kind"] == "limits")
    assert len(limits["bandwidths"]) == 1 + 2 * 1  # before the calls, and in turn with the runs: repeats times prompts
    assert limits["bytes_per_second"] == sorted(limits["bandwidths"])[1]
    step = next(line for line in lines if line["kind"] == "call")
    context = lines[0]["configuration"]["timed_context"]
    expected = 4 * (limits["layer_bytes"] + context * limits["kv_bytes"]) + limits["head_bytes"]
    assert step["bytes"] == expected
    made = {table.name: table for table in tables(lines)}
    assert f"memory gives {limits['bytes_per_second'] / 1e9:.1f} GB/s" in made["calls"].title
    assert made["calls"].rows[0][2] == f"{1000 * expected / limits['bytes_per_second']:.3f}"
    assert [row[0] for row in made["phases"].rows][::2] == ["`ar`", "`auto`"]
