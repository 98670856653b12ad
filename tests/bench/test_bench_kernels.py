"""Products by kind of weights, rows and variant: processes use the variant that they are told, and tables are by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bench.commands import kernels_command
from bench.commands.bench_app import app
from bench.machine import products
from bench.machine.products import KINDS
from bench.record import Line, read_record
from bench.report.machine_tables import kernels_tables
from layerskip_models.kernels.library import KernelsUnavailableError, kernels, runnable_variants

needs_kernels = pytest.mark.skipif(kernels() is None, reason="needs our kernels")


@needs_kernels
@pytest.mark.usefixtures("forked_programs")
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products.products, "__defaults__", (2,))  # matrices, which may stay in a cache
    path, chosen = tmp_path / "kernels.jsonl", [*dict.fromkeys((runnable_variants()[0], runnable_variants()[-1]))]
    command = ["kernels", "--repeats", "2", "--seconds", "0.001", "--weights", "int8", "--weights", "Q6_K"]
    command += [word for name in chosen for word in ("--variant", name)]
    result = CliRunner().invoke(app, [*command, "--rows", "1,3", "-o", str(path)])
    assert result.exit_code == 0, result.output
    lines = read_record(path)
    assert lines[0]["configuration"]["variants"] == chosen
    for variant in chosen:
        own = [line for line in lines if line["kind"] == "product" and line["variant"] == variant]
        assert [(line["repeat"], line["weights"], line["rows"]) for line in own] == [
            (repeat, weights, rows) for repeat in (0, 1) for weights in ("int8", "Q6_K") for rows in (1, 3)
        ]
    assert f"| {chosen[0]} |" in CliRunner().invoke(app, ["report", str(path)]).output


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_of_each_kind_is_nearly_the_one_it_was_made_of(kind: str) -> None:
    draw = torch.Generator().manual_seed(0)
    weight, x = torch.randn(64, 512, generator=draw), torch.randn(3, 512, generator=draw)
    expected = x @ weight.T
    most = {"float32": 1e-5, "bfloat16": 0.01, "int8": 0.03, "Q6_K": 0.05}.get(kind, 0.25)
    assert float((KINDS[kind](weight)(x) - expected).norm() / expected.norm()) < most


def test_speeds_are_medians_over_processes() -> None:
    """10,000 bytes in 1, 2 and 4 microseconds: 5 GB/s."""
    lines: list[Line] = [{"kind": "run", "configuration": {"variants": ["fast", "slow"]}}]
    for variant, factor in (("fast", 1), ("slow", 10)):
        for seconds in (1e-6, 4e-6, 2e-6):
            line = {"kind": "product", "variant": variant, "weights": "int8", "rows": 1, "bytes": 10_000}
            lines.append({**line, "seconds": factor * seconds})
    (table,) = kernels_tables(lines)
    assert table.columns == ("variant", "1 row")
    assert table.rows == (("fast", "5.0 (2)"), ("slow", "0.5 (20)"))


def test_mistakes_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def error_of(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["kernels", *arguments])
        assert result.exit_code == 2
        return " ".join(result.output.split())

    monkeypatch.setattr(kernels_command, "runnable_variants", lambda: ("avx2", "baseline"))
    assert "this machine runs the variants avx2, baseline, not amx" in error_of("--variant", "amx")
    assert "--weights must be of float32, bfloat16, int8, int4" in error_of("--weights", "int3")
    assert "--rows must look like" in error_of("--rows", "x")

    def none() -> None:
        raise KernelsUnavailableError("no library")

    monkeypatch.setattr(kernels_command, "runnable_variants", none)
    assert "there is nothing to measure: no library" in error_of()
