"""Decoding behind contexts of several lengths: the cache that is kept, t' by hand, the whole command."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.commands.bench_app import app
from bench.machine.context import usable_contexts
from bench.record import Line, read_record
from bench.report.context_tables import time_beside_reading
from bench.report.markdown import tables
from tiny_llama import tiny_llama, tiny_tokenizer


def lines(plain: dict[int, float]) -> list[Line]:
    """Seconds per token of plain decoding by context; 10 layers that keep 4 bytes per position, 1000 bytes a second."""
    made: list[Line] = [
        {
            "kind": "run",
            "configuration": {"model": "m", "num_layers": 10, "max_new_tokens": 20, "prefill": True},
            "provenance": {"device": "cpu", "cpu": "A CPU", "dtype": "float32", "threads": 1},
        },
        {"kind": "limits", "bytes_per_second": 1000.0, "kv_bytes": 4},
    ]
    for context, seconds in plain.items():
        made.append({"kind": "prefill", "context": context, "time_to_first_token": 1.0})
        made.append(
            {
                "kind": "decode",
                "context": context,
                "role": "plain",
                "policy": "ar",
                "seconds": 5 * seconds,
                "tokens": 5,
                "outputs_equal": True,
            }
        )
    return made


def test_time_beside_reading_by_hand() -> None:
    # 10 layers * 4 bytes * (90 + 10) positions at 1000 bytes/s: 4 s; behind 990: 40 s.
    record = lines({90: 7.0, 990: 46.0})
    assert time_beside_reading(record, 90) == pytest.approx(3.0)
    assert time_beside_reading(record, 990) == pytest.approx(6.0)


def test_contexts_that_fit() -> None:
    assert usable_contexts([4096, 128, 1024], 64, 2048) == [128, 1024]
    assert usable_contexts([64], 64, 128) == [64]
    with pytest.raises(ValueError, match="the model has 128 positions: no context of 65 leaves room for 64 new tokens"):
        usable_contexts([65], 64, 128)


def test_the_command_and_its_tables(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    tiny_llama(seed=3).save_pretrained(checkpoint)
    tiny_tokenizer().save_pretrained(checkpoint)
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
    memory = {line["context"]: line for line in found if line["kind"] == "memory"}
    assert memory[32]["kv_bytes"] == 4 * 2 * 8 * 4 * (32 + 12)  # layers, keys and values, head_dim, bytes, positions
    assert all(line["peak_bytes"] > line["kv_bytes"] for line in memory.values())
    seq_rounds = [line for line in found if line["kind"] == "turn"]
    assert [(line["repeat"], line["context"]) for line in seq_rounds] == [(0, 16), (1, 16)]  # 32 + 12 + 32 are too many
    assert all((line["prompt_tokens"], line["reused_tokens"]) == (16 + 12 + 16, 16 + 11) for line in seq_rounds)
    made = {table.name: table for table in tables(found)}
    assert list(made) == ["contexts", "turns", "memory"]
    assert [row[0] for row in made["contexts"].rows] == ["16", "32"]
    assert made["contexts"].title.endswith("keys and values in float32")
    assert [row[-2] for row in made["contexts"].rows] == ["0", "0"]
    unread = ["--no-prefill", "--no-peers", "--no-memory", "--kv-dtype", "bfloat16", "--output", str(record)]
    result = CliRunner().invoke(app, ["context", "--model", str(checkpoint), *arguments[:-2], *unread])
    assert result.exit_code == 0, result.output
    (contexts,) = tables(read_record(record))
    assert contexts.title.endswith("keys and values in bfloat16, and random: the prompt was not read")
    limits = next(line for line in read_record(record) if line["kind"] == "limits")
    assert limits["kv_bytes"] == 2 * 8 * 2  # keys and values, head_dim, bytes
    assert all(row[-3:] == ("–", "0", "–") for row in contexts.rows)  # neither's first token
    both = CliRunner().invoke(app, ["context", "--model", str(checkpoint), "--no-prefill"])
    assert "--no-prefill needs --no-peers and --no-memory" in both.stderr
    none = CliRunner().invoke(app, ["context", "--model", str(checkpoint), "--contexts", "64"])
    assert none.exit_code == 2
    assert "the model has 64 positions" in none.stderr
