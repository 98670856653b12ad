"""Engines at 16, 8 and 4 bits: converters that refuse, peers that crash, tables by hand. No other engine is needed."""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from bench.commands import converted_peers
from bench.commands.bench_app import app
from bench.engines.converted import CONVERTERS, convert, converted
from bench.engines.own_texts import SelfSpecTexts
from bench.engines.peer_process import Peer
from bench.machine.throughput import BatchRun, after_prompts
from bench.record import Line, read_record
from bench.report.bits_tables import bits_headline, bits_tables
from selfspec import SelfSpecGenerator

CONVERTER = """#!/bin/sh
# `python -c`: whether a converter is there. `python -m`: makes its folder, but refuses int4.
[ "$1" = -c ] && case "$2" in *optimum*) exit 1;; *) exit 0;; esac
for word in "$@"; do
  [ "$word" = int4 ] && { echo loading; echo "no int4 in $PWD"; exit 2; }
  [ "$last" = --output_dir ] || [ "$last" = -o ] && mkdir -p "$word" && echo "$HF_HUB_OFFLINE" > "$word/offline"
  last=$word
done
exit 0
"""


@pytest.fixture
def python(tmp_path: Path) -> str:
    """A Python with two of the converters."""
    path = tmp_path / "python"
    path.write_text(CONVERTER)
    path.chmod(0o755)
    return str(path)


def test_what_converters_are_asked_for(tmp_path: Path) -> None:
    """Each kind once, from the folder with the weights to its own."""
    for engine, converter in CONVERTERS.items():
        assert sorted(converter.kinds) == [4, 8, 16]
        for kind in converter.kinds.values():
            target = tmp_path / f"{engine}-{kind}"
            command = converter.command("python", tmp_path, kind, target)
            assert command[:3] == ["python", "-m", converter.module]
            assert command.count(kind) == 1
            assert {str(tmp_path / "weights"), str(target)} <= set(command)
    assert CONVERTERS["openvino"].command("python", tmp_path, "int4", tmp_path)[-2:] == ["--group-size", "64"]
    assert "--group-size" not in CONVERTERS["openvino"].command("python", tmp_path, "int8", tmp_path)


def test_a_converter_that_refuses_is_quoted(python: str, tmp_path: Path) -> None:
    assert convert("ctranslate2", 8, tmp_path, python) is None
    assert (converted("ctranslate2", 8, tmp_path) / "offline").read_text() == "1\n"  # nothing is downloaded
    assert str(convert("ctranslate2", 4, tmp_path, python)).startswith("no int4 in ")
    with pytest.raises(ValueError, match="its converter refused int4: no int4 in "):
        converted("ctranslate2", 4, tmp_path)
    with pytest.raises(ValueError, match="has no ctranslate2-bfloat16: make it with selfspec-bench convert"):
        converted("ctranslate2", 16, tmp_path)


def test_the_command_converts(python: str, checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "out" / "weights")
    arguments = ["convert", "--output-dir", str(tmp_path / "out"), "--python", python]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "OpenVINO GenAI is left out: --python has no optimum-intel[openvino]" in result.stderr
    assert "onnxruntime-fp32: written\n" in result.stdout
    assert "ctranslate2-int4: refused: no int4 in " in result.stdout
    assert CliRunner().invoke(app, arguments).exit_code == 0  # what is there stays


def test_the_command_writes_weights_and_files(checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    result = CliRunner().invoke(
        app, ["convert", "--model", str(checkpoint), "--output-dir", str(tmp_path), "--python", "false"]
    )
    if result.exit_code == 0:
        assert {"weights", "BF16.gguf", "Q8_0.gguf", "Q4_0.gguf"} <= {path.name for path in tmp_path.iterdir()}
    else:  # rows that 8 bits cannot hold
        assert "needs rows of a multiple of 32 numbers" in result.stderr


class FakeTexts:
    """Continues each text by its last id, as `auto` by the next one, until `end` is called for several texts."""

    def __init__(self, name: str, label: str, end: Callable[[], object] | None = None, short: bool = False) -> None:
        self.name, self.label, self._end, self._short = name, label, end, short
        self.weights: str | None = label

    def run(self, prompts: Sequence[Tensor], max_new_tokens: int) -> BatchRun:
        if len(prompts) > 1 and self._end is not None:
            self._end()
        new = max_new_tokens - (self._short and len(prompts) > 1)
        step = int(self.name.endswith(":auto"))
        return after_prompts([[int(prompt[-1]) + step] * new for prompt in prompts], 3.0, 1.0)


def _peer(engine: FakeTexts) -> Peer:
    loading = {
        "load_seconds": 1.0, "import_seconds": 2.0, "bytes_before": 1, "peak_loading_bytes": 2, "rounding": "nothing",
    }  # fmt: skip
    where = {
        "device": "cpu", "cpu": "A CPU", "dtype": "float32", "threads": 2, "cores": 2, "ram_gib": 1, "command": "x",
        "time": "t", "commit": "c", "python": "3", "torch": "2", "transformers": "5", "os": "o", "load_average": 1,
        "cpu_family": None,
    }  # fmt: skip
    return Peer(batches=[engine], about={"loading": loading, "versions": where})


def _crash() -> None:
    faulthandler.disable()  # pytest's
    os.write(2, b"illegal instruction in tile_load\n")
    os.kill(os.getpid(), signal.SIGILL)


def _refuse(*arguments: Any) -> Peer:
    raise RuntimeError("these weights\nare not for us")


def test_one_that_crashes_and_one_that_refuses_are_listed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder / "weights")
    for name in ("openvino-int4", "onnxruntime-int4"):
        (folder / name).mkdir()
    (folder / "ctranslate2-int4.refused.txt").write_text("no int4\n")
    monkeypatch.setattr("bench.commands.started_peers.START_METHOD", "fork")
    monkeypatch.setattr(converted_peers, "find_spec", lambda name: None if name == "ik_llama_cpp" else name)
    monkeypatch.setattr(converted_peers, "own_peer", lambda _, policy, *names: _peer(FakeTexts(*names)))
    monkeypatch.setattr(converted_peers, "llama_cpp_peer", lambda *a: _peer(FakeTexts("l", a[-1], _crash)))
    monkeypatch.setattr(converted_peers, "openvino_peer", _refuse)
    monkeypatch.setattr(converted_peers, "onnxruntime_peer", lambda *a: _peer(FakeTexts("o", a[1], short=True)))
    record = tmp_path / "bits.jsonl"
    options = ["--bits", "4", "--num-samples", "2", "--prompt-tokens", "6", "--max-new-tokens", "5", "--texts", "3"]
    command = ["peers", "--converted", str(folder), "--repeats", "2", "--output", str(record), *options]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    lines = read_record(record)
    assert list(lines[0]["engines"]) == ["selfspec:4:ar", "selfspec:4:auto"]
    lost = {line["label"]: line["reason"] for line in lines if line["kind"] == "lost"}
    assert lost.pop("llama.cpp, Q4_0").endswith("it was ended by SIGILL (illegal instruction in tile_load)")
    assert lost == {
        "ik_llama.cpp, Q4_0": "it needs ik-llama-cpp-python: pip install ik-llama-cpp-python",
        "OpenVINO GenAI, int4": "OpenVINO GenAI, int4 is lost: RuntimeError: these weights are not for us",
        "ONNX Runtime GenAI, int4": "ONNX Runtime GenAI, int4 returned [4] tokens, not 5",
        "CTranslate2, int4": "its converter refused int4: no int4",
    }
    runs = [line for line in lines if line["kind"] == "batch"]
    assert sorted((line["engine"], line["texts"]) for line in runs) == [
        (name, texts) for name in ("selfspec:4:ar", "selfspec:4:auto") for texts in (1, 1, 1, 1, 3, 3)
    ]
    # Whoever is first in a turn, all are compared with plain decoding.
    assert {(line["engine"], line["equal_share"]) for line in runs} == {
        ("selfspec:4:ar", 1.0),
        ("selfspec:4:auto", 0.0),
    }
    # Two loads of ours and, of the others, one that was measured or was lost on the way: those of lost ones are not kept.
    assert sum(line["kind"] == "loading" for line in lines) == 4
    assert "| left out |" in CliRunner().invoke(app, ["report", str(record)]).output
    assert "left out: its converter refused int4: no int4" in result.stderr
    assert str(tmp_path) not in json.dumps(lines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bits", "4,5"], "--bits must be of 16, 8, 4, got 5"),
        (["--int8"], "--converted brings its own weights and engines: leave out --model"),
        ([], "has no weights: make it with selfspec-bench convert"),
    ],
)
def test_mistakes_are_one_line(options: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["peers", "--converted", str(tmp_path), *options])
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.count("\n") == 1


def record() -> list[Line]:
    """selfspec plain and by default, and another engine, at 8 bits. Two prompts alone, four texts together, two repeats."""
    engines = {"selfspec:8:ar": "selfspec, plain, Q8_0", "selfspec:8:auto": "selfspec, Q8_0", "x": "X, int8"}
    lines: list[Line] = [
        {
            "kind": "run", "engines": engines, "command": "peers --converted",
            "configuration": {"model": "m", "texts": [1, 4], "max_new_tokens": 5, "repeats": 2},
            "provenance": {"device": "cpu", "cpu": "A CPU", "dtype": "float32", "threads": 2},
        },
        {"kind": "lost", "engine": "y", "label": "Y, int8", "reason": "no room"},
    ]  # fmt: skip
    seconds = {"selfspec:8:ar": 1.0, "selfspec:8:auto": 0.5, "x": 0.25}
    for engine, own in seconds.items():
        for repeat in range(2):
            for group, texts in ((0, 1), (1, 1), (2, 4)):
                lines.append(
                    {
                        "kind": "batch", "engine": engine, "bits": 8, "group": group, "texts": texts, "repeat": repeat,
                        "decode_tokens": 4 * texts, "decode_seconds": own * (1 + repeat) * (1 + group),
                        "prompt_tokens": 10 * texts, "prompt_seconds": 1 / own, "equal_share": 0.5 * group / 2 + 0.5,
                    }
                )  # fmt: skip
        for load in (1.0, 2.0):
            lines.append(
                {
                    "kind": "loading", "engine": engine, "bits": 8, "load_seconds": load + own, "import_seconds": 3.0,
                    "rounding": "nothing", "bytes_before": 100 << 20, "peak_loading_bytes": 150 << 20,
                    "peak_bytes": 170 << 20 if engine == "x" else 120 << 20,
                }
            )  # fmt: skip
    return lines


def test_medians_and_places_by_hand() -> None:
    first, engines, rounding = bits_tables(record())
    # Plain alone: 4 tokens in 1 and 2 s, median 3; in 2 and 4 s, 1.5; over prompts 2.25. Together 16 in 3 and 6 s: 4.
    # A prompt's 10 tokens take 1 s; 40 of four texts, too. Loads: 2 and 3 s. Memory 150 - 100 MiB.
    rows = {row[0]: row[1:] for row in engines.rows}
    assert rows["selfspec, plain, Q8_0"] == ("2", "4", "10", "40", "2.50", "50")
    assert rows["**8 bits**"] == ("",) * 6
    # Of ours the default counts: half as fast as X in decoding, twice in prompts, at 10 · .5.
    assert [row[1] for row in first.rows] == [
        "**X 9**, selfspec 4 (2nd)",
        "**X 16**, selfspec 8 (2nd)",
        "**selfspec 5**, X 2",
        "**selfspec 20**, X 10",
        "**X 1.75**, selfspec 2.00 (2nd)",
        "**selfspec 50**, X 70",
    ]
    assert first.columns == ("", "8 bits")
    assert rounding.rows[0] == ("selfspec, plain, Q8_0", "nothing", "3.0", "75 %")
    assert rounding.rows[-1] == ("Y, int8", "left out: no room", "–", "–")
    assert "3 engines, 1 and 4 texts, 5 new tokens each, 2 runs of each" in bits_headline(record())


def test_ours_continues_one_text_and_many_alike(engine64: SelfSpecGenerator) -> None:
    ours = SelfSpecTexts(engine64, "ls:2-3", "ours", "ours")
    prompts = [torch.tensor([1, 5, 9]), torch.tensor([2, 2, 7])]
    together = ours.run(prompts, 9)
    assert together.tokens == [ours.run([prompt], 9).tokens[0] for prompt in prompts]
    for run in (together, ours.run(prompts[:1], 9)):
        assert run.prompt_seconds is not None and run.decode_seconds is not None
        assert run.prompt_seconds > 0 and run.decode_seconds > 0


def _module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(contents)
    monkeypatch.setitem(sys.modules, name, module)


def test_ctranslate2_is_given_the_ids_as_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[list[str]], dict[str, Any]]] = []

    class Generator:
        compute_type = "int8_float32"

        def __init__(self, path: str, **options: Any) -> None:
            assert options["inter_threads"] == 1

        def generate_batch(self, texts: list[list[str]], **options: Any) -> list[Any]:
            asked.append((texts, options))
            return [SimpleNamespace(sequences_ids=[[4] * options["max_length"]]) for _ in texts]

    _module(monkeypatch, "ctranslate2", Generator=Generator, __version__="4")
    monkeypatch.delitem(sys.modules, "bench.engines.ctranslate2", raising=False)
    from bench.engines.ctranslate2 import CTranslate2Texts

    (tmp_path / "vocabulary.json").write_text(json.dumps(["a", "b", "c"]))
    engine = CTranslate2Texts(tmp_path, "c", "C")
    run = engine.run([torch.tensor([0, 2]), torch.tensor([1, 1])], 3)
    assert run.tokens == [[4, 4, 4]] * 2 and run.decode_tokens == 4
    assert [(texts, options["max_length"]) for texts, options in asked] == [
        ([["a", "c"], ["b", "b"]], n) for n in (1, 3)
    ]
    assert all(options["min_length"] == options["max_length"] and options["end_token"] == [] for _, options in asked)
    assert engine.arithmetic == "int8_float32"
    monkeypatch.delitem(sys.modules, "bench.engines.ctranslate2")


def test_onnxruntime_takes_one_step_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overlaid: list[dict[str, Any]] = []
    searched: list[dict[str, Any]] = []

    class Generator:
        def __init__(self, model: Any, settings: Any) -> None:
            self.texts: Any = None

        def append_tokens(self, ids: Any) -> None:
            self.texts = ids

        def generate_next_token(self) -> None:
            self.texts = np.concatenate((self.texts, self.texts[:, -1:] + 1), axis=1)

        def get_sequence(self, text: int) -> Any:
            return self.texts[text]

    _module(
        monkeypatch,
        "onnxruntime_genai",
        Config=lambda path: SimpleNamespace(overlay=lambda text: overlaid.append(json.loads(text))),
        Model=lambda config: config,
        GeneratorParams=lambda model: SimpleNamespace(set_search_options=lambda **options: searched.append(options)),
        Generator=Generator,
        __version__="0",
    )
    monkeypatch.delitem(sys.modules, "bench.engines.onnxruntime_genai", raising=False)
    from bench.engines.onnxruntime_genai import OnnxRuntimeTexts

    run = OnnxRuntimeTexts(tmp_path, "o", "O").run([torch.tensor([1, 2]), torch.tensor([5, 6])], 3)
    assert run.tokens == [[3, 4, 5], [7, 8, 9]]
    assert searched == [{"do_sample": False, "min_length": 5, "max_length": 5, "batch_size": 2}]
    assert overlaid[0]["model"]["decoder"]["session_options"]["intra_op_num_threads"] >= 1
    monkeypatch.delitem(sys.modules, "bench.engines.onnxruntime_genai")
