"""The commands that compare engines and settings, whole, with llama.cpp if it is there; and mistakes, which end them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.engines.gguf_file import write_gguf
from bench.record import matching, read_record
from layerskip_models.kernels.library import kernels
from selfspec.defaults import fixed_policy
from tiny_llama import tiny_llama, tiny_tokenizer
from tiny_training import write_checkpoint

RUN = ["--prompt-tokens", "12", "--max-new-tokens", "10", "--repeats", "2", "--warmups", "1", "--num-samples", "2"]


SHAPE = {"hidden_size": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate_size": 192}
"""Rows that all types of weights hold."""


def engines_of(lines):
    return [line["engine"] for line in matching(lines, "engine")]


def test_peers_measures_all_engines_and_its_record_makes_tables(invoke, checkpoint, tmp_path):
    record = tmp_path / "peers.jsonl"
    command = ["peers", "--model", checkpoint, "--policy", "ls:2-3", "--warmed-up", "auto", "--output", record, *RUN]
    invoke(*command)
    lines = read_record(record)
    own = ["selfspec:ar", "selfspec:ls:2-3", "selfspec:auto:warmed-up"]
    theirs = ["transformers:generate", "transformers:early-exit:2-3", "transformers:early-exit:2-default"]
    assert engines_of(lines) == own + theirs
    samples = matching(lines, "sample")
    assert len(samples) == 6 * 2 * 2
    assert all(line["num_new_tokens"] == 10 and line["seconds"] > 0 for line in samples)
    assert {line["first_difference"] for line in matching(lines, "output")} == {None}
    assert lines[0]["provenance"]["dtype"] == "float32"
    assert str(tmp_path) not in json.dumps(lines)  # nothing of this machine's folders
    before = record.read_bytes()
    invoke(*command)
    assert record.read_bytes() == before  # nothing is left to measure
    text = invoke("report", record).output
    for part in ("| selfspec, ls:2-3 |", "× transformers", "rows marked warmed up keep what they learned"):
        assert part in text
    assert str(tmp_path) not in text


@pytest.mark.skipif(kernels() is None, reason="needs the native library")
def test_rounded_weights_and_files_are_judged_each_among_themselves(invoke, tmp_path, monkeypatch):
    """And a peer that is not installed is left out in one line."""
    monkeypatch.setattr("bench.engines.catalogue.find_spec", lambda name: None if name == "llama_cpp" else 1)
    model, record = write_checkpoint(tmp_path / "tiny", **SHAPE), tmp_path / "peers.jsonl"
    asked = ["selfspec:int8", "selfspec:Q8_0", "selfspec:IQ4_NL", "llama.cpp:Q8_0"]
    options = [word for name in asked for word in ("--engine", name)]
    result = invoke("peers", "--model", model, "--policy", "auto", *options, "--output", record, *RUN)
    said = [line for line in result.stderr.splitlines() if "llama" in line]
    assert said == ["llama.cpp is left out: it needs llama-cpp-python; pip install llama-cpp-python"]
    lines = read_record(record)
    for kind in ("int8", "Q8_0", "IQ4_NL"):
        drafting = matching(lines, "output", engine=f"selfspec:{kind}:auto", reference=f"selfspec:{kind}:ar")
        assert [line["first_difference"] for line in drafting] == [None, None]
    assert "| selfspec int8, auto |" in invoke("report", record).output


@pytest.fixture
def file(tmp_path):
    """A GGUF file with its tokenizer beside it, which has a chat template."""
    write_gguf(tiny_llama(**SHAPE, seed=4, max_position_embeddings=256), tmp_path / "tiny.gguf", "Q4_1")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %} b"
    tokenizer.save_pretrained(tmp_path)
    return tmp_path / "tiny.gguf"


def test_one_file_in_all_engines_on_chat_prompts(invoke, file, tmp_path, monkeypatch):
    prompts, record = tmp_path / "prompts.jsonl", tmp_path / "chat.jsonl"
    rows = ({"id": f"{i}", "task": "tr"[i % 2], "prompt": "abc" * i + "ab"} for i in range(3))
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr("bench.engines.catalogue.find_spec", lambda name: None)
    options = ["--chat", "--warmed-up", "auto", "--max-new-tokens", 6, "--repeats", 2, "--num-samples", 3]
    invoke("peers", "--model", file, "--prompts", prompts, "--output", record, *options)
    lines = read_record(record)
    assert engines_of(lines) == ["selfspec:ar", "selfspec:auto", "selfspec:auto:warmed-up"]
    samples = matching(lines, "sample")
    assert len(samples) == 3 * 3 * 2 and all(2 <= line["num_new_tokens"] <= 6 for line in samples)
    assert {line["first_difference"] for line in matching(lines, "output")} == {None}
    assert str(tmp_path) not in json.dumps(lines)
    assert "| auto, warmed up ÷ plain, decoding |" in invoke("report", record).output


def test_sweep_writes_the_setting_that_generate_finds(invoke, checkpoint, tmp_path):
    record = tmp_path / "sweep.jsonl"
    arguments = ["--exit-layers", "1-3", "--num-speculations", "2,4", "--num-timed", "2", "--write"]
    assert fixed_policy(str(checkpoint), 4) == "ls:1-4"  # the rule for unknown checkpoints
    invoke("sweep", "--model", checkpoint, "--output", record, *arguments, *RUN)
    lines = read_record(record)
    cells = {line["policy"]: line for line in matching(lines, "cell")}
    assert {*cells} == {f"ls:{layer}-{length}" for layer in "123" for length in "24"}
    timed = sorted(cells, key=lambda policy: -cells[policy]["predicted_speedup"])[:2]
    (best,) = matching(lines, "best")
    assert best["policy"] in timed
    assert engines_of(lines) == ["selfspec:ar", *(f"selfspec:{policy}" for policy in timed)]
    for policy in timed:  # replay foretold what the timed runs did
        own = matching(lines, "sample", engine=f"selfspec:{policy}")
        assert sum(line["stats"]["rounds"] for line in own) == 2 * cells[policy]["rounds"]
    setting = json.loads((checkpoint / "selfspec.json").read_text(encoding="utf-8"))
    assert setting["policy"] == best["policy"] == fixed_policy(str(checkpoint), 4)
    (checkpoint / "selfspec.json").unlink()
    assert f"`{best['policy']}`" in invoke("report", record).output


MISTAKES = {
    "peers --model MODEL --engine selfspec:Q4": "--engine must be transformers, selfspec:KIND with a KIND of int8, int4",
    "peers --model MODEL --engine llama.cpp:Q4": "llama.cpp or ik_llama.cpp with :KIND of BF16, F16, Q8_0, Q4_K_M, Q4_0",
    "peers --model MODEL --engine llama.cpp": "needs a GGUF file as --model, or a kind of weights",
    "batch --model MODEL --engine vllm": "--engine must be transformers",
    "peers --model MODEL --prompts missing.jsonl": "missing.jsonl",
    "sweep --model MODEL --exit-layers 2-x": '--exit-layers must look like "1-8"',
    "sweep --model MODEL --num-speculations 0-2": "--num-speculations must be numbers from 1 on",
    "sweep --model someone/somewhere --write": "--write needs a local checkpoint folder",
    "run --model MODEL --temperature 0.5": "--temperature has no effect on greedy decoding",
    "run --model MODEL --warmed-up autoo": "unknown policy",
    "run --model MODEL --warmed-up ls:1-2": "--warmed-up ls:1-2: this policy learns nothing",
    "run --model MODEL --task poetry": "no prompts of task poetry; there are code, english",
    "run --model MODEL --policy dv:9": "exit_layer must be in [1, 3]",
    "load --model someone/somewhere": "--model must be a folder or synthetic:SHAPE",
    "context --model MODEL --contexts 1": "the model has 64 positions: no context of 1 leaves room for 64 new tokens",
    "kernels --variant none": "this machine runs the variants",
    "kernels --weights int3": "--weights must be of float32, bfloat16, int8, int4",
    "report": "name at least one record",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_mistakes_end_with_one_line_and_status_2(command, invoke, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*(checkpoint if word == "MODEL" else word for word in command.split()), status=2)
    (line,) = [line for line in result.stderr.splitlines() if line and not line.startswith("Loading weights")]
    assert line.startswith("error: ") and MISTAKES[command] in line


def test_rows_that_q8_cannot_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of 32 numbers; this model's are of 16, 24"):
        write_gguf(tiny_llama(), tmp_path / "model.gguf", "Q8_0")


def test_peers_with_llama_cpp(invoke: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llama_cpp")
    checkpoint, temporary, record = tmp_path / "tiny", tmp_path / "temporary", tmp_path / "peers.jsonl"
    temporary.mkdir()
    own: dict[str, Any] = {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3, "dtype": torch.bfloat16}
    write_checkpoint(checkpoint, **SHAPE, **own)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    options = ["--prompt-tokens", "12", "--max-new-tokens", "10", "--repeats", "2", "--num-samples", "2"]
    engines = ["--engine", "llama.cpp:BF16", "--engine", "llama.cpp:Q8_0", "--output", str(record)]
    invoke("peers", "--model", checkpoint, *engines, *options)
    assert not list(temporary.rglob("*.gguf"))
    lines = read_record(record)
    outputs = matching(lines, "output")
    assert {line["engine"] for line in outputs} >= {"llama.cpp:BF16", "llama.cpp:Q8_0"}
    assert {line["reference"] for line in outputs} == {"selfspec:ar"}
    assert {line["repeats_that_differ"] for line in outputs} == {0}  # a run does not depend on the one before
    assert lines[0]["provenance"]["versions"]["llama.cpp"].count("(") == 1
    assert "| llama.cpp BF16 |" in invoke("report", record).output
