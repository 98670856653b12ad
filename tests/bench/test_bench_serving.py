"""Measuring a server: its clients against a server in this process, its tables by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.engines.servers import Server, served_folder, words_tokenizer
from bench.machine.serving_load import measure_batch_call, measure_clients, measure_overhead
from bench.report.serving_tables import serving_tables
from layerskip_models import load_tokenizer
from running_server import running_server
from selfspec import SelfSpecGenerator


def test_clients_get_the_texts_of_generate_batch(checkpoint: Path) -> None:
    generator = SelfSpecGenerator.from_pretrained(checkpoint)
    prompts = ["ab", "fig", "be a", "cab", "head"]
    with running_server(generator, model_name="served") as running:
        port = int(running.base.rpartition(":")[2])
        server = Server(name="x", label="x", port=port, model="served", process=psutil.Process())
        line, texts = measure_clients(server, prompts, 2, 6)
        own, expected = measure_batch_call(generator, prompts, 2, 6, None)
        assert texts == expected
        assert line["tokens"] == own["tokens"] == 30
        assert len(line["first_seconds"]) == 5
        assert all(0 < first < line["seconds"] for first in line["first_seconds"])
        pairs = measure_overhead(generator, server, prompts[0], 6, "ar", 2)
        assert [pair["outputs_equal"] for pair in pairs] == [True, True]
        with pytest.raises(RuntimeError, match="client") as raised:
            measure_clients(server, prompts, 2, 6, policy="ls:99-1")
        assert "status 400" in str(raised.value.__cause__)


def test_tables_by_hand() -> None:
    def line(engine: str, clients: int, seconds: float, first: list[float] | None) -> dict[str, Any]:
        found = {"kind": "serving", "engine": engine, "clients": clients, "tokens": 100, "seconds": seconds}
        return {**found, "first_seconds": first}

    where = {"device": "cpu", "cpu": "a CPU", "dtype": "float32", "threads": 2}
    single = {"served_first_seconds": 0.012, "served_seconds": 0.105, "own_first_seconds": 0.010, "own_seconds": 0.1}
    lines = [
        {
            "kind": "run",
            "command": "serving",
            "engines": {"a": "A", "b": "B"},
            "configuration": {"model": "m"},
            "provenance": where,
        },
        *(line("a", 1, seconds, None) for seconds in (1.0, 2.0, 4.0)),
        line("b", 1, 2.0, [0.1, 0.2]),
        line("b", 1, 2.0, [0.3]),
        {"kind": "overhead", **single},
    ]
    speed, waiting, added = serving_tables(lines)
    assert speed.rows == (("A", "50.0"), ("B", "50.0"))  # 100 tokens in 2 seconds, the median
    # p95 of 0.1, 0.2, 0.3: at place 1.9 of 0 to 2, so 0.29
    assert waiting.rows == (("B", "0.20 / 0.29"),)
    assert added.rows == (("first token", "10.0", "12.0", "2.0"), ("whole answer", "100.0", "105.0", "5.0"))


def test_a_folder_without_a_tokenizer_gets_one(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        (tmp_path / name).symlink_to(checkpoint / name)
    with served_folder(tmp_path, None) as folder:
        tokenizer = load_tokenizer(folder)
        assert tokenizer("w3 w0 w23")["input_ids"] == [3, 0, 23]
        assert (folder / "model.safetensors").is_symlink()
        assert SelfSpecGenerator.from_pretrained(folder).generate("w1 w2", max_new_tokens=3).stats.num_new_tokens == 3
    assert not folder.exists()
    with served_folder(checkpoint, None) as folder:
        assert load_tokenizer(folder)("ab")["input_ids"] == load_tokenizer(checkpoint)("ab")["input_ids"]
    assert words_tokenizer(5).decode([4, 2]) == "w4 w2"
