import io
import json
import re
import shutil
import signal
from dataclasses import fields
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console
from typer.testing import CliRunner

from selfspec import GenerationStats, SelfSpecGenerator
from selfspec.cli.console import LogConsole
from selfspec.cli.display import SOURCE_STYLES, TextWriter, legend
from selfspec.cli.main import app
from selfspec.cli.text_input import EXAMPLE_QUESTION, _is_piped
from tiny_llama import tiny_llama, tiny_tokenizer

ROOT = Path(__file__).parents[2]
PROMPT = "a bed, a fig"
BASE = ["--max-new-tokens", "30", "--policy", "ls:1-3"]
STRUCK = re.compile(r"\x1b\[[\d;]*\b9;[\d;]*m.*?\x1b\[0m", re.S)  # 9 is "struck through"
ESCAPE = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")


@pytest.fixture(scope="module")
def expected(folder):
    return SelfSpecGenerator.from_pretrained(folder).generate(PROMPT, max_new_tokens=30, policy="ls:1-3")


@pytest.fixture(scope="module")
def said(expected, tmp_path_factory):
    """A file of what the model says, which is a good text to copy from."""
    path = tmp_path_factory.mktemp("texts") / "said.txt"
    path.write_bytes((PROMPT + expected.text).encode().replace(b"\n", b"\r\n"))
    return path


def invoke(*arguments, **options):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **options)


def generate(folder, *arguments, **options):
    return invoke("generate", "--model", folder, *BASE, *arguments, **options)


def test_text_on_stdout_and_summary_on_stderr(folder, expected):
    result = generate(folder, PROMPT)
    assert result.exit_code == 0
    assert result.stdout == expected.text + "\n"
    stats = expected.stats
    for part in (
        "30 tokens in ",
        "tokens/s; first token after ",
        "stop reason: length",
        f"policy ls:1-3: {stats.rounds} rounds, acceptance rate {stats.acceptance_rate:.3f}",
        f"{stats.accepted_per_round:.2f} accepted/round, {stats.tokens_per_round:.2f} tokens/round",
    ):
        assert part in result.stderr
    assert "eTPL" not in result.stderr  # --explain has it
    assert "\x1b" not in result.output
    quiet = generate(folder, PROMPT, "--quiet")
    assert (quiet.stdout, quiet.stderr) == (expected.text + "\n", "")


def test_prompt_from_file_and_standard_input(folder, expected, tmp_path, monkeypatch):
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT + "\n", encoding="utf-8")
    for arguments, piped in ((["--file", path], None), (["-"], PROMPT), ([], PROMPT + "\n"), ([], PROMPT + "\r\n")):
        assert generate(folder, *arguments, input=piped).stdout == expected.text + "\n"
    path.write_text(PROMPT + "\n\n", encoding="utf-8")  # one newline goes, a second one is meant
    again = SelfSpecGenerator.from_pretrained(folder).generate(PROMPT + "\n", max_new_tokens=30, policy="ls:1-3")
    assert generate(folder, "--file", path).stdout == again.text + "\n" != expected.text + "\n"
    with Path("/dev/null").open() as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        assert not _is_piped()


def test_json_is_one_object_with_every_statistic(folder, expected):
    result = generate(folder, PROMPT, "--json")
    assert result.stdout.count("\n") == 1
    found = json.loads(result.stdout)
    assert found["text"] == expected.text
    assert found["token_ids"] == expected.new_tokens
    assert (found["stop_reason"], found["policy"], found["model"]) == ("length", "ls:1-3", str(folder))
    assert found["num_prompt_tokens"] == expected.stats.num_prompt_tokens
    assert found["comparison"] is found["explanation"] is None
    assert set(found["stats"]) == {field.name for field in fields(GenerationStats)}
    timed = re.compile("seconds|per_second|time_to")
    for name, value in expected.stats.as_dict().items():
        assert timed.search(name) or found["stats"][name] == value


def test_compare_reports_speed_and_equality(folder, expected):
    result = generate(folder, PROMPT, "--compare", "--repeats", "2")
    assert result.stdout == expected.text + "\n"
    assert "the middle one of 2 pairs of runs" in result.stderr
    assert re.search(r"speed-up \d+\.\d\d \(\d+\.\d\d to \d+\.\d\d\); outputs equal\n", result.stderr)
    both = json.loads(generate(folder, PROMPT, "--compare", "--repeats", "2", "--explain", "--json").stdout)
    found, explained = both["comparison"], "\n".join(both["explanation"])
    assert "the largest loss is" in explained and "against plain: ls:" in explained
    assert found["outputs_equal"] is True
    assert found["repeats"] == len(found["runs"]) == len(found["baseline_runs"]) == 2
    assert all(run["num_drafted"] == expected.stats.num_drafted for run in found["runs"])
    assert all(run["num_drafted"] == 0 and run["num_new_tokens"] == 30 for run in found["baseline_runs"])


@pytest.mark.parametrize("width", [80, 40])
def test_messages_break_between_words_on_a_terminal_and_nowhere_in_a_file(width):
    path = "/folder" * 12
    said = f"error: the server needs uvicorn: pip install 'selfspec[serve]', then write {path} again\n  two  columns"
    for terminal in (True, False):
        log = LogConsole(file=io.StringIO(), force_terminal=terminal, color_system=None, width=width)
        log.print(said)
        shown = log.file.getvalue()
        assert shown.split() == said.split() and ("  two  columns" in shown)
        long = [line for line in shown.splitlines() if len(line) > width]
        assert long == ([path] if terminal else [said.partition("\n")[0]])
        log.print(legend(styles_shown=True))
        styled = log.file.getvalue().removeprefix(shown)
        assert styled.split() == legend(styles_shown=True).plain.split()
        assert (max(map(len, styled.splitlines())) <= width) == terminal


def test_a_model_with_a_template_is_asked_unless_the_prompt_is_raw(folder, expected, tmp_path, monkeypatch):
    """By `generate`, alone or with a file, and by `trace`."""
    instruct, prompts = tmp_path / "instruct", tmp_path / "p.jsonl"
    shutil.copytree(folder, instruct)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}. a cab"
    tokenizer.save_pretrained(instruct)
    generator = SelfSpecGenerator.from_pretrained(instruct)
    answer = generator.generate([{"role": "user", "content": PROMPT}], max_new_tokens=30, policy="ls:1-3")
    assert answer.text != expected.text and answer.stats.rounds != expected.stats.rounds
    prompts.write_text(json.dumps({"prompt": PROMPT}), encoding="utf-8")
    for number, (raw, result) in enumerate((([], answer), (["--raw"], expected))):
        assert generate(instruct, PROMPT, "--compare", "--repeats", "1", *raw).stdout == result.text + "\n"
        output = tmp_path / f"{number}.jsonl"
        assert generate(instruct, "--prompts", prompts, "-o", output, *raw).exit_code == 0
        assert json.loads(output.read_text())["text"] == result.text
        traced = invoke("trace", PROMPT, "--model", instruct, "--max-new-tokens", "30", "--policy", "ls:1-3", *raw)
        assert len(traced.stdout.splitlines()) == 1 + result.stats.rounds
    assert generate(instruct, "--prompts", prompts, "-o", tmp_path / "0.jsonl", "--raw").exit_code == 2  # other results
    monkeypatch.setattr("selfspec.cli.text_input._is_piped", lambda: False)
    asked = [{"role": "user", "content": EXAMPLE_QUESTION}]
    assert generate(instruct).stdout == generator.generate(asked, max_new_tokens=30, policy="ls:1-3").text + "\n"


def test_demo_shows_three_texts_and_a_table(monkeypatch):
    monkeypatch.setattr("layerskip_models.checkpoints.named_models.NamedModel.find", lambda self: None)
    result = CliRunner().invoke(app, ["demo", "--repeats", "1"])
    assert result.exit_code == 0, result.stderr
    assert "toy of 7 M parameters" in result.stdout and "selfspec get smollm2" in result.stdout
    assert "Das Wetter ist heute sehr gut" in result.stdout and "\x1b" not in result.stdout
    for task in ("arithmetic", "translation", "code"):
        assert re.search(rf"  {task} +\d+ +\d+ +\d+ +\d+\.\d\d \(\d+\.\d\d to \d+\.\d\d\) +yes", result.stdout)


def test_compare_needs_room_for_the_text_only(folder):
    """The warm-up must not run past the context that the text itself fills."""
    prompt = "a" * 125
    result = invoke("generate", "--model", folder, prompt, "--max-new-tokens", "3", "--compare", "--repeats", "1")
    assert result.exit_code == 0
    result = invoke("generate", "--model", folder, prompt, "--compare", "--repeats", "1")
    assert "3 tokens in" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["--exit-layer", "2", "--num-speculations", "2"], {"exit_layer": 2, "num_speculations": 2}),
        (["--num-speculations", "0"], {"num_speculations": 0}),
        (["--eos-token-id", "3", "--eos-token-id", "5"], {"eos_token_id": [3, 5]}),
        (["--stop-strings", "a", "--stop-strings", "be"], {"stop_strings": ["a", "be"]}),
        (["--repetition-penalty", "1.4"], {"repetition_penalty": 1.4}),
        (
            ["--do-sample", "--seed", "7", "--temperature", "1.5", "--top-k", "9", "--top-p", "0.9", "--min-p", "0.02"],
            {"do_sample": True, "seed": 7, "temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
        ),
        (["--dtype", "float64"], {}),
        (["--temperature", "0"], {}),  # greedy
        (["--do-sample", "--temperature", "0"], {}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options_reach_generate(folder, expected, arguments, options):
    if not {"exit_layer", "num_speculations"} & set(options):  # auto's measured cost differs from process to process
        arguments, options = [*arguments, "--policy", "auto:cost=layers"], {**options, "policy": "auto:cost=layers"}
    generator = SelfSpecGenerator.from_pretrained(folder)
    wanted = generator.generate(PROMPT, max_new_tokens=30, **options)
    result = invoke("generate", PROMPT, "--model", folder, "--max-new-tokens", "30", "--json", *arguments)
    found = json.loads(result.stdout)
    assert (found["token_ids"], found["stop_reason"]) == (wanted.new_tokens, wanted.stop_reason)
    assert (found["policy"], found["stats"]["rounds"]) == (wanted.policy, wanted.stats.rounds)


def test_ignore_eos(folder, expected, tmp_path):
    config = shutil.copytree(folder, tmp_path / "model") / "generation_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token_id": expected.new_tokens[4]}))
    assert json.loads(generate(config.parent, PROMPT, "--json").stdout)["stop_reason"] == "eos"
    found = json.loads(generate(config.parent, PROMPT, "--json", "--ignore-eos").stdout)
    assert (found["stop_reason"], found["token_ids"]) == ("length", expected.new_tokens)


def test_show_drafts_in_colour_adds_only_struck_drafts(folder, expected, said, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    result = generate(folder, PROMPT, "--show-drafts", color=True)
    written = result.stdout.removeprefix(f"\x1b[2m{PROMPT}\x1b[0m")  # a terminal shows the prompt first
    assert written != result.stdout
    assert ESCAPE.sub("", STRUCK.sub("", written)) == expected.text + "\n"
    stats = expected.stats
    assert stats.num_drafted > stats.num_accepted > 0  # or the next lines would show nothing
    assert STRUCK.search(written)
    for style in ("\x1b[32m", "\x1b[1;33m", "\x1b[36m"):  # accepted, corrected, bonus
        assert style in written
    assert "accepted draft" in ESCAPE.sub("", result.stderr) and "drafted by" not in result.stderr
    copies = ["--policy", "auto:cost=layers", "--copy-from", said]
    copying = generate(folder, PROMPT, "--show-drafts", *copies, color=True)
    assert "\x1b[35m" in copying.stdout and "\x1b[35m" not in result.stdout
    assert "accepted copy" in ESCAPE.sub("", copying.stderr)
    assert "\x1b[32m" in copying.stdout  # drafts of the exit stay as they are
    assert len({str(style) for style in SOURCE_STYLES.values()}) == len(SOURCE_STYLES)
    stats = json.loads(generate(folder, PROMPT, *copies, "--json").stdout)["stats"]
    drafted = stats["num_drafted"] - stats["num_copied"]
    accepted = stats["num_accepted"] - stats["num_copied_accepted"]
    told = " ".join(ESCAPE.sub("", copying.stderr).split())  # a terminal's lines break
    assert drafted > 0 and f"drafted by an exit: {accepted} of {drafted} accepted" in told


def test_drafts_as_a_picture(folder, expected, tmp_path):
    path = tmp_path / "new" / "drafts.svg"
    assert generate(folder, PROMPT, "--show-drafts", "--svg", path).stdout == expected.text + "\n"
    picture = path.read_text(encoding="utf-8")
    assert "line-through" in picture and "dropped" in picture and "url(http" not in picture
    assert len(set(re.findall(r"-r\d+ \{ ([^}]*)\}", picture))) >= 5  # the prompt and the fates


def test_drafts_are_copied_from_files(folder, expected, said, tmp_path):
    """Plain decoding, which --compare runs beside it, copies nothing, and rounds that copy are replayed as well."""
    other = tmp_path / "other.txt"
    other.write_text("head, head, head", encoding="utf-8")
    copies = ["--policy", "copy:8", "--copy-from", other, "--copy-from", said]
    result = generate(folder, PROMPT, *copies, "--compare", "--repeats", 1, "--explain")
    assert result.stdout == expected.text + "\n"
    assert "outputs equal" in result.stderr and "these settings copy nothing" in result.stderr
    assert "fixed settings, replayed from this run" in result.stderr
    found, without = (
        json.loads(generate(folder, PROMPT, *options, "--json").stdout)["stats"] for options in (copies, copies[:2])
    )
    copied, accepted = found["num_copied"], found["num_copied_accepted"]
    assert accepted > without["num_copied_accepted"]
    assert f"copied from earlier text: {accepted} of {copied} accepted; drafted by an exit: none" in result.stderr


COPY = ["--policy", "copy:8", "--copy-from"]
LINES = ["--output", "o.jsonl", "--prompts"]
MESSAGE = {"role": "user", "content": "a"}
ERRORS = {
    "exit layer": ([PROMPT, "--exit-layer", "9"], "exit_layer must be in [1, 3] for this 4-layer model, got 9"),
    "no folder": ([PROMPT, "--model", "./not/there"], "no checkpoint folder at ./not/there"),
    "a file for a folder": ([PROMPT, "--model", "LATIN"], "LATIN is a file: give the folder"),
    "empty folder": ([PROMPT, "--model", "EMPTY"], "EMPTY holds no checkpoint: it has no config.json"),
    "no tokenizer": ([PROMPT, "--model", "SPEECHLESS"], "SPEECHLESS has no tokenizer that can be loaded: save one"),
    "unfinished training": ([PROMPT, "--model", "UNFINISHED"], "UNFINISHED holds a training run that is not finished"),
    "not on the hub": ([PROMPT, "--model", "not/there"], "neither a folder here nor in the local cache"),
    "not text": (["a\udcff"], "the prompt is not UTF-8 text"),
    "empty stdin": (["-"], "standard input is empty"),
    "empty pipe": ([], "standard input is empty"),
    "two prompts": ([PROMPT, "--file", "not-there.txt"], "give a prompt or --file, not both"),
    "not UTF-8": (["--file", "LATIN"], "is not UTF-8 text (byte 1)"),
    "greedy temperature": ([PROMPT, "--temperature", "0.5", "--top-k", "3"], "--temperature, --top-k has no effect"),
    "eos": ([PROMPT, "--ignore-eos", "--eos-token-id", "1"], "give --ignore-eos or --eos-token-id, not both"),
    "json drafts": ([PROMPT, "--json", "--show-drafts"], "leave out --show-drafts"),
    "picture of nothing": ([PROMPT, "--svg", "x.svg"], "--svg draws coloured drafts: add --show-drafts"),
    "trace of no kind": (["trace", PROMPT, "-o", "trace.gif"], ".png, .svg, .pdf"),
    "no copies": ([PROMPT, *COPY, "NOWHERE"], "NOWHERE: --copy-from takes the path"),
    "empty copies": ([PROMPT, *COPY, "NOTHING"], "NOTHING is empty: --copy-from takes a file"),
    "short copies": ([PROMPT, *COPY, "SHORT"], "no text of two tokens"),
    "copies for nobody": ([PROMPT, "--policy", "ls:1-3", "--copy-from", "SHORT"], "--copy-from has no effect with policy"),
    "lines that copy nothing": (
        [*LINES, [{"prompt": PROMPT}], "--policy", "ls:1-3", "--copy-from", "SHORT"], "--copy-from has no effect with policy",
    ),
    "no prompt": ([*LINES, [{"text": "a"}]], 'line 1 must be an object with "prompt"'),
    "prompt and messages": ([*LINES, [{"prompt": "a", "messages": [MESSAGE]}]], "line 1 must be an object"),
    "no option": ([*LINES, [{"prompt": "a", "temprature": 1}]], "'temprature' is no option"),
    "one id twice": ([*LINES, [{"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"}]], "same id twice"),
    "no prompts": ([*LINES, []], "holds no prompts"),
    "compared lines": ([*LINES, [{"prompt": "a"}], "--compare"], "--prompts takes no single prompt"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_mistakes_end_with_2_and_one_line(folder, case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, message = ERRORS[case]
    for name in ("EMPTY", "UNFINISHED/checkpoints"):
        (tmp_path / name).mkdir(parents=True)
    for name, content in {"LATIN": b"k\xe4se", "NOTHING": b"", "SHORT": b"a"}.items():
        (tmp_path / name).write_bytes(content)
    for lines in (argument for argument in arguments if isinstance(argument, list)):
        (tmp_path / "LINES").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    for file in shutil.copytree(folder, tmp_path / "SPEECHLESS").glob("tokenizer*"):
        file.unlink()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # no waiting for a network
    arguments = ["LINES" if isinstance(a, list) else str(tmp_path / a) if a.isupper() else a for a in arguments]
    command = "trace" if "trace" in arguments else "generate"
    result = invoke(command, "--model", folder, *(word for word in arguments if word != "trace"), input="")
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == "" and not (tmp_path / "o.jsonl").exists()


def test_a_model_without_a_distribution_is_one_line(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    for factor, status, message in (
        (float("nan"), 2, "holds NaN or infinite weights, first in model.norm.weight"),
        (3e38, 1, "the logits hold NaN"),  # finite weights whose products are not
    ):
        model = tiny_llama(seed=3)
        model.model.norm.weight.data.fill_(factor)
        model.save_pretrained(tmp_path)
        result = generate(tmp_path, PROMPT)
        assert (result.exit_code, result.stderr.count("\n")) == (status, 1) and message in result.stderr


def test_the_folder_of_a_training_run_stands_for_its_model(folder, expected, tmp_path):
    (tmp_path / "config.json").write_text("{}")  # the run's own, of no model
    (tmp_path / "checkpoints").mkdir()
    shutil.copytree(folder, tmp_path / "model")
    result = generate(tmp_path, PROMPT)
    assert result.stdout == expected.text + "\n", result.stderr


def test_our_own_fault_is_not_dressed_up_as_the_callers(folder, monkeypatch):
    monkeypatch.setattr(TextWriter, "write", Mock(side_effect=ValueError("a fault in here")))
    result = generate(folder, PROMPT)
    assert isinstance(result.exception, RuntimeError)
    assert "a fault in here" in str(result.exception.__cause__)


def test_a_character_that_the_output_cannot_hold_is_shown_by_number():
    buffer = io.BytesIO()
    file = io.TextIOWrapper(buffer, encoding="latin-1")
    TextWriter(Console(file=file)).write("ä and 数")
    assert buffer.getvalue() == "ä and \\u6570".encode("latin-1")


@pytest.mark.parametrize("times", [(3,), (3, 4)], ids=["once", "twice"])
def test_ctrl_c_keeps_the_text_and_sums_up_and_a_second_one_ends_at_once(folder, expected, monkeypatch, times):
    write, chunk, handler = TextWriter.write, count(), signal.getsignal(signal.SIGINT)

    def pressing(self, text, style=None):
        write(self, text, style)
        if next(chunk) + 1 in times:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TextWriter, "write", pressing)
    result = generate(folder, PROMPT, "--compare")
    assert signal.getsignal(signal.SIGINT) is handler
    assert result.exit_code == 130
    assert 0 < len(result.stdout.removesuffix("\n")) < len(expected.text)
    assert expected.text.startswith(result.stdout.removesuffix("\n"))
    assert ("stop reason: interrupted" in result.stderr) == (len(times) == 1)
    assert "speed-up" not in result.stderr


def test_trace_draws_and_prints(folder, tmp_path):
    picture = tmp_path / "trace.png"
    arguments = ["trace", PROMPT, "--model", folder, "--policy", "del", "--max-new-tokens", "20"]
    result = invoke(*arguments, "-o", picture)
    assert result.exit_code == 0, result.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert result.stdout.startswith("round  drafter  drafts")
    records = tmp_path / "trace.jsonl"
    run = generate(folder, PROMPT, "--policy", "del", "--max-new-tokens", "20", "--trace", records, "--json")
    run, rounds = json.loads(run.stdout), [json.loads(line) for line in records.read_text().splitlines()]
    assert [record["index"] for record in rounds] == [*range(len(result.stdout.splitlines()) - 1)]
    assert [token for record in rounds for token in record["tokens"]] == run["token_ids"][1:]
    assert sum(record["loaded_layers"] for record in rounds) == run["stats"]["loaded_layers"]
    for record in rounds:  # of the layers that DEL had to look at, the chosen one among them
        if record["exit_layer"] is None:
            continue
        assert f"exit {record['exit_layer']}" in record["acceptance"]
        assert set(record["acceptance"]) <= {"exit 1", "exit 2", "exit 3"}


def test_inspect_has_a_verdict(folder, tmp_path):
    sample = tmp_path / "sample.txt"
    sample.write_text("a bed, a fig. a cab be a head", encoding="utf-8")
    result = invoke("inspect", folder, "--text", sample, "--max-new-tokens", "10", "--repeats", "1")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("The default policy beside plain decoding:\n  free answers: ")
    for part in ("By exits alone, the best fixed setting, ls:", "answers that repeat the prompt: "):
        assert part in result.stdout
    assert invoke("inspect", folder, "--text", tmp_path / "none.txt").exit_code == 2


def test_a_policy_of_ones_own_imports_what_lies_beside_it_and_its_mistake_is_one_line(folder, tmp_path):
    (tmp_path / "beside_my_policy.py").write_text("WHY = 'my own mistake'\n", encoding="utf-8")
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from beside_my_policy import WHY\nfrom policies import NeverStop\n\nclass Stop(NeverStop):\n"
        "    def stop_before_draw(self, *seen):\n        raise ValueError(WHY)\n",
        encoding="utf-8",
    )
    result = invoke("generate", "--model", folder, "--policy", f"ls:1-3+{mine}:Stop", PROMPT)
    assert result.exit_code == 2 and result.stderr.endswith("error: my own mistake\n")
