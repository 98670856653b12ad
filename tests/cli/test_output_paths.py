"""Every command that writes makes the folders, and refuses a path that cannot be written before it does any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import bench.commands.bench_app
import selfspec.cli.main
from layerskip_models.output_paths import output_file, output_folder

WRITERS = [
    (bench.commands.bench_app.app, ["run", "-o"]),
    (bench.commands.bench_app.app, ["sweep", "-o"]),
    (bench.commands.bench_app.app, ["peers", "-o"]),
    (bench.commands.bench_app.app, ["chat", "--model", "none", "--prompts", "none.jsonl", "-o"]),
    (bench.commands.bench_app.app, ["roofline", "-o"]),
    (bench.commands.bench_app.app, ["context", "-o"]),
    (bench.commands.bench_app.app, ["batch", "-o"]),
    (bench.commands.bench_app.app, ["serving", "-o"]),
    (bench.commands.bench_app.app, ["load", "-o"]),
    (bench.commands.bench_app.app, ["kernels", "-o"]),
    (bench.commands.bench_app.app, ["report", "none.jsonl", "-o"]),
    (selfspec.cli.main.app, ["generate", "text", "--trace"]),
    (selfspec.cli.main.app, ["generate", "--prompts", "none.jsonl", "-o"]),
    (selfspec.cli.main.app, ["trace", "text", "-o"]),
]


def test_every_output_option_is_checked_before_the_command_starts() -> None:
    """A command that gets such an option without the check fails here."""
    found = set()
    for app in (bench.commands.bench_app.app, selfspec.cli.main.app):
        group: Any = get_command(app)
        for name in group.list_commands(None):
            command = group.get_command(None, name)
            for parameter in (command.imported() if hasattr(command, "imported") else command).params:
                if parameter.name in ("output", "output_dir", "trace") and name not in (
                    "train",
                    "train-pacer",
                    "train-exit",
                ):
                    assert parameter.callback is not None, f"{name} {parameter.name}"
                    found.add(name)
    assert found == {command[0] for _, command in WRITERS}


@pytest.mark.parametrize(("app", "command"), WRITERS, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_a_path_that_cannot_be_written_is_one_line(
    app: object, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_work(*arguments: object, **options: object) -> None:
        raise AssertionError("work began")

    for place in (
        "bench.commands.run_command.open_tokenizer",
        "bench.commands.run_command.choose_prompts",
        "selfspec.cli.generate_command.load_generator",
    ):
        monkeypatch.setattr(place, no_work)
    (tmp_path / "file").write_text("", encoding="utf-8")
    target = tmp_path / "file" / "below" / "x.jsonl"
    result = CliRunner().invoke(app, [*command, str(target)])  # type: ignore[arg-type]
    assert result.exit_code == 2, result.output
    assert result.stderr == f"error: cannot write {target}: Not a directory; choose another path\n"


def test_folders_are_made_and_nothing_else_is(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "x.jsonl"
    assert output_file(path) == path
    assert list((tmp_path / "new").rglob("*")) == [path.parent]
    assert output_folder(tmp_path / "other").is_dir()
    path.write_text("kept", encoding="utf-8")
    output_file(path)
    assert path.read_text(encoding="utf-8") == "kept"


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it is a folder; name a file in it"):
        output_file(tmp_path)
    assert output_file(Path("/dev/null")) == Path("/dev/null")
    with pytest.raises(ValueError, match="it is not a regular file"):  # renaming onto it would replace the device
        output_file(Path("/dev/null"), replaced=True)


RUN = '{"kind": "run", "command": "run", "engines": {}, "configuration": {"model": "m"}, "provenance": {}}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no record at"),
        ("", "is not a record of selfspec-bench"),
        (RUN + '{"kind": "sam', "line 2 is not JSON"),
        (RUN + "[1]\n", 'line 2 is no object with a "kind"'),
        (RUN, "lacks lines or fields that its tables need"),
        (RUN.replace('"run", "engines"', '"sweep", "engines"'), "lacks lines or fields that its tables need"),
    ],
)
def test_a_missing_or_damaged_record_is_one_line(text: str | None, message: str, tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    if text is not None:
        record.write_text(text, encoding="utf-8")
    for arguments in (["report", str(record)], ["report", str(record), "-o", str(tmp_path / "page.md")]):
        result = CliRunner().invoke(bench.commands.bench_app.app, arguments)
        assert result.exit_code == 2, result.output
        assert message in result.stderr
        assert result.stderr.count("\n") == 1


def test_what_a_run_left_is_no_record(tmp_path: Path) -> None:
    part = tmp_path / "record.jsonl.part"
    part.write_text(RUN, encoding="utf-8")
    result = CliRunner().invoke(bench.commands.bench_app.app, ["report", str(part)])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "finish it with --resume first" in result.stderr


def test_two_records_of_one_name_are_told_apart_by_nobody(tmp_path: Path) -> None:
    records = [tmp_path / folder / "record.jsonl" for folder in "ab"]
    for record in records:
        record.parent.mkdir()
        record.write_text(RUN, encoding="utf-8")
    result = CliRunner().invoke(bench.commands.bench_app.app, ["report", *map(str, records)])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "the same file name" in result.stderr
