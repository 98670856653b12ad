"""`selfspec-bench shapes`, and the key figures of a record by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import bench.commands.preparation
import layerskip_models.checkpoints.synthetic
from bench.commands.bench_app import app
from bench.record import Line, read_record
from bench.report.shape_figures import shape_figures


def test_shapes_measures_synthetic_weights_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    tiny |= {"intermediate_size": 96, "vocab_size": 4096, "max_position_embeddings": 128}
    monkeypatch.setattr(layerskip_models.checkpoints.synthetic, "SHAPES", {"tiny": tiny})
    monkeypatch.setattr(bench.commands.preparation, "SHAPES", {"tiny": tiny})
    folder = tmp_path / "out"
    arguments = [
        "--shape",
        "tiny,eps=0.05",
        "--policy",
        "auto:cost=layers",
        "--output-dir",
        str(folder),
        "--repeats",
        "1",
    ]
    result = CliRunner().invoke(app, ["shapes", *arguments, "--prompt-tokens", "8", "--max-new-tokens", "8"])
    assert result.exit_code == 0, result.output
    lines = read_record(folder / "tiny.jsonl")
    assert lines[0]["configuration"]["model"] == "synthetic weights (tiny,eps=0.05)"
    assert {"selfspec:ar", "selfspec:auto:cost=layers", "transformers:generate"} <= set(lines[0]["engines"])
    page = (folder / "tiny.html").read_text(encoding="utf-8")
    assert "Synthetic weights (tiny,eps=0.05) on" in page
    unknown = CliRunner().invoke(app, ["shapes", "--shape", "huge", "--output-dir", str(folder)])
    assert unknown.exit_code == 2
    assert "unknown shape 'huge'" in unknown.stderr


def test_key_figures_by_hand() -> None:
    """Two engines of 4 layers of 10 bytes and a head of 5: plain 45 bytes a token at 2 s; auto 10 tokens in 5 rounds."""
    stats = {
        "num_prompt_tokens": 4,
        "num_new_tokens": 11,
        "rounds": 10,
        "num_drafted": 0,
        "loaded_layers": 40,
        "preverifier_layers": 0,
    }
    stats |= {"etpl": 0.25, "learn_seconds": 0.0, "seconds": 21.0, "num_captures": 0}
    auto = {**stats, "rounds": 5, "num_drafted": 10, "loaded_layers": 30, "etpl": 1 / 3, "learn_seconds": 1.1}
    common = {"kind": "sample", "prompt": "a", "task": "t", "repeat": 0, "num_new_tokens": 11}
    lines: list[Line] = [
        {"kind": "run", "engines": {"selfspec:ar": "plain", "selfspec:auto": "auto", "transformers:static": "static"}},
        {
            "kind": "limits",
            "bytes_per_second": 25.0,
            "layer_bytes": 10,
            "head_bytes": 5,
            "draft_head_bytes": 5,
            "kv_bytes": 0,
        },
        {**common, "engine": "selfspec:ar", "seconds": 21.0, "decode_seconds": 20.0, "stats": stats},
        {
            **common,
            "engine": "selfspec:auto",
            "seconds": 11.0,
            "decode_seconds": 10.0,
            "stats": {**auto, "seconds": 11.0},
        },
        {**common, "engine": "transformers:static", "seconds": 42.0, "decode_seconds": None, "stats": None},
    ]
    figures = {line["what"]: line["measured"] for line in shape_figures(lines)}
    assert figures["plain over transformers' static, compiled"] == 2.0
    assert figures["auto over plain"] == 2.0
    assert figures["plain, share of bandwidth"] == 45 / 2 / 25
    # auto moves 30 * 10 + 15 * 5 = 375 bytes for 10 tokens, plain 450: 1.2 is predicted, 2 were reached.
    assert figures["auto's gain over what bytes moved predict"] == pytest.approx(2 / 1.2)
    assert figures["auto, learning's share of the time"] == pytest.approx(0.1)
    assert figures["auto, eTPL"] == 1 / 3
    assert figures["captures made while timed"] == 0.0
    assert "transformers' generate" not in str(figures)


def test_shapes_with_the_captured_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script of the GPU, on the stand-in: captures are made before anything is timed."""
    tiny = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
    tiny |= {"intermediate_size": 48, "vocab_size": 4096, "max_position_embeddings": 64}
    monkeypatch.setattr(layerskip_models.checkpoints.synthetic, "SHAPES", {"tiny": tiny})
    monkeypatch.setattr(bench.commands.preparation, "SHAPES", {"tiny": tiny})
    arguments = ["--shape", "tiny", "--policy", "auto:cost=layers", "--output-dir", str(tmp_path), "--repeats", "1"]
    arguments += ["--runner", "captured", "--prompt-tokens", "8", "--max-new-tokens", "8", "--warmups", "0"]
    result = CliRunner().invoke(app, ["shapes", *arguments])
    assert result.exit_code == 0, result.output
    lines = read_record(tmp_path / "tiny.jsonl")
    assert lines[0]["configuration"]["runner"] == "captured"
    ours = [line for line in lines if line["kind"] == "sample" and line["engine"].startswith("selfspec:a")]
    assert {line["stats"]["runner"] for line in ours} == {"captured"}
    assert {line["stats"]["num_captures"] for line in ours} == {0}
