"""Tables of records by hand: runs, intervals over prompts, fixed settings as a yardstick, chats."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import bench.report.interval_tables
from bench.commands.bench_app import app
from bench.datasets import EncodedPrompt
from bench.engines.own import Generation
from bench.grid import SECONDS, fixed_from_other_half, fixed_in_hindsight, with_setting
from bench.measure import until_end
from bench.record import Line, RecordWriter, read_record
from bench.report.chat_tables import chat_tables
from bench.report.compare_records import compare_records
from bench.report.interval_tables import drawn, interval, interval_tables
from bench.report.markdown import tables
from bench.report.run_tables import source_tables
from bench.report.summary import Samples, Spread
from tiny_llama import tiny_llama, tiny_tokenizer

LABELS = {"transformers:generate": "generate", "selfspec:ar": "plain", "selfspec:ls:1-2": "drafting"}


def sample(engine, prompt, repeat, seconds, **fields):
    return {
        "kind": "sample",
        "engine": engine,
        "prompt": prompt,
        "task": prompt[0],
        "repeat": repeat,
        "num_prompt_tokens": 10,
        "num_new_tokens": 100,
        "seconds": seconds,
        "time_to_first_token": 0.5,
        "decode_seconds": None,
        "stats": None,
        **fields,
    }


def output(engine, prompt, reference, first_difference=None):
    return {
        "kind": "output",
        "engine": engine,
        "prompt": prompt,
        "output": "",
        "reference": reference,
        "first_difference": first_difference,
        "reference_logit_gap": None,
        "near_tie": None,
        "counted": None,
    }


def record():
    """Two prompts, three repeats. Medians: generate 10 s and 20 s; plain 5 s and 10 s; drafting 2 s and 4 s."""
    lines = [
        {
            "kind": "run",
            "command": "peers",
            "engines": LABELS,
            "configuration": {
                "model": "the demo model",
                "policy": "ls:1-2",
                "max_new_tokens": 100,
                "repeats": 3,
                "weights_digest": "ff",
                "prompts_digest": "ee",
            },
            "provenance": {
                "device": "cpu",
                "cpu": "A CPU",
                "cores": 2,
                "threads": 2,
                "ram_gib": 4.0,
                "dtype": "float32",
                "python": "3",
                "torch": "2",
                "transformers": "5",
                "os": "Linux",
                "commit": None,
                "load_average": 0.1,
                "kernels": "avx2",
                "host": None,
                "time": "now",
                "command": "selfspec-bench peers",
            },
        }
    ]
    times = {
        "transformers:generate": {"a1": (10, 50, 8), "b1": (20, 25, 10)},
        "selfspec:ar": {"a1": (5, 5, 5), "b1": (10, 10, 10)},
        "selfspec:ls:1-2": {"a1": (2, 2.5, 1), "b1": (4, 5, 2)},
    }
    for engine, by_prompt in times.items():
        for prompt, seconds in by_prompt.items():
            lines += [sample(engine, prompt, repeat, value) for repeat, value in enumerate(seconds)]
            lines.append(output(engine, prompt, "transformers:generate"))
    return lines


def table_of(lines, name):
    """A table of a record by its name, as Markdown."""
    return next(table.markdown() for table in tables(lines) if table.name == name)


def test_speeds_by_hand():
    samples = Samples(record())
    # generate: (100/10 + 100/20) / 2 = 7.5. Repeats alone: (10 + 5)/2, (2 + 4)/2, (12.5 + 10)/2.
    assert samples.speed("transformers:generate") == Spread(value=7.5, low=3.0, high=11.25)
    # drafting: (50 + 25) / 2 = 37.5, of repeats alone 37.5, 30, 75. Over plain, (20 + 10) / 2 = 15 each time.
    assert samples.speedup("selfspec:ls:1-2", "selfspec:ar") == Spread(value=2.5, low=2.0, high=5.0)
    # Pooled: 200 tokens in 10 + 20 seconds.
    assert samples.summary("transformers:generate").total_tokens_per_second == pytest.approx(200 / 30)
    assert samples.speed("selfspec:ar", ["b"]).value == 10


def counted(num_new, rounds, drafted, accepted, copied=None, copied_accepted=None):
    """Statistics of one run; without counts of copies as records were made before there were any."""
    stats = {"num_new_tokens": num_new, "rounds": rounds, "num_drafted": drafted, "num_accepted": accepted}
    return stats if copied is None else {**stats, "num_copied": copied, "num_copied_accepted": copied_accepted}


def test_sources_of_tokens_by_hand():
    """Shares of a task's runs together; an engine that tells no rounds has no row."""
    lines = record()
    stats = {
        "selfspec:ar": {"a1": counted(100, 99, 0, 0, 0, 0), "b1": counted(100, 99, 0, 0)},
        # a: 99 tokens in 30 rounds, 60 of 66 copies accepted, 9 of 20 drafts. b: 99 in 60, nothing copied, 39 of 60 drafts.
        "selfspec:ls:1-2": {"a1": counted(100, 30, 86, 69, 66, 60), "b1": counted(100, 60, 60, 39, 0, 0)},
    }
    for line in lines:
        if line["kind"] == "sample":
            line["stats"] = stats.get(line["engine"], {}).get(line["prompt"])
    (table,) = source_tables(Samples(lines))
    rows = [row for row in table.rows if row[1]]
    assert [row[0] for row in table.rows if not row[1]] == ["**a**", "**b**", "**all**"]
    assert rows == [
        ("plain", "1.00×", "1.00", "0.0 %", "0.0 %", "100.0 %", "–", "–"),
        ("drafting", "2.50×", "3.30", "60.0 %", "9.0 %", "31.0 %", "90.9 %", "45.0 %"),
        ("plain", "1.00×", "1.00", "0.0 %", "0.0 %", "100.0 %", "–", "–"),
        ("drafting", "2.50×", "1.65", "0.0 %", "39.0 %", "61.0 %", "–", "65.0 %"),
        ("plain", "1.00×", "1.00", "0.0 %", "0.0 %", "100.0 %", "–", "–"),
        ("drafting", "2.50×", "2.20", "30.0 %", "24.0 %", "46.0 %", "90.9 %", "60.0 %"),
    ]
    # A copied token takes no draft pass: 20 and 60 of them, on average.
    assert Samples(lines).summary("selfspec:ls:1-2").draft_passes == 40


def test_mismatches_are_shown_near_ties_apart():
    lines = record()
    outputs = [line for line in lines if line["kind"] == "output" and line["engine"] == "selfspec:ar"]
    outputs[0].update(first_difference=4, reference_logit_gap=1e-5, near_tie=True)
    # 4 of one prompt's 100 tokens are before the difference, and all of the other's: 52 %.
    assert "| plain | – | – | – | – | – | – | near-ties: 1 (52 % equal) |" in table_of(lines, "rounds")
    outputs[1].update(first_difference=4, reference_logit_gap=0.5, near_tie=False)
    assert "| plain | – | – | – | – | – | – | near-ties: 1, DIFFERENT: 1 (4 % equal) |" in table_of(lines, "rounds")


def test_a_run_that_breaks_off_leaves_the_old_record(tmp_path):
    path = tmp_path / "new" / "record.jsonl"
    with RecordWriter(path) as writer:
        writer.write({"kind": "run", "n": 1})
    with pytest.raises(KeyError), RecordWriter(path) as writer:
        writer.write({"kind": "run", "n": 2})
        raise KeyError
    assert read_record(path) == [{"kind": "run", "n": 1}]
    assert json.loads((tmp_path / "new" / "record.jsonl.part").read_text())["n"] == 2


def test_a_packed_record_is_read_and_a_damaged_one_named(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"kind": "run"}\n' + b'{"kind": "sample"}\n' * 50)
    path = tmp_path / "record.jsonl.gz"
    path.write_bytes(whole)
    assert len(read_record(path)) == 51
    path.write_bytes(whole[:-12])
    with pytest.raises(ValueError, match=r"cannot read the record .*cut off"):
        read_record(path)
    path.write_bytes(b"no archive at all")
    with pytest.raises(ValueError, match=r"cannot read the record .*: "):
        read_record(path)


def test_compare_says_what_changed(tmp_path):
    before = record()
    after = json.loads(json.dumps(before))
    after[0]["provenance"]["threads"] = 64
    for line in after:
        if line["kind"] == "sample" and line["engine"] == "selfspec:ar":
            line["seconds"] /= 2
        if line["kind"] == "output" and line["engine"] == "transformers:generate":
            line["output"] = "another"
    notes, table = compare_records(before, after)
    assert notes == ["threads: 2 -> 64"]
    rows = {row[0]: row for row in table.rows}
    assert rows["plain"][3] == "2.00×"
    assert rows["plain"][-1] == "equal"
    assert rows["generate"][3] == "1.00×"
    assert rows["generate"][-1] == "2 of 2 differ"
    paths = [write(tmp_path / f"{name}.jsonl", lines) for name, lines in (("a", before), ("b", after))]
    result = CliRunner().invoke(app, ["compare", *map(str, paths)])
    assert result.exit_code == 0
    assert "threads:" in result.output
    assert "2.00×" in result.output
    with pytest.raises(ValueError, match="no engine in common"):
        compare_records(before, [{**before[0], "engines": {"x": "x"}}])


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_a_record_of_another_version_is_one_line(tmp_path):
    lines = record()
    lines[0]["command"] = "spide"
    result = CliRunner().invoke(app, ["report", str(write(tmp_path / "x.jsonl", lines))])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "this version makes no tables of records of 'spide'" in result.stderr


ENGINES = ("selfspec:ar", "selfspec:ls:1-2")


def counted_record():
    """Two prompts of two tasks. Plain: 99 tokens in 990 layers each; drafting: in 495 and 330 layers."""
    lines = record()
    layers = {"selfspec:ar": {"a1": 990, "b1": 990}, "selfspec:ls:1-2": {"a1": 495, "b1": 330}}
    for line in lines:
        if line.get("engine") in layers and line["kind"] == "sample":
            line["stats"] = {"loaded_layers": layers[line["engine"]][line["prompt"]], "preverifier_layers": 0}
    runs = {
        engine: [
            line for line in lines if line["kind"] == "sample" and line["engine"] == engine and line["repeat"] == 0
        ]
        for engine in ENGINES
    }
    return lines, runs


@pytest.fixture
def two_are_enough(monkeypatch):
    monkeypatch.setattr(bench.report.interval_tables, "FEWEST", 2)


def test_an_interval_covers_what_other_prompts_might_have_given():
    """Shares of prompts right: of 100, 30 were. The normal interval is .3 +- 1.96 * sqrt(.3 * .7 / 100) = .21 to .39."""
    right = np.array([1.0] * 30 + [0.0] * 70)
    text = interval(lambda weights: weights @ right / weights.sum(-1), drawn(["a"] * 100))
    low, high = (float(end) for end in text.partition("(")[2].rstrip(")").split("–"))
    assert text.startswith("0.300 (")
    assert low == pytest.approx(0.21, abs=0.015)
    assert high == pytest.approx(0.39, abs=0.015)


@pytest.mark.usefixtures("two_are_enough")
def test_rows_are_divided_by_plain_decoding():
    """All of it: 198 tokens in 825 layers over 198 in 1980, 2.4. One prompt a task: every draw is the same."""
    (table,) = interval_tables(*counted_record())
    assert table.columns == ("policy", "eTPL over plain's", "tokens/s over plain's")
    # Drafting (50 + 25) / 2 tokens/s, plain (20 + 10) / 2.
    assert table.rows == (("`ls:1-2`", "2.400 (2.400–2.400)", "2.500 (2.500–2.500)"),)


@pytest.mark.usefixtures("two_are_enough")
def test_the_best_fixed_setting_is_a_second_yardstick():
    lines, runs = counted_record()
    cells = {"ls:1-1": [99, 660, 1.0], "ls:1-2": [99, 700, 1.0]}
    lines += [{"kind": "grid", "prompt": prompt, "task": prompt[0], "cells": cells} for prompt in ("a1", "b1")]
    (table,) = interval_tables(lines, runs)
    assert table.columns[2] == "over the best fixed setting's, `ls:1-1`"
    assert table.rows[0][2] == "1.600 (1.600–1.600)"  # 198 / 825 over 198 / 1320


A, B = "ls:1-1", "ls:2-2"


def grid_line(prompt: str, task: str, a: tuple[float, float], b: tuple[float, float]) -> Line:
    cells = {A: [*a, a[1] / 10], B: [*b, b[1] / 10]}
    return {"kind": "grid", "prompt": prompt, "task": task, "cells": cells}


GRID = [
    grid_line("1", "code", (10, 20), (10, 10)),  # half 0: the second setting, 1.0 against .5
    grid_line("2", "code", (10, 10), (10, 40)),  # half 1: the first, 1.0 against .25
    grid_line("3", "prose", (10, 10), (10, 50)),
    grid_line("4", "prose", (10, 10), (10, 50)),
]


def test_in_hindsight() -> None:
    # code: the first setting makes 20 tokens of 30 layers, the second 20 of 50.
    best = fixed_in_hindsight(GRID)
    assert best == {"code": A, "prose": A, "all": A}
    assert with_setting(GRID, best) == {"code": 20 / 30, "prose": 1.0, "all": 40 / 50}
    assert with_setting(GRID, {"code": B, "all": A}) == {"code": 20 / 50, "prose": 1.0, "all": 40 / 70}
    assert with_setting(GRID, best, SECONDS)["code"] == pytest.approx(20 / 3)


def test_from_the_other_half() -> None:
    # Prompt 1 is scored with what was best on prompt 2, the first setting (10 of 20); 2 with the second (10 of 40).
    assert fixed_from_other_half(GRID) == {"code": 20 / 60, "prose": 1.0, "all": 40 / 80}
    assert set(fixed_from_other_half(GRID[:3])) == {"code", "all"}  # a kind with a single prompt has no other half


TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %} b{% endif %}"


class Scripted:
    """Says the same tokens to everything."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens

    def generate(self, prompt: torch.Tensor, max_new_tokens: int, repeat: int = 0) -> Generation:
        return Generation(tokens=self.tokens[:max_new_tokens], seconds=1.0)


@pytest.mark.parametrize(("end", "most", "size"), [(9, 6, 4), (7, 6, 6), (5, 6, 5), (1, 6, 2), (9, 3, 3)])
def test_an_answer_ends_with_its_end(end: int, most: int, size: int) -> None:
    prompt = EncodedPrompt(id="a", task="t", ids=torch.tensor([4, 4]))
    found = until_end(prompt, Scripted(1, 2, 3, 9, 5, 6), most, [8, end])  # type: ignore[arg-type]
    assert found.new_tokens(most) == size
    assert (prompt.new_tokens(most), found.new_tokens(2)) == (most, 2)


def chat_record() -> list[Line]:
    """Plain decoding and llama.cpp, two prompts of one kind and one of another, two repeats."""
    engines = {"selfspec:ar": "selfspec, autoregressive", "llama.cpp": "llama.cpp"}
    lines: list[Line] = [
        {
            "kind": "run", "engines": engines,
            "configuration": {"model": "m.gguf", "max_new_tokens": 8, "repeats": 2},
            "provenance": {"device": "cpu", "cpu": "A CPU", "dtype": "float32", "threads": 2},
        }
    ]  # fmt: skip
    seconds_of = {"a": (2.0, 8.0), "b": (4.0, 4.0), "c": (1.0, 1.0)}  # seconds of 4 tokens, in each repeat
    for prompt, seconds in seconds_of.items():
        for repeat, own in enumerate(seconds):
            task = "other" if prompt == "c" else "free"
            theirs = {"a": 2.0, "b": 2.0, "c": 3.0}[prompt] * own
            for engine, first, decoding in (("selfspec:ar", 0.5, own), ("llama.cpp", 1.0, theirs)):
                fields = {"task": task, "num_new_tokens": 5, "time_to_first_token": first, "decode_seconds": decoding}
                lines.append(sample(engine, prompt, repeat, first + decoding, **fields))
        for engine, difference in (("selfspec:ar", None), ("llama.cpp", {"a": None, "b": 2, "c": 3}[prompt])):
            lines.append(output(engine, prompt, "selfspec:ar", difference))
    for engine in engines:
        for load in (1.0, 9.0, 2.0):
            lines.append(
                {
                    "kind": "loading", "engine": engine, "load_seconds": load, "import_seconds": 3.0,
                    "bytes_before": 100 << 20, "peak_loading_bytes": 150 << 20, "peak_bytes": 170 << 20,
                }
            )  # fmt: skip
    return lines


def cells(name: str) -> dict[str, tuple[str, ...]]:
    """A table of `chat_record` by its rows' names."""
    table = next(table for table in chat_tables(chat_record()) if table.name == name)
    return {row[0]: row[1:] for row in table.rows}


def test_medians_by_hand() -> None:
    # 4 tokens in 2 and in 8 s: the median of 2 and .5 is 1.25; b: 1; c: 4. Of a and b 1.125, of all 1.25.
    assert cells("decode")["selfspec, autoregressive"] == ("1", "4", "1")
    assert cells("prompts")["llama.cpp"] == ("10", "10", "10")
    # The load is the median of 1, 9 and 2; memory is 170 - 100 MiB.
    assert cells("engines")["llama.cpp"][:3] == ("3.0", "2.00", "10") and cells("engines")["llama.cpp"][-1] == "70"


def test_ratios_are_of_runs_side_by_side() -> None:
    # Both repeats of a prompt have the same ratio, though their times differ fourfold: 2 for a and b, 3 for c.
    assert cells("ratios")["plain ÷ llama.cpp, decoding"] == ("2.00 (2.00–2.00)", "3.00", "2.00 (2.00–2.50)")
    assert cells("ratios")["plain ÷ llama.cpp, prompts"] == ("2.00 (2.00–2.00)", "2.00", "2.00 (2.00–2.00)")
    assert not any("auto" in name for name in cells("ratios"))


def test_how_much_of_the_text_is_the_same() -> None:
    # Nothing differs in a; 2 of 5 tokens come before the difference in b, 3 of 5 in c: (1 + .4 + .6) / 3.
    assert cells("rounds")["llama.cpp"][-1] == "other weights (67 % equal)"


def test_the_chat_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    from bench.engines.gguf_file import write_gguf

    shape = {"hidden_size": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate_size": 192}
    write_gguf(tiny_llama(**shape, seed=4, max_position_embeddings=256), tmp_path / "tiny.gguf", "Q4_1")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    rows = ({"id": f"{i}", "task": "tr"[i % 2], "prompt": "abc" * i + "ab"} for i in range(3))
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr("bench.commands.started_peers.START_METHOD", "fork")
    monkeypatch.setattr("bench.commands.peer_makers.find_spec", lambda name: None)

    def imported(command: list[str], **_: Any) -> None:
        """In no time; tests/test_start_up.py runs this line in a process of its own."""
        assert command == [sys.executable, "-c", "from selfspec import SelfSpecGenerator"]

    monkeypatch.setattr("bench.commands.chat_command.subprocess", SimpleNamespace(run=imported))
    options: list[Any] = ["--model", tmp_path / "tiny.gguf", "--prompts", prompts, "--output", tmp_path / "chat.jsonl"]
    options += ["--openvino", tmp_path, "--max-new-tokens", 6, "--repeats", 2, "--loads", 2, "--num-samples", 3]
    result = CliRunner().invoke(app, ["chat", *map(str, options)])
    assert result.exit_code == 0, result.output
    assert "llama.cpp is left out: it needs llama-cpp-python; pip install llama-cpp-python" in result.stderr
    assert "OpenVINO GenAI is left out: it needs openvino-genai; pip install openvino-genai" in result.stderr
    lines = read_record(tmp_path / "chat.jsonl")
    assert list(lines[0]["engines"]) == ["selfspec:ar", "selfspec:auto", "selfspec:auto:kept"]
    loading = [line for line in lines if line["kind"] == "loading"]
    assert [line["engine"] for line in loading] == [*lines[0]["engines"]] * 2
    assert all(line["load_seconds"] > 0 and line["import_seconds"] > 0 for line in loading)
    runs = [line for line in lines if line["kind"] == "sample"]
    assert len(runs) == 3 * 3 * 2 and all(2 <= line["num_new_tokens"] <= 6 for line in runs)
    assert {line["first_difference"] for line in lines if line["kind"] == "output"} == {None}
    assert str(tmp_path) not in json.dumps(lines)
    folder = CliRunner().invoke(app, ["chat", "--model", "synthetic", "--prompts", str(prompts)])
    assert folder.exit_code == 2 and "--model must be a GGUF file, which the other engines read" in folder.stderr
