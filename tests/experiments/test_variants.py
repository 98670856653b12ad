"""Variants of the kernels beside each other: processes run the variant that they are told, and tables compare them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.experiments.__main__ import app
from bench.experiments.variants import variants_command
from bench.experiments.variants.one_variant import Job
from bench.experiments.variants.variants_tables import variants_tables
from bench.record import Line, read_record
from layerskip_models.kernels.library import KernelsUnavailableError, runnable_variants
from layerskip_models.kernels.library import kernels as kernels_of
from tiny_llama import tiny_llama, tiny_tokenizer

RUNS = kernels_of() is not None


@pytest.mark.skipif(not RUNS, reason="needs our kernels")
@pytest.mark.usefixtures("forked_programs")
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants_command, "Job", partial(Job, matrices=2))  # which may stay in a cache
    monkeypatch.setattr(variants_command, "ROWS", (1, 3))
    monkeypatch.setattr(variants_command, "PROMPTS", (8,))
    monkeypatch.setattr(variants_command, "TEXTS", 2)
    checkpoint, path = tmp_path / "tiny", tmp_path / "variants.jsonl"
    tiny_llama(seed=3, max_position_embeddings=256).save_pretrained(checkpoint)
    tiny_tokenizer().save_pretrained(checkpoint)
    command = ["variants", "--repeats", "1", "--seconds", "0.001", "--weights", "int8"]
    command += ["--weights", "bfloat16-rows", "--max-new-tokens", "8"]
    command += ["--variant", runnable_variants()[-1]]
    result = CliRunner().invoke(app, [*command, "--model", str(checkpoint), "-o", str(path)])
    assert result.exit_code == 0, result.output
    lines = read_record(path)
    asked = [runnable_variants()[-1]]
    assert lines[0]["configuration"]["variants"] == asked
    for variant in asked:
        products = [line for line in lines if line["kind"] == "product" and line["variant"] == variant]
        assert [(line["weights"], line["rows"]) for line in products] == [
            (weights, rows) for weights in ("int8", "bfloat16-rows") for rows in (1, 3)
        ]
        what = {line["what"] for line in lines if line["kind"] == "model" and line["variant"] == variant}
        assert {"prompt of 8", "one text, ar", "one text, auto", "texts together, with their prompts"} <= what
    assert {table.name for table in variants_tables(lines)} == {"variant_products", "variant_models"}


def test_ratios_are_of_speeds() -> None:
    lines: list[Line] = [
        {"kind": "run", "configuration": {"variants": ["fast", "slow"], "model": "m", "texts": 2, "repeats": 1}}
    ]
    for variant, seconds in (("fast", 1e-6), ("slow", 4e-6)):
        lines.append(
            {"kind": "product", "variant": variant, "weights": "int8", "rows": 1, "seconds": seconds, "bytes": 10_000}
        )
        lines.append(
            {"kind": "model", "variant": variant, "weights": "int8", "what": "x", "tokens_per_second": 1e-4 / seconds}
        )
    products, models = variants_tables(lines)
    assert [row[-1] for row in products.rows] == ["10.0, 5767 (4.00)", "2.5, 1442"]
    assert [row[2:] for row in models.rows] == [("100 (4.00)", "25")]


def test_errors_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def error_of(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["variants", *arguments])
        assert result.exit_code == 2
        return " ".join(result.output.split())

    monkeypatch.setattr(variants_command, "runnable_variants", lambda: ("avx2", "baseline"))
    assert "this machine runs the variants avx2, baseline, not amx" in error_of("--variant", "amx")
    assert "weights are bfloat16, bfloat16-rows, int8, int4, got int3" in error_of("--weights", "int3")

    def none() -> None:
        raise KernelsUnavailableError("no library")

    monkeypatch.setattr(variants_command, "runnable_variants", none)
    assert "there is nothing to compare: no library" in error_of()
