"""The table of records covers what the repository has, its commands parse, and records are made, resumed and refused."""

from __future__ import annotations

import gzip
import json
import shlex
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import bench.experiments.records.making as making
import bench.experiments.records.records_command as records_command
from bench.commands.bench_app import app as bench_app
from bench.experiments.__main__ import app
from bench.experiments.records.making import Code, Maker, Outcome, duration, make_all
from bench.experiments.records.record_table import FILES, PACKAGES, RECORDS, RecordSource, program_words
from bench.provenance import QUICK_VARIABLE
from bench.record import read_record, record_name
from bench.report.markdown import fill_markers, headline
from bench.sources import ROOT
from layerskip_models import DEMO_PATH
from layerskip_models.kernels.threads import Usable
from policies import LayerCost, parse_policy
from selfspec import SelfSpecGenerator
from selfspec.cli.main import app as selfspec_app

KEPT = {record_name(path): path for folder in ("docs", "bench") for path in (ROOT / folder).rglob("*.jsonl.gz")}
BY_NAME = {source.name: source for source in RECORDS}
WRITTEN_OUT = {"del:omega={0.5,0.8,1}": ["del:omega=0.5", "--policy", "del:omega=0.8", "--policy", "del:omega=1"]}
"""What an older version of the commands understood, and what says the same today."""
OWN_PLACES = {"--output", "-o", "--output-dir", "--work", "--work-dir", "--folder"}
PROGRAMS: dict[str, Any] = {
    "bench": typer.main.get_command(bench_app),
    "bench.experiments": typer.main.get_command(app),
    "selfspec": typer.main.get_command(selfspec_app),
}
CODE = Code(commit="abc", parts={"kernels": "1"})


def maker(folder: Path, **fields: Any) -> Maker:
    return Maker(**{"output_dir": folder, "quick": False, "files": None, "code": CODE, **fields})


def write(path: Path, code: Code = CODE, kind: str = "run", **where: Any) -> None:
    first = {"kind": kind, "provenance": {"commit": code.commit, "sources": code.parts, **where}}
    path.write_text(json.dumps(first) + "\n", encoding="utf-8")


def test_the_table_has_every_record_of_the_repository() -> None:
    """A record that is added needs its line in `record_table.py`."""
    assert len(BY_NAME) == len(RECORDS)
    assert KEPT.keys() <= BY_NAME.keys()
    for name, path in KEPT.items():
        assert ROOT / BY_NAME[name].folder == path.parent, name


def without_places(words: list[str]) -> list[str]:
    """A command's words without folders, and without where it writes."""
    found, rest = [], iter(words)
    for word in rest:
        if word in OWN_PLACES:
            next(rest)
        elif word not in ("--write", "--resume"):  # the first would change the demo's files
            found.append(Path(word).name)
    return sorted(found)


@pytest.mark.parametrize("name", KEPT)
def test_the_table_has_the_command_of_each_record(name: str) -> None:
    """Studies were once commands of selfspec-bench, so programs are not compared."""
    said = shlex.split(read_record(KEPT[name])[0]["provenance"]["command"])
    theirs = [one for word in said for one in WRITTEN_OUT.get(word, [word])]
    theirs = theirs[1:] if said[0] == "selfspec-bench" else theirs[3:]
    assert without_places(BY_NAME[name].words(quick=False)[1:]) == without_places(theirs)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("source", RECORDS, ids=lambda source: source.name)
def test_commands_parse(source: RecordSource, quick: bool, tmp_path: Path) -> None:
    place = str(tmp_path / "record")
    for words in (
        [*source.words(quick=quick), source.output_option, place],
        *([program_words(source.before)] if source.before and quick else []),
    ):
        program = PROGRAMS[words[0]]
        command = program.get_command(None, words[1])
        assert command is not None, words
        command = command.imported() if hasattr(command, "imported") else command
        parsed = [place if word.startswith("WORK") else word for word in words[2:]]
        with command.make_context(words[1], parsed) as context:
            assert Path(context.params["output_dir" if "--output-dir" in words else "output"]) == Path(place)


def test_the_policies_of_all_commands_are_known() -> None:
    """A policy that is named another way by now would end its command after it has begun."""
    generator = SelfSpecGenerator.from_pretrained(DEMO_PATH)
    layers = generator.model.num_layers
    words = [word for source in RECORDS for quick in (False, True) for word in source.words(quick=quick)]
    names = {name for option, name in pairwise(words) if option in ("--policy", "--kept")}
    assert len(names) > 30
    for name in names:
        parse_policy(
            name,
            num_layers=layers,
            measure=lambda: LayerCost(layers),
            preverifier=generator.load_preverifier,
            draft_bits=(8,),
            offered_bits=(8,),
        )


@pytest.mark.parametrize("source", RECORDS, ids=lambda source: source.name)
def test_a_quick_run_needs_no_files_of_the_user(source: RecordSource) -> None:
    assert source.files(quick=True) == []
    assert not any(FILES in word for word in source.words(quick=True))
    assert {*source.modules, *source.peers} <= PACKAGES.keys()


def test_words_files_and_stand_ins_by_hand() -> None:
    source = RecordSource(
        name="a",
        command="selfspec-bench chat --prompts FILES/chat.jsonl --openvino FILES/int4 --data FILES/x.txt.gz:2",
        minutes=1,
        quick="--repeats 1",
    )
    assert source.words(quick=False)[:2] == ["bench", "chat"]
    assert source.files(quick=False) == ["chat.jsonl", "int4", "x.txt.gz"]
    assert source.words(quick=True)[2:] == [
        "--prompts",
        "english",
        "--data",
        "WORK/inputs/texts.txt:2",
        "--repeats",
        "1",
    ]
    assert not source.resumes
    assert [name for name in ("run", "policies", "pacer", "del", "sweep") if BY_NAME[name].resumes] == ["pacer", "del"]


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pacer, gguf = BY_NAME["pacer"], BY_NAME["gguf-medium"]
    assert maker(tmp_path).obstacle(BY_NAME["run"]) is None
    assert maker(tmp_path).obstacle(pacer) == (
        "needs --files FOLDER with humaneval.jsonl.gz, gsm8k.jsonl.gz, summarization.jsonl.gz, translation.jsonl.gz"
    )
    (tmp_path / "humaneval.jsonl.gz").touch()
    assert "needs" not in str(maker(tmp_path, files=tmp_path).obstacle(pacer))
    assert str(maker(tmp_path, files=tmp_path).obstacle(pacer)).startswith("gsm8k.jsonl.gz, summar")
    assert maker(tmp_path, quick=True).obstacle(pacer) is None
    monkeypatch.setattr(making, "find_spec", lambda module: None if module == "llama_cpp" else object())
    assert maker(tmp_path).obstacle(gguf) == "needs llama-cpp-python: pip install llama-cpp-python"
    assert maker(tmp_path, quick=True).obstacle(gguf) is None  # the command leaves llama.cpp out itself


def test_a_record_of_this_code_stays_and_another_is_made_again(tmp_path: Path) -> None:
    source = BY_NAME["run"]
    full, quick = maker(tmp_path), maker(tmp_path, quick=True)
    assert not full.is_complete(source)
    write(full.path(source))
    assert full.is_complete(source)
    assert not quick.is_complete(source)
    write(full.path(source), quick=True)
    assert not full.is_complete(source)
    assert quick.is_complete(source)
    for code in (Code(commit="abd", parts=CODE.parts), Code(commit="abc", parts={"kernels": "2"})):
        write(full.path(source), code)
        assert not full.is_complete(source)
        assert code.key != CODE.key  # what a study trained for it is in another folder
    full.path(source).write_text("", encoding="utf-8")
    assert not full.is_complete(source)


def test_what_broke_off_is_taken_up_at_the_same_code_only(tmp_path: Path) -> None:
    source = BY_NAME["del"]
    part = tmp_path / "del.jsonl.part"
    assert maker(tmp_path).command(source)[-2:] == ["--output", str(tmp_path / "del.jsonl")]
    write(part)
    part.write_text('{"kind": "part", "attempt": "1"}\n' + part.read_text(encoding="utf-8"), encoding="utf-8")
    assert maker(tmp_path).command(source)[-1] == "--resume"
    assert "--resume" not in maker(tmp_path, code=Code(commit="abd", parts=CODE.parts)).command(source)
    write(tmp_path / "policies.jsonl.part")
    assert "--resume" not in maker(tmp_path, files=tmp_path).command(BY_NAME["policies"])  # it keeps a policy


def test_places_of_a_command(tmp_path: Path) -> None:
    one = maker(tmp_path, files=tmp_path / "mine")
    losses = one.command(BY_NAME["exit-losses-control"])
    assert f"{tmp_path / 'mine' / 'corpus' / 'us_addresses.txt.gz'}:0.01" in losses
    assert losses[losses.index("--work-dir") + 1] == str(tmp_path / "work" / f"exit-losses-control-{CODE.key}")
    shapes = one.command(BY_NAME["shapes-medium"])
    assert shapes[-2:] == ["--output-dir", str(tmp_path / "work" / f"shapes-medium-{CODE.key}")]


def test_records_are_made_in_turn_with_the_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [BY_NAME[name] for name in ("run", "pacer", "del", "sweep")]
    one = maker(tmp_path)
    write(one.path(BY_NAME["run"]))
    monkeypatch.setattr(making, "git_commit", lambda folder: "abc")
    monkeypatch.setattr(Maker, "make", lambda self, source: Outcome(what="made", seconds=120.0))
    outcomes: dict[str, Outcome] = {}
    told: list[str] = []
    make_all(one, sources, outcomes, told.append)
    assert {name: outcome.what.partition(":")[0] for name, outcome in outcomes.items()} == {
        "run": "complete already", "pacer": "skipped", "del": "made", "sweep": "made",
    }  # fmt: skip
    # `del` was to take 4 minutes and took 2, so `sweep`, planned with 2, has one left.
    assert told[0] == "[1/2] del: about 4 min; 6 min left for all"
    assert told[2] == "[2/2] sweep: about 60 s; 60 s left for all"
    monkeypatch.setattr(making, "git_commit", lambda folder: "abd")
    with pytest.raises(ValueError, match="no longer that of abc"):
        make_all(one, sources, {}, told.append)


def test_quick_records_share_the_cores_and_end_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at a time; where one may not go on, the others are ended and the rest does not begin."""
    sources = [BY_NAME[name] for name in ("run", "del", "sweep", "cores")]
    monkeypatch.setattr(making, "git_commit", lambda folder: "abc")
    monkeypatch.setattr(making, "usable", lambda: Usable(2, 2))
    one = maker(tmp_path, quick=True)
    together = threading.Barrier(2)

    def make(self: Maker, source: RecordSource) -> Outcome:
        together.wait(timeout=20)  # nobody comes through alone
        return Outcome(what="made", seconds=6.0)

    monkeypatch.setattr(Maker, "make", make)
    outcomes: dict[str, Outcome] = {}
    told: list[str] = []
    make_all(one, sources, outcomes, told.append)
    assert {outcome.what for outcome in outcomes.values()} == {"made"} and len(outcomes) == 4
    assert len(told) == 8

    def refuse_the_second(self: Maker, source: RecordSource) -> Outcome:
        if source.name == "del":
            raise ValueError("the second")
        status, said = self._run(source, [sys.executable, "-c", "import time; time.sleep(60)"])
        return Outcome(what=f"{status} {said}")

    monkeypatch.setattr(Maker, "make", refuse_the_second)
    outcomes = {}
    with pytest.raises(ValueError, match="the second"):
        make_all(one, sources, outcomes, told.append)
    assert not outcomes and not one.running


@pytest.mark.parametrize(("minutes", "text"), [(0.5, "30 s"), (12.4, "12 min"), (150, "2.5 h")])
def test_durations(minutes: float, text: str) -> None:
    assert duration(minutes) == text


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["records", *map(str, arguments)])


@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [
        (CODE, ["--quick", "--keep"], "--keep takes full records"),
        (CODE, ["--only", "rnu"], "no record is called rnu: there are run, policies"),
        (Code(commit="abc+changes", parts={}), [], "there are uncommitted changes, so that records could not name"),
        (Code(commit=None, parts={}), [], "there is no git repository here"),
    ],
)
def test_what_cannot_begin_is_one_line(
    code: Code, arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Code, "here", lambda: code)
    monkeypatch.setattr(records_command, "make_all", lambda *arguments: pytest.fail("work began"))
    result = invoke("--output-dir", tmp_path, *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_complete_records_are_packed_into_their_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Code, "here", lambda: CODE)
    monkeypatch.setattr(making, "git_commit", lambda folder: "abc")
    for module in (making, records_command):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    place = tmp_path / "docs" / "data"
    place.mkdir(parents=True)
    write(tmp_path / "roofline.jsonl")
    result = invoke("--output-dir", tmp_path, "--only", "roofline", "--only", "pacer", "--keep")
    assert result.exit_code == 0, result.output
    assert "kept as docs/data/roofline.jsonl.gz" in result.stdout
    assert [path.name for path in place.iterdir()] == ["roofline.jsonl.gz"]
    assert gzip.decompress((place / "roofline.jsonl.gz").read_bytes()) == (tmp_path / "roofline.jsonl").read_bytes()
    assert "skipped: needs --files FOLDER" in result.stdout


def test_an_interrupted_command_says_what_there_is_and_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: Maker, source: RecordSource) -> Outcome:
        raise KeyboardInterrupt

    monkeypatch.setattr(Code, "here", lambda: CODE)
    monkeypatch.setattr(making, "git_commit", lambda folder: "abc")
    monkeypatch.setattr(Maker, "make", interrupt)
    write(tmp_path / "run.jsonl")
    result = invoke("--output-dir", tmp_path, "--only", "run", "--only", "sweep")
    assert result.exit_code == 130
    assert "complete already" in result.stdout
    assert result.stderr.endswith("interrupted: the same command goes on\n")


@pytest.mark.usefixtures("forked_programs", "known_sources")
def test_a_quick_record_is_made_once_and_documents_refuse_it(tmp_path: Path) -> None:
    arguments = ("--quick", "--allow-changes", "--only", "predictions", "--output-dir", tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output + (tmp_path / "quick" / "logs" / "predictions.log").read_text()
    assert "[1/1] predictions: about 21 s; 21 s left for all" in result.stderr
    lines = read_record(tmp_path / "quick" / "predictions.jsonl")
    assert lines[0]["provenance"]["quick"] is True
    with pytest.raises(ValueError, match="predictions: records of a quick run show only that a command works"):
        fill_markers("<!-- report:predictions -->\n<!-- /report:predictions -->", {"predictions": lines})
    written = (tmp_path / "quick" / "predictions.jsonl").stat().st_mtime_ns
    result = invoke(*arguments)
    assert result.exit_code == 0
    assert "complete already" in result.stdout
    assert (tmp_path / "quick" / "predictions.jsonl").stat().st_mtime_ns == written


@pytest.mark.usefixtures("with_studies")
def test_the_headline_of_a_quick_record_says_so() -> None:
    lines = read_record(KEPT["attention"])
    first = {**lines[0], "provenance": {**lines[0]["provenance"], "quick": True}}
    assert headline([first, *lines[1:]]) == f"A quick run, whose numbers mean nothing. {headline(lines)}"


def test_the_record_is_taken_from_a_command_that_writes_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Writing:
        """`shapes`, which writes a record and a page for each shape; `before` of a record has nothing to do."""

        def __init__(self, command: list[str], env: dict[str, str], **options: Any) -> None:
            assert env[QUICK_VARIABLE] == "1"
            write(Path(command[-1]) / "small.jsonl", quick=True)

        def wait(self) -> int:
            return 0

    monkeypatch.setattr(subprocess, "Popen", Writing)
    one = maker(tmp_path, quick=True)
    assert one.make(BY_NAME["shapes-medium"]).what == "made"
    assert one.is_complete(BY_NAME["shapes-medium"])
    assert not one.work(BY_NAME["shapes-medium"]).exists()


def test_a_command_that_fails_is_named_and_the_others_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Code, "here", lambda: CODE)
    monkeypatch.setattr(making, "git_commit", lambda folder: "abc")

    class Failing:
        """A command that says something and ends with status 3, or writes its record and ends well."""

        def __init__(self, command: list[str], stdout: Any, **options: Any) -> None:
            stdout.write("working\nno memory\n")
            if "cores" not in command:
                write(Path(command[-1]))
            self.status = 3 if "cores" in command else 0

        def wait(self) -> int:
            return self.status

    monkeypatch.setattr(subprocess, "Popen", Failing)
    result = invoke("--output-dir", tmp_path, "--only", "cores", "--only", "roofline")
    assert result.exit_code == 1
    assert "failed with status 3: no memory" in result.stdout
    assert (tmp_path / "roofline.jsonl").exists()
    assert f"what the commands said is in {tmp_path / 'logs'}" in result.stderr
