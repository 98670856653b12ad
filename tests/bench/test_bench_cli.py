import json
import multiprocessing
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
def test_peers_with_int8_weights_judges_these_among_themselves(checkpoint, tmp_path):
    record = tmp_path / "peers.jsonl"
    result = invoke("peers", "--model", checkpoint, "--int8", "--int4", "--output", record, *RUN)
    assert result.exit_code == 0, result.output
    lines = read_record(record)
    assert [name for name in lines[0]["engines"] if "int8" in name] == ["selfspec:int8:ar", "selfspec:int8:auto"]
    outputs = [line for line in lines if line["kind"] == "output"]
    drafts = [f"selfspec:{bits}:auto" for bits in ("int8", "int4")]
    assert {line["reference"] for line in outputs if line["engine"] not in drafts} == {"selfspec:ar"}
    for name in drafts:
        drafting = [line for line in outputs if line["engine"] == name]
        plain = name.replace("auto", "ar")
        assert [(line["reference"], line["first_difference"]) for line in drafting] == [(plain, None)] * 2
    assert "| selfspec int8, auto |" in invoke("report", record).output


@pytest.mark.skipif(kernels() is None, reason="needs the native library")
def test_peers_on_a_gguf_file_judges_these_among_themselves(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    model, record = tmp_path / "tiny", tmp_path / "peers.jsonl"
    shape = {"hidden_size": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate_size": 192}
    tiny_llama(**shape, seed=4).save_pretrained(model)  # these types hold its rows
    tiny_tokenizer().save_pretrained(model)
    asked = ["--gguf", "Q8_0", "--gguf", "IQ4_NL", "--no-transformers"]
    result = invoke("peers", "--model", model, *asked, "--output", record, *RUN)
    assert result.exit_code == 0, result.output
    assert "llama.cpp is left out" in result.stderr
    lines = read_record(record)
    own = [f"selfspec:{kind}:{policy}" for kind in ("Q8_0", "IQ4_NL") for policy in ("ar", "auto")]
    assert list(lines[0]["engines"])[3:] == own
    drafting = [line for line in lines if line["kind"] == "output" and line["engine"] in own[1::2]]
    assert {(line["reference"], line["first_difference"]) for line in drafting} == {(own[0], None), (own[2], None)}


def test_a_peer_that_is_not_installed_is_left_out_in_one_line(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    record = tmp_path / "peers.jsonl"
    result = invoke("peers", "--model", checkpoint, "--llama-cpp", "all", "--output", record, *RUN)
    assert result.exit_code == 0, result.output
    said = [line for line in result.stderr.splitlines() if "llama" in line]
    assert said == ["llama.cpp is left out: it needs llama-cpp-python; pip install llama-cpp-python"]
    lines = read_record(record)
    assert "transformers:generate" in lines[0]["engines"]
    assert not [name for name in lines[0]["engines"] if "llama" in name]
    assert "llama_cpp" not in lines[0]["provenance"]


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["peers", "--policy", "ar"], "must be a fixed setting"),
        (["peers", "--policy", "ls:9-2"], "exit_layer must be in [1, 3]"),
        (["peers", "--prompts", "missing.jsonl"], "missing.jsonl"),
        (["peers", "--dtype", "int3"], "dtype must be one of"),
        (["peers", "--gguf", "Q4"], "--gguf must be Q4_K_M"),
        (["peers", "--ik-llama-cpp", "Q4"], "--ik-llama-cpp must be BF16, F16, Q8_0, Q4_0 or all, got Q4"),
        (["peers", "--llama-cpp", "Q4"], "--llama-cpp must be BF16, F16, Q8_0, Q4_0 or all, got Q4"),
        (["sweep", "--exit-layers", "2-x"], '--exit-layers must look like "1-8"'),
        (["sweep", "--exit-layers", "1-4"], "--exit-layers must be in [1, 3]"),
        (["sweep", "--num-speculations", "0-2"], "--num-speculations must be numbers from 1 on"),
        (["sweep", "--policy", "spide:1", "--policy", "spide:9"], "exit_layer must be in [1, 3]"),
        (["sweep", "--policy", "spide:1", "--exit-layers", "1"], "not both"),
        (["sweep", "--policy", "spide:1", "--write"], "--write keeps fixed settings"),
    ],
)
def test_mistakes_end_with_one_line_and_status_2(checkpoint, arguments, message):
    result = invoke(arguments[0], "--model", checkpoint, *arguments[1:])
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert"], "`selfspec-bench convert` was removed: "),
        (
            ["shapes", "--shape", "small"],
            "`selfspec-bench shapes` was removed: run `selfspec-bench run --model synthetic:",
        ),
        (["peers", "--converted", "folder"], "--converted was removed: name the engines with --llama-cpp"),
        (["report", "x.jsonl", "--into=y.md"], "--into was removed: "),
    ],
)
def test_what_was_removed_says_what_to_use(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1


def test_write_needs_a_folder():
    result = invoke("sweep", "--model", "someone/somewhere", "--write")
    assert result.exit_code == 2
    assert "--write needs a local checkpoint folder" in result.stderr


def test_the_program_runs_as_a_person_runs_it(tmp_path, monkeypatch):
    """Forked: tests/test_start_up.py imports it in a process of its own, where nothing may be said."""
    monkeypatch.setattr(sys, "argv", ["selfspec-bench", "report", str(tmp_path / "none.jsonl")])
    errors = tmp_path / "errors"
    process = multiprocessing.get_context("fork").Process(target=_run_program, args=(errors,))
    process.start()
    process.join(60)
    assert process.exitcode == 2
    assert errors.read_text().startswith("error: ")
    assert errors.read_text().count("\n") == 1


def _run_program(errors):
    sys.stderr = errors.open("w")  # Python's own, so that a traceback would be there, too
    main()
