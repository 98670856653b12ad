"""The machine in records: bytes, limits and costs by hand; commands that measure contexts, products, servers and phases."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

import bench.calibration
from bench.calibration import _every_row, _timed, calibrate
from bench.commands import kernels_command
from bench.commands.kernels_command import KINDS
from bench.commands.load_command import measure_batch_call, measure_clients
from bench.commands.roofline_command import phase_bytes
from bench.engines.servers import Server, served_folder, words_tokenizer
from bench.machine import WeightBytes
from bench.provenance import public_argument
from bench.record import Line, matching, read_record
from bench.report.machine_tables import time_beside_reading
from bench.report.page import tables
from bench.report.throughput_tables import load_tables
from layerskip_models import LayerSkipModel, from_transformers, load_tokenizer
from layerskip_models.kernels.library import kernels, runnable_variants
from policies import MeasuredCost
from records import finished, shadow
from running_server import running_server
from selfspec import SelfSpecGenerator
from selfspec.engine.expected_cost import expected_cost
from tiny_llama import tiny_llama

Measured = Callable[..., tuple[list[Line], str]]
WEIGHTS = WeightBytes(layer=100, head=30, kv=2, draft_head=30)
COST = MeasuredCost(num_layers=4, layer_seconds=(1.0, 1.5), head_seconds=(0.5, 0.75), draft_seconds=0.25)


@pytest.fixture
def measured(invoke: Callable[..., Any], tmp_path: Path) -> Measured:
    """Run a command. Returns its record, and what it said on standard error."""

    def run(*arguments: object) -> tuple[list[Line], str]:
        record = tmp_path / "record.jsonl"
        result = invoke(*arguments, "--output", record)
        invoke("report", record)
        return read_record(record), result.stderr

    return run


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


def test_bytes_that_rounds_move() -> None:
    """Five layers that read 10 positions each, two heads and three of drafts; what is copied takes no pass of its own."""
    stats = {"num_prompt_tokens": 6, "num_new_tokens": 8, "loaded_layers": 4, "preverifier_layers": 1, "rounds": 2}
    assert WEIGHTS.moved({**stats, "num_drafted": 3, "num_copied": 0}) == 5 * (100 + 10 * 2) + 5 * 30
    assert WEIGHTS.moved({**stats, "num_drafted": 3, "num_copied": 2}) == 5 * (100 + 10 * 2) + 3 * 30


def test_the_roofline(checkpoint: Path, measured: Measured) -> None:
    arguments = ["--prompt-tokens", 12, "--max-new-tokens", 10, "--repeats", 2, "--num-samples", 1]
    lines, _ = measured("roofline", "--model", checkpoint, *arguments)
    runs = matching(lines, "phases")
    assert {line["policy"] for line in runs} >= {"ar", "auto"} and len(runs) == 3 * 2
    for line in runs:
        assert line["tokens"] == 9
        assert sum(line["seconds"].values()) == pytest.approx(line["decode_seconds"], rel=0.05)
        assert line["bytes"]["draft"] > 0 or not line["policy"].startswith("ls:")
        assert line["bytes"]["draft"] == 0 or line["policy"] != "ar"
    # Plain decoding has read 4 layers with the keys and values so far, and the head, for each of 9 tokens after the prompt's.
    (weights,) = matching(lines, "weights")
    kv = sum(range(13, 13 + 9)) * weights["kv_bytes"]
    plain = matching(runs, "phases", policy="ar")[0]["bytes"]["verify"]
    assert plain == 4 * (9 * weights["layer_bytes"] + kv) + 9 * weights["head_bytes"]
    assert [row[0] for row in tables(lines)[0].rows][::2] == ["`ar`", "`auto`"]


def test_contexts(checkpoint: Path, measured: Measured) -> None:
    arguments = ["--contexts", "16,32,128", "--max-new-tokens", 12, "--repeats", 2, "--kv-dtype", "bfloat16"]
    lines, said = measured("context", "--model", checkpoint, *arguments)
    assert "128 tokens of context: beyond the model's 64 positions" in said
    runs = matching(lines, "decode")
    assert len(runs) == 2 * 3 * 2
    assert [(line["repeat"], line["context"]) for line in runs[::3]] == [(0, 16), (0, 32), (1, 16), (1, 32)]  # in turn
    (made,) = tables(lines)
    assert [row[0] for row in made.rows] == ["16", "32"] and made.title.endswith("keys and values in bfloat16")
    bandwidths = matching(lines, "bandwidth")
    assert bandwidths[0]["kv_bytes"] == 2 * 8 * 2  # keys and values, head_dim, bytes
    plain = median(line["seconds"] / line["tokens"] for line in matching(runs, "decode", role="plain", context=16))
    speed = median(line["bytes_per_second"] for line in bandwidths)
    read = 4 * 32 * (16 + 12 / 2) / speed  # layers, bytes of a position, and half of the new tokens
    assert time_beside_reading(lines, 16) == pytest.approx(plain - read)


needs_kernels = pytest.mark.skipif(kernels() is None, reason="needs our kernels")


@needs_kernels
def test_products_by_variant(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_command, "MATRICES", 2)  # they may stay in a cache
    variant = runnable_variants()[-1]
    options = ["--seconds", 0.001, "--weights", "int8", "--weights", "bfloat16", "--rows", "1,3", "--repeats", 1]
    lines, _ = measured("kernels", "--variant", variant, *options)
    (line,) = matching(lines, "products", variant=variant)
    found = [(one["weights"], one["rows"]) for one in line["measured"]]
    assert found == [(weights, rows) for weights in ("int8", "bfloat16") for rows in (1, 3)]
    assert tables(lines)[0].rows[0][0] == variant


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_of_each_kind_is_nearly_the_one_it_was_made_of(kind: str) -> None:
    draw = torch.Generator().manual_seed(0)
    weight, x = torch.randn(64, 512, generator=draw), torch.randn(3, 512, generator=draw)
    expected = x @ weight.T
    most = {"float32": 1e-5, "bfloat16": 0.01, "int8": 0.03, "Q6_K": 0.05}.get(kind, 0.25)
    assert float((KINDS[kind](weight)(x) - expected).norm() / expected.norm()) < most


def test_clients_get_the_texts_of_generate_batch(checkpoint: Path) -> None:
    generator = SelfSpecGenerator.from_pretrained(checkpoint)
    prompts = ["ab", "fig", "be a", "cab", "head"]
    with running_server(generator, served_name="served") as running:
        port = int(running.base.rpartition(":")[2])
        server = Server(name="x", label="x", port=port, model="served", process=psutil.Process())
        line, own = measure_clients(server, prompts, 2, 6), measure_batch_call(generator, prompts, 2, 6)
        assert (line["output"], line["tokens"]) == (own["output"], own["tokens"]) and own["tokens"] == 30
        assert len(line["first_seconds"]) == 5
        assert all(0 < first < line["seconds"] for first in line["first_seconds"])
        runs = [{"kind": "load", "engine": "x", "clients": 2, **line, "seconds": seconds} for seconds in (1, 2, 4)]
        speed, waiting = load_tables([{"kind": "engine", "engine": "x", "label": "X"}, *runs])
        first = sorted(line["first_seconds"])
        assert speed.rows == (("X", "15.0"),)  # 30 tokens in 2 seconds, the median
        # p95 of five, three times over: at place 13.3 of 0 to 14, and both of its neighbours are the largest
        assert waiting.rows == (("X", f"{first[2]:.2f} / {first[4]:.2f}"),)
        with pytest.raises(RuntimeError, match="client") as raised:
            measure_clients(server, prompts, 2, 6, policy="ls:99-1")
        assert "status 400" in str(raised.value.__cause__)


def test_a_folder_without_a_tokenizer_gets_one(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        (tmp_path / name).symlink_to(checkpoint / name)
    with served_folder(tmp_path, None) as folder:
        assert load_tokenizer(folder)("w3 w0 w23")["input_ids"] == [3, 0, 23]
        assert SelfSpecGenerator.from_pretrained(folder).generate("w1 w2", max_new_tokens=3).stats.num_new_tokens == 3
        assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert not folder.exists()
    assert words_tokenizer(5).decode([4, 2]) == "w4 w2"


def test_a_record_names_no_folder_of_the_machine() -> None:
    arguments = ["/a/b.jsonl", "openvino:/a/int4", "ls:2-4+/a/b.py:C:x=1", "/a/b.py:C", "auto", "synthetic:medium"]
    shown = ["b.jsonl", "openvino:int4", "ls:2-4+b.py:C:x=1", "b.py:C", "auto", "synthetic:medium"]
    assert [*map(public_argument, arguments)] == shown


def test_a_call_is_made_once_before_it_is_timed() -> None:
    """Twice, here, where no seconds are spent on timing."""
    made: list[int] = []
    assert len(_timed([partial(made.append, 0), partial(made.append, 1)], torch.device("cpu"))) == 2
    assert made == [0, 1] * 3


def test_every_time_is_that_of_its_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that counts rows instead: a pass takes 4 s for every row, and a head 1 s."""
    model = from_transformers(tiny_llama(seed=1), layout="plain")
    ran: list[float] = []

    def counted(original: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def run(self: LayerSkipModel, hidden: Tensor, *rest: Any) -> Any:
            ran.append(seconds * len(hidden))
            return original(self, hidden, *rest)

        return run

    def timed(calls: list[Callable[[], object]], *rest: object) -> list[float]:
        seconds = []
        for call in calls:
            ran.clear()
            call()
            seconds.append(sum(ran))
        return seconds

    monkeypatch.setattr(LayerSkipModel, "run_layers", counted(LayerSkipModel.run_layers, 4.0))
    monkeypatch.setattr(LayerSkipModel, "choices", counted(LayerSkipModel.choices, 1.0))
    monkeypatch.setattr(bench.calibration, "_timed", timed)
    cost = calibrate(model)
    assert cost.layer_seconds == pytest.approx([4 * rows / model.num_layers for rows in range(1, 14)])
    assert cost.head_seconds == pytest.approx(range(1, 14))
    estimate = expected_cost(model)
    assert cost.draft_seconds / 5 == pytest.approx(estimate.draft_seconds / estimate.autoregressive())


def test_rows_between_the_timed_ones() -> None:
    # 2 rows came out cheaper than 1: held at 1. Halfway between 2 and 4 rows: (1 + 3) / 2.
    assert _every_row((1, 2, 4), [1.0, 0.5, 3.0]) == (1.0, 1.0, 2.0, 3.0)
