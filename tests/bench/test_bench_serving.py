"""Measuring a server: its clients against a server in this process, its tables by hand."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from bench.engines.servers import Server, served_folder, words_tokenizer
from bench.machine.serving_load import measure_batch_call, measure_clients
from bench.report.throughput_tables import serving_tables
from layerskip_models import load_tokenizer
from running_server import running_server
from selfspec import SelfSpecGenerator


def test_clients_get_the_texts_of_generate_batch(checkpoint: Path) -> None:
    generator = SelfSpecGenerator.from_pretrained(checkpoint)
    prompts = ["ab", "fig", "be a", "cab", "head"]
    with running_server(generator, served_name="served") as running:
        port = int(running.base.rpartition(":")[2])
        server = Server(name="x", label="x", port=port, model="served", process=psutil.Process())
        line, texts = measure_clients(server, prompts, 2, 6)
        own, expected = measure_batch_call(generator, prompts, 2, 6, None)
        assert texts == expected
        assert line["tokens"] == own["tokens"] == 30
        assert len(line["first_seconds"]) == 5
        assert all(0 < first < line["seconds"] for first in line["first_seconds"])
        runs = [{"kind": "serving", "engine": "x", "clients": 2, **line, "seconds": seconds} for seconds in (1, 2, 4)]
        speed, waiting = serving_tables([{"kind": "run", "engines": {"x": "X"}}, *runs])
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
        tokenizer = load_tokenizer(folder)
        assert tokenizer("w3 w0 w23")["input_ids"] == [3, 0, 23]
        assert (folder / "model.safetensors").is_symlink()
        assert SelfSpecGenerator.from_pretrained(folder).generate("w1 w2", max_new_tokens=3).stats.num_new_tokens == 3
    assert not folder.exists()
    with served_folder(checkpoint, None) as folder:
        assert load_tokenizer(folder)("ab")["input_ids"] == load_tokenizer(checkpoint)("ab")["input_ids"]
    assert words_tokenizer(5).decode([4, 2]) == "w4 w2"
