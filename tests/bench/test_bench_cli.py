import json
import sys

import pytest
from typer.testing import CliRunner

from bench.commands.bench_app import app, main
from bench.record import read_record
from layerskip_models.kernels.library import kernels
from selfspec.defaults import fixed_policy
from tiny_llama import tiny_llama, tiny_tokenizer

RUN = ["--prompt-tokens", "12", "--max-new-tokens", "10", "--repeats", "2", "--warmups", "1", "--num-samples", "2"]


@pytest.fixture(autouse=True)
def forked_peers(monkeypatch):
    """They have imported everything already."""
    monkeypatch.setattr("bench.commands.started_peers.START_METHOD", "fork")


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_peers_measures_all_engines_and_its_record_makes_a_page(checkpoint, tmp_path):
    record = tmp_path / "peers.jsonl"
    result = invoke("peers", "--model", checkpoint, "--policy", "ls:2-3", "--output", record, *RUN)
    assert result.exit_code == 0, result.output
    lines = read_record(record)
    engines = list(lines[0]["engines"])
    assert engines == [
        "selfspec:ar",
        "selfspec:ls:2-3",
        "selfspec:auto",
        "transformers:generate",
        "transformers:early-exit:2-3",
        "transformers:early-exit:2-default",
    ]
    samples = [line for line in lines if line["kind"] == "sample"]
    assert len(samples) == 6 * 2 * 2
    assert all(line["num_new_tokens"] == 10 and line["seconds"] > 0 for line in samples)
    assert lines[0]["provenance"]["dtype"] == "float32"
    assert str(tmp_path) not in json.dumps(lines)  # nothing of this machine's folders

    page = tmp_path / "report.md"
    assert invoke("report", record, "-o", page).exit_code == 0
    assert "| selfspec, ls:2-3 |" in page.read_text(encoding="utf-8")


@pytest.mark.skipif(kernels() is None, reason="needs the native library")
def test_peers_on_rounded_weights_and_gguf_files_judges_each_among_themselves(tmp_path, monkeypatch):
    """And a peer that is not installed is left out in one line."""
    pytest.importorskip("gguf")
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    model, record = tmp_path / "tiny", tmp_path / "peers.jsonl"
    shape = {"hidden_size": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate_size": 192}
    tiny_llama(**shape, seed=4).save_pretrained(model)  # these types hold its rows
    tiny_tokenizer().save_pretrained(model)
    asked = ["--int8", "--int4", "--gguf", "Q8_0", "--gguf", "IQ4_NL", "--no-transformers"]
    result = invoke("peers", "--model", model, *asked, "--output", record, *RUN)
    assert result.exit_code == 0, result.output
    said = [line for line in result.stderr.splitlines() if "llama" in line]
    assert said == ["llama.cpp is left out: it needs llama-cpp-python; pip install llama-cpp-python"]
    lines = read_record(record)
    assert "llama_cpp" not in lines[0]["provenance"] and not [name for name in lines[0]["engines"] if "llama" in name]
    for kind in ("int8", "int4", "Q8_0", "IQ4_NL"):
        drafting = [line for line in lines if line["kind"] == "output" and line["engine"] == f"selfspec:{kind}:auto"]
        assert [(line["reference"], line["first_difference"]) for line in drafting] == [
            (f"selfspec:{kind}:ar", None)
        ] * 2
    assert "| selfspec int8, auto |" in invoke("report", record).output


def test_sweep_writes_the_setting_that_generate_finds(checkpoint, tmp_path):
    record = tmp_path / "sweep.jsonl"
    arguments = ["--exit-layers", "1-3", "--num-speculations", "2,4", "--num-timed", "2", "--write"]
    assert fixed_policy(str(checkpoint), 4) == "ls:1-4"  # the rule for unknown checkpoints
    result = invoke("sweep", "--model", checkpoint, "--output", record, *arguments, *RUN)
    assert result.exit_code == 0, result.output
    lines = read_record(record)
    cells = [line for line in lines if line["kind"] == "cell"]
    assert {tuple(line["values"].values()) for line in cells} == {(layer, length) for layer in "123" for length in "24"}
    best = next(line for line in lines if line["kind"] == "best")
    timed = [line["policy"] for line in cells[:2]]
    assert best["policy"] in timed
    assert set(lines[0]["engines"]) == {"selfspec:ar", *(f"selfspec:{policy}" for policy in timed)}
    rounds = {line["policy"]: line["rounds"] for line in cells}
    for policy in timed:  # replay foretold what the timed runs did
        own = [line for line in lines if line["kind"] == "sample" and line["engine"] == f"selfspec:{policy}"]
        assert sum(line["stats"]["rounds"] for line in own) == 2 * rounds[policy]
    setting = json.loads((checkpoint / "selfspec.json").read_text(encoding="utf-8"))
    assert setting["policy"] == best["policy"] == fixed_policy(str(checkpoint), 4)
    page = tmp_path / "sweep.md"
    assert invoke("report", record, "-o", page).exit_code == 0
    text = page.read_text(encoding="utf-8")
    assert f"`{best['policy']}`" in text


def test_sweep_over_policies_ranks_by_runs_and_times_the_best(checkpoint, tmp_path):
    record = tmp_path / "tau.jsonl"
    arguments = [*(f"--policy=spide:2,tau={tau}" for tau in (0.2, 0.5, 0.9)), "--num-timed", "2"]
    result = invoke("sweep", "--model", checkpoint, "--output", record, *arguments, *RUN)
    assert result.exit_code == 0, result.output
    lines = read_record(record)
    cells = [line for line in lines if line["kind"] == "cell"]
    assert {line["policy"] for line in cells} == {f"spide:2,tau={value}" for value in ("0.2", "0.5", "0.9")}
    predicted = [line["predicted_speedup"] for line in cells]
    assert predicted == sorted(predicted, reverse=True)
    assert set(lines[0]["engines"]) == {"selfspec:ar", *(f"selfspec:{line['policy']}" for line in cells[:2])}
    assert not any(line["replayed"] for line in cells)
    text = invoke("report", record).output
    assert text.count("| `spide:2,tau=") == 3
    assert text.count("| – |") == 1  # one of three was not timed
    assert [text.index(f"`spide:2,tau={value}` |") for value in ("0.2", "0.5", "0.9")] == sorted(
        text.index(f"`spide:2,tau={value}` |") for value in ("0.2", "0.5", "0.9")
    )


MISTAKES = {
    "peers --model MODEL --policy ar": "must be a fixed setting",
    "peers --model MODEL --policy ls:9-2": "exit_layer must be in [1, 3]",
    "peers --model MODEL --prompts missing.jsonl": "missing.jsonl",
    "peers --model MODEL --dtype int3": "dtype must be one of",
    "peers --model MODEL --gguf Q4": "--gguf must be Q4_K_M",
    "peers --model MODEL --ik-llama-cpp Q4": "--ik-llama-cpp must be BF16, F16, Q8_0, Q4_0 or all, got Q4",
    "peers --model MODEL --llama-cpp Q4": "--llama-cpp must be BF16, F16, Q8_0, Q4_0 or all, got Q4",
    "sweep --model MODEL --exit-layers 2-x": '--exit-layers must look like "1-8"',
    "sweep --model MODEL --exit-layers 1-4": "--exit-layers must be in [1, 3]",
    "sweep --model MODEL --num-speculations 0-2": "--num-speculations must be numbers from 1 on",
    "sweep --model MODEL --policy spide:1 --policy spide:9": "exit_layer must be in [1, 3]",
    "sweep --model MODEL --policy spide:1 --exit-layers 1": "not both",
    "sweep --model MODEL --policy spide:1 --write": "--write keeps fixed settings",
    "sweep --model someone/somewhere --write": "--write needs a local checkpoint folder",
    "run --model MODEL --temperature 0.5": "--temperature has no effect on greedy decoding",
    "run --model MODEL --do-sample --top-p 0": "--top-p must be in (0, 1]",
    "run --model MODEL --do-sample --temperature 0": "--temperature must be above 0",
    "run --model MODEL --do-sample --grid": "--grid replays greedy texts",
    "run --model MODEL --resume": "--resume needs --output",
    "run --model MODEL --resume --output x.jsonl --kept auto": "cannot go on with --kept",
    "run --model MODEL --kept autoo": "unknown policy",
    "run --model MODEL --kept ls:1-2": "--kept ls:1-2: this policy learns nothing",
    "run --model MODEL --task poetry": "no prompts of task poetry; there are code, english",
    "run --model MODEL --policy dell": "unknown policy",
    "run --model MODEL --policy dv:9": "exit_layer must be in [1, 3]",
    "run --model synthetic:huge": "unknown shape 'huge'",
    "load --model someone/somewhere": "--model must be a folder with *.safetensors or a GGUF file on this machine",
    "load --model ./none": "no checkpoint folder at ./none",
    "kernels --variant none": "this machine runs the variants",
    "kernels --weights int3": "--weights must be of float32, bfloat16, int8, int4",
    "kernels --rows x": "--rows must look like",
    "convert": "`selfspec-bench convert` was removed: ",
    "shapes --shape small": "`selfspec-bench shapes` was removed: run `selfspec-bench run --model synthetic:",
    "peers --converted folder": "--converted was removed: name the engines with --llama-cpp",
    "report x.jsonl --into=y.md": "--into was removed: ",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_mistakes_end_with_one_line_and_status_2(command, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*(str(checkpoint) if word == "MODEL" else word for word in command.split()))
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if line and not line.startswith("Loading weights")]
    assert line.startswith("error: ") and MISTAKES[command] in line


def test_the_program_says_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("signal.signal", lambda *arguments: None)  # this process's handlers stay
    monkeypatch.setattr(sys, "argv", ["selfspec-bench", "report", str(tmp_path / "none.jsonl")])
    with pytest.raises(SystemExit) as ended:
        main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
