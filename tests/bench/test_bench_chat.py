"""Chat prompts on one file: what is asked, where answers end, medians and paired ratios by hand, the whole command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from bench.commands.bench_app import app
from bench.datasets import EncodedPrompt, Prompt, chat_prompts
from bench.engines.own import Generation
from bench.machine.memory import forget_peak, peak_bytes_of, resident_bytes
from bench.measure import until_end
from bench.record import Line, read_record
from bench.report.chat_tables import chat_tables
from tiny_llama import tiny_llama, tiny_tokenizer

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %} b{% endif %}"


class Scripted:
    """Says the same tokens to everything."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens

    def generate(self, prompt: torch.Tensor, max_new_tokens: int, repeat: int = 0) -> Generation:
        return Generation(tokens=self.tokens[:max_new_tokens], seconds=1.0)


@pytest.mark.parametrize(("end", "most", "size"), [(9, 6, 4), (7, 6, 6), (None, 6, 6), (1, 6, 2), (9, 3, 3)])
def test_an_answer_ends_with_its_end(end: int | None, most: int, size: int) -> None:
    prompt = EncodedPrompt(id="a", task="t", ids=torch.tensor([4, 4]))
    found = until_end(prompt, Scripted(1, 2, 3, 9, 5, 6), most, end)  # type: ignore[arg-type]
    assert found.new_tokens(most) == size
    assert (prompt.new_tokens(most), found.new_tokens(2)) == (most, 2)


def test_messages_in_the_template_and_long_ones_left_out() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    texts = {"a": "c d", "b": " ".join(["c"] * 30), "c": "e"}
    prompts = [Prompt(id=name, task="t", prompt=text) for name, text in texts.items()]
    found = chat_prompts(prompts, tokenizer, 8, 5)
    assert [prompt.id for prompt in found] == ["a", "c"]
    assert found[1].ids.tolist() == tokenizer("e b")["input_ids"]
    with pytest.raises(ValueError, match="no prompt has at most 1 tokens with the chat template"):
        chat_prompts(prompts, tokenizer, 1, 5)


def sample(engine: str, prompt: str, task: str, repeat: int, first: float, decoding: float) -> Line:
    """10 tokens of prompt, 5 new ones."""
    return {
        "kind": "sample", "engine": engine, "prompt": prompt, "task": task, "repeat": repeat, "num_prompt_tokens": 10,
        "num_new_tokens": 5, "seconds": first + decoding, "time_to_first_token": first, "decode_seconds": decoding,
        "stats": None,
    }  # fmt: skip


def output(engine: str, prompt: str, difference: int | None) -> Line:
    return {
        "kind": "output", "engine": engine, "prompt": prompt, "reference": "selfspec:ar", "first_difference": difference,
        "near_tie": None, "counted": None,
    }  # fmt: skip


def record() -> list[Line]:
    """Plain decoding and llama.cpp, two prompts of one kind and one of another, two repeats."""
    engines = {"selfspec:ar": "selfspec, autoregressive", "llama.cpp": "llama.cpp"}
    lines: list[Line] = [
        {
            "kind": "run", "engines": engines,
            "configuration": {"model": "m.gguf", "max_new_tokens": 8, "repeats": 2},
            "provenance": {"device": "cpu", "cpu": "A CPU", "dtype": "float32", "threads": 2},
        }
    ]  # fmt: skip
    decoding = {"a": (2.0, 8.0), "b": (4.0, 4.0), "c": (1.0, 1.0)}  # seconds of 4 tokens, in each repeat
    for prompt, seconds in decoding.items():
        for repeat, own in enumerate(seconds):
            task = "other" if prompt == "c" else "free"
            lines.append(sample("selfspec:ar", prompt, task, repeat, 0.5, own))
            lines.append(sample("llama.cpp", prompt, task, repeat, 1.0, {"a": 2.0, "b": 2.0, "c": 3.0}[prompt] * own))
        lines += [output("selfspec:ar", prompt, None), output("llama.cpp", prompt, {"a": None, "b": 2, "c": 3}[prompt])]
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
    """A table of `record` by its rows' names."""
    table = next(table for table in chat_tables(record()) if table.name == name)
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


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_the_peak_of_a_process() -> None:
    code = "import sys; b = b'x' * (80 << 20); del b; print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        now, peak = resident_bytes(child.pid), peak_bytes_of(child.pid)
        assert now is not None and peak is not None and peak - now > 60 << 20
        forget_peak(child.pid)
        later = peak_bytes_of(child.pid)
        assert later is not None and later - now < 20 << 20
        child.communicate()
    assert resident_bytes(child.pid) is None


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
