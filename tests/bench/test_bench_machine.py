"""The machine in records: bytes, limits, contexts, loading and products by hand, and the commands that measure them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch
from typer.testing import CliRunner

from bench.commands import machine_commands
from bench.commands.bench_app import app
from bench.commands.preparation import model_name
from bench.machine import loading
from bench.machine.bandwidth import WeightBytes
from bench.machine.context import usable_contexts
from bench.machine.loading import read_speed
from bench.machine.products import KINDS
from bench.machine.roofline import calls, phase_bytes
from bench.provenance import cpu_fields, host_kind, provenance
from bench.record import read_record
from bench.report.context_tables import time_beside_reading
from bench.report.markdown import tables
from layerskip_models import from_transformers
from layerskip_models.kernels.library import KernelsUnavailableError, kernels, runnable_variants
from policies import MeasuredCost
from records import finished, shadow
from tiny_llama import tiny_llama

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
    assert seconds == COST.round(2, 3) + COST.head_cost(2)
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


def test_the_roofline_and_its_tables(checkpoint: Path, tmp_path: Path) -> None:
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


def test_bytes_that_rounds_move() -> None:
    model = from_transformers(tiny_llama(num_layers=3, seed=1), layout="plain")
    weights = WeightBytes.of(model)
    layer = model._layers[0]
    assert weights.layer == 4 * (sum(matrix.weight.numel() for matrix in layer.linears) + 2 * model.hidden_size)  # type: ignore[attr-defined]
    stats = {
        "num_prompt_tokens": 6,
        "num_new_tokens": 8,
        "loaded_layers": 4,
        "preverifier_layers": 1,
        "rounds": 2,
        "num_drafted": 3,
    }
    assert weights.moved(stats) == 5 * (weights.layer + 10 * weights.kv) + 5 * weights.head


def test_a_new_record_says_where_it_ran() -> None:
    where = provenance(torch.device("cpu"), torch.float32)
    assert where["host"] == host_kind(cpu_fields())
    assert host_kind({"flags": "fpu hypervisor"}, containers=()) == "virtual machine"
    assert host_kind({"flags": "fpu"}, containers=(__file__,)) == "physical machine, in a container"
    assert host_kind({}) is None


def test_a_record_names_no_folder_above_a_checkpoint(checkpoint: Path) -> None:
    assert model_name(str(checkpoint)) == checkpoint.name
    assert model_name(str(checkpoint / "model.safetensors")) == "model.safetensors"
    assert model_name("someone/somewhere") == "someone/somewhere"


def test_contexts_that_fit() -> None:
    assert usable_contexts([4096, 128, 1024], 64, 2048) == [128, 1024]
    assert usable_contexts([64], 64, 128) == [64]
    with pytest.raises(ValueError, match="the model has 128 positions: no context of 65 leaves room for 64 new tokens"):
        usable_contexts([65], 64, 128)


def test_contexts_and_their_tables(checkpoint: Path, tmp_path: Path) -> None:
    record = tmp_path / "context.jsonl"
    arguments = ["--contexts", "16,32,128", "--max-new-tokens", "12", "--repeats", "2", "--output", str(record)]
    result = CliRunner().invoke(app, ["context", "--model", str(checkpoint), *arguments])
    assert result.exit_code == 0, result.output
    assert "128 tokens of context: beyond the model's 64 positions" in result.stderr
    found = read_record(record)
    runs = [line for line in found if line["kind"] == "decode"]
    assert len(runs) == 2 * 3 * 2
    assert all(line["outputs_equal"] for line in runs)
    assert [(line["repeat"], line["context"]) for line in runs[::3]] == [(0, 16), (0, 32), (1, 16), (1, 32)]  # in turn
    assert len(next(line for line in found if line["kind"] == "limits")["bandwidths"]) == 2
    seq_rounds = [line for line in found if line["kind"] == "turn"]
    assert [(line["repeat"], line["context"]) for line in seq_rounds] == [(0, 16), (1, 16)]  # 32 + 12 + 32 are too many
    assert all((line["prompt_tokens"], line["reused_tokens"]) == (16 + 12 + 16, 16 + 11) for line in seq_rounds)
    made = {table.name: table for table in tables(found)}
    assert list(made) == ["contexts", "turns"]
    assert [row[0] for row in made["contexts"].rows] == ["16", "32"]
    assert made["contexts"].title.endswith("keys and values in float32")
    assert [row[-2] for row in made["contexts"].rows] == ["0", "0"]
    limits = next(line for line in found if line["kind"] == "limits")
    plain = median(
        line["seconds"] / line["tokens"] for line in runs if (line["role"], line["context"]) == ("plain", 16)
    )
    read = 4 * limits["kv_bytes"] * (16 + 12 / 2) / limits["bytes_per_second"]  # layers, and half of the new tokens
    assert time_beside_reading(found, 16) == pytest.approx(plain - read)
    halved = ["--no-peers", "--kv-dtype", "bfloat16", "--output", str(record)]
    result = CliRunner().invoke(app, ["context", "--model", str(checkpoint), *arguments[:-2], *halved])
    assert result.exit_code == 0, result.output
    contexts = tables(read_record(record))[0]
    assert contexts.title.endswith("keys and values in bfloat16")
    limits = next(line for line in read_record(record) if line["kind"] == "limits")
    assert limits["kv_bytes"] == 2 * 8 * 2  # keys and values, head_dim, bytes
    assert all(row[-1] == "–" for row in contexts.rows)  # transformers' first token
    none = CliRunner().invoke(app, ["context", "--model", str(checkpoint), "--contexts", "64"])
    assert none.exit_code == 2
    assert "the model has 64 positions" in none.stderr


linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads its memory from Linux")


def test_every_byte_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one reader and by three, of files whose sizes three does not divide."""
    read: list[tuple[str, int, int]] = []
    monkeypatch.setattr(loading, "_read", lambda path, first, end: read.append((path.name, first, end)))
    files = [tmp_path / "a", tmp_path / "b"]
    for file, size in zip(files, (10, 4)):
        file.write_bytes(bytes(size))
    for readers in (1, 3):
        read.clear()
        assert read_speed(files, cached=True, readers=readers) > 0
        bytes_read = sorted((name, place) for name, first, end in read for place in range(first, end))
        assert bytes_read == [(file.name, place) for file in files for place in range(file.stat().st_size)]


@linux
@pytest.mark.parametrize("options", [["--cached"], []])
def test_a_record_of_loads_and_starts(
    options: list[str], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setattr(machine_commands, "STARTS", {"selfspec --version": ["-m", "selfspec", "--version"]})
    record = tmp_path / "load.jsonl"
    command = ["load", "--model", str(checkpoint), "--repeats", "2", "--output", str(record)]
    result = CliRunner().invoke(app, [*command, *options])
    assert result.exit_code == 0, result.output
    lines = read_record(record)
    loads = [line for line in lines if line["kind"] == "load"]
    assert [line["repeat"] for line in loads] == [0, 1]
    assert all(line["bytes"] == (checkpoint / "model.safetensors").stat().st_size for line in loads)
    assert all(line["peak"] >= line["base"] > 0 and line["held"] > 0 and line["seconds"] > 0 for line in loads)
    starts = [line for line in lines if line["kind"] == "start"]
    assert [(line["what"], line["repeat"]) for line in starts] == [("selfspec --version", 0), ("selfspec --version", 1)]
    assert str(tmp_path) not in json.dumps(lines) and str(checkpoint.parent) not in json.dumps(lines)
    report = CliRunner().invoke(app, ["report", str(record)])
    assert f"| {checkpoint.name} |" in report.output and "| selfspec --version |" in report.output


@linux
def test_a_checkpoint_that_does_not_load_says_why(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes()[:200])
    with pytest.raises(RuntimeError, match=f"{tmp_path.name} did not load: .*Error"):
        loading.loaded(tmp_path)


needs_kernels = pytest.mark.skipif(kernels() is None, reason="needs our kernels")


@needs_kernels
def test_products_by_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.commands.machine_commands.MATRICES", 2)  # they may stay in a cache
    path, chosen = tmp_path / "kernels.jsonl", [*dict.fromkeys((runnable_variants()[0], runnable_variants()[-1]))]
    command = ["kernels", "--repeats", "2", "--seconds", "0.001", "--weights", "int8", "--weights", "bfloat16"]
    command += [word for name in chosen for word in ("--variant", name)]
    result = CliRunner().invoke(app, [*command, "--rows", "1,3", "-o", str(path)])
    assert result.exit_code == 0, result.output
    lines = read_record(path)
    assert lines[0]["configuration"]["variants"] == chosen
    for variant in chosen:
        own = [line for line in lines if line["kind"] == "product" and line["variant"] == variant]
        assert [(line["repeat"], line["weights"], line["rows"]) for line in own] == [
            (repeat, weights, rows) for repeat in (0, 1) for weights in ("int8", "bfloat16") for rows in (1, 3)
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


def test_without_kernels_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise KernelsUnavailableError("no library")

    monkeypatch.setattr(machine_commands, "runnable_variants", none)
    result = CliRunner().invoke(app, ["kernels"])
    assert result.exit_code == 2 and "there is nothing to measure: no library" in result.output
