"""The machine in records: bytes, limits and costs by hand; commands that measure contexts, products, servers and phases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from bench.commands import kernels_command
from bench.commands.kernels_command import KINDS, matrix_of
from bench.commands.load_command import measure_batch_call, measure_clients
from bench.engines.servers import Server, network_folder, words_tokenizer
from bench.machine import WeightBytes
from bench.provenance import public_argument
from bench.record import Line, matching, read_record
from bench.report.machine_tables import time_beside_reading
from bench.report.page import tables
from bench.report.throughput_tables import load_tables
from layerskip_models import load_tokenizer
from layerskip_models.kernels.library import kernels, runnable_variants
from running_server import running_server
from selfspec import SelfSpecGenerator
from tiny_llama import tiny_llama

Measured = Callable[..., tuple[list[Line], str]]
WEIGHTS = WeightBytes(layer=100, head=30, kv=2, draft_head=30)


@pytest.fixture
def measured(invoke: Callable[..., Any], tmp_path: Path) -> Measured:
    """Run a command. Returns its record, and what it said on standard error."""

    def run(*arguments: object) -> tuple[list[Line], str]:
        record = tmp_path / "record.jsonl"
        result = invoke(*arguments, "--output", record)
        invoke("report", record)
        return read_record(record), result.stderr

    return run


def test_bytes_that_rounds_move() -> None:
    """Five layers that read 10 positions each, two heads and three of drafts; what is copied takes no pass of its own."""
    stats = {"num_prompt_tokens": 6, "num_new_tokens": 8, "loaded_layers": 4, "preverifier_layers": 1, "rounds": 2}
    assert WEIGHTS.moved({**stats, "num_drafted": 3, "num_copied": 0}) == 5 * (100 + 10 * 2) + 5 * 30
    assert WEIGHTS.moved({**stats, "num_drafted": 3, "num_copied": 2}) == 5 * (100 + 10 * 2) + 3 * 30
    assert WEIGHTS.verified(stats, 2) == 2 * 2 * (100 + 10 * 2) + 2 * 30  # two rounds of both layers and a head


def test_the_roofline(checkpoint: Path, measured: Measured) -> None:
    arguments = ["--prompt-tokens", 12, "--max-new-tokens", 10, "--repeats", 2, "--num-samples", 1]
    lines, _ = measured("roofline", "--model", checkpoint, *arguments)
    plain, fixed, auto = tables(lines)[0].rows
    assert [row[0] for row in (plain, fixed, auto)] == [f"selfspec, {name}" for name in ("plain", "ls:1-4", "auto")]
    (before, after) = matching(lines, "limits")
    bandwidth = max(before["bytes_per_second"], after["bytes_per_second"])
    # Plain decoding reads 4 layers and the head for each of 9 tokens after the first, and keys and values of 17 on average.
    needed = 9 * (4 * (before["layer_bytes"] + 17 * before["kv_bytes"]) + before["head_bytes"])
    assert plain[2] == f"{9 * bandwidth / needed:.1f}"
    runs = [line["stats"] for line in matching(lines, "sample", engine="selfspec:ar")]
    seconds = sum(run["seconds"] - run["prefill_seconds"] - run["calibration_seconds"] for run in runs)
    assert float(plain[1]) == pytest.approx(2 * 9 / seconds, rel=0.01)
    assert "%" in fixed[4] and "%" not in plain[4]  # only drafts read something


def test_contexts(checkpoint: Path, measured: Measured) -> None:
    arguments = ["--contexts", "16,32,128", "--max-new-tokens", 12, "--repeats", 2, "--kv-dtype", "bfloat16"]
    lines, said = measured("context", "--model", checkpoint, "--policy", "ls:1-2", "--policy", "auto", *arguments)
    assert "128 tokens of context: beyond the model's 64 positions" in said
    samples = matching(lines, "sample")
    assert len(samples) == 2 * 3 * 2
    reused = [line["stats"]["num_reused_tokens"] for line in samples]
    assert [place for place, count in enumerate(reused) if count < 8] == [0, 6]  # each context is read once
    (made,) = tables(lines)
    assert [row[0] for row in made.rows] == ["16", "32"] and made.title.endswith("keys and values in bfloat16")
    assert made.columns[2:4] == ("selfspec, ls:1-2", "selfspec, auto")
    limits = matching(lines, "limits")
    assert limits[0]["kv_bytes"] == 2 * 8 * 2  # keys and values, head_dim, bytes
    fastest = max(line["bytes_per_second"] for line in limits)
    read = 4 * 32 * (16 + 12 / 2) / fastest  # layers, bytes of a position, and half of the new tokens
    assert time_beside_reading(lines, 16, 50.0) == pytest.approx(1 / 50 - read)


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
    assert float((matrix_of(kind, weight)(x) - expected).norm() / expected.norm()) < most


@contextmanager
def served(generator: SelfSpecGenerator) -> Iterator[Server]:
    with running_server(generator, served_name="served") as running:
        port = int(running.base.rpartition(":")[2])
        server = Server(name="x", label="x", port=port, model="served", process=psutil.Process())
        yield server


def test_clients_get_the_texts_of_generate_batch(checkpoint: Path) -> None:
    generator = SelfSpecGenerator.from_pretrained(checkpoint)
    prompts = ["ab", "fig", "be a", "cab", "head"]
    with served(generator) as server:
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


def test_random_weights_are_served_with_a_word_for_every_id() -> None:
    with network_folder(tiny_llama()) as folder:
        assert load_tokenizer(folder)("w3 w0 w23")["input_ids"] == [3, 0, 23]
        generator, prompts = SelfSpecGenerator.from_pretrained(folder), ["w1 w2", "w5"]
        with served(generator) as server:
            line, own = measure_clients(server, prompts, 1, 3), measure_batch_call(generator, prompts, 1, 3)
        assert line["output"] == own["output"]
    assert not folder.exists()
    assert words_tokenizer(5).decode([4, 2]) == "w4 w2"


def test_a_record_names_no_folder_of_the_machine() -> None:
    arguments = ["/a/b.jsonl", "openvino:/a/int4", "ls:2-4+/a/b.py:C:x=1", "/a/b.py:C", "auto", "synthetic:medium"]
    shown = ["b.jsonl", "openvino:int4", "ls:2-4+b.py:C:x=1", "b.py:C", "auto", "synthetic:medium"]
    assert [*map(public_argument, arguments)] == shown
