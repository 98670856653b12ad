"""`selfspec-bench shapes` on weights that are synthetic, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import bench.commands.preparation
import layerskip_models.checkpoints.synthetic
from bench.commands.bench_app import app
from bench.record import read_record


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


@pytest.mark.slow
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
