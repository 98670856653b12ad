"""Options of the commands: one description for all, what was removed, and paths that are checked before any work."""

from __future__ import annotations

import inspect
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import bench.commands.bench_app
import selfspec.cli.main
from layerskip_models.output_paths import output_file, output_folder
from selfspec import SelfSpecGenerator, removed
from selfspec.cli.batch_file import OWN_OPTIONS
from selfspec.cli.generate_command import generate_command
from selfspec.cli.main import COMMANDS
from selfspec.cli.serve_command import serve_command
from selfspec.options import NAMES, OPTIONS, SpeculationOptions, check_ranges
from selfspec.serve.api_requests import GenerationRequest
from selfspec.serve.replicas import RayOptions, read_arguments

WRITERS = [
    (bench.commands.bench_app.app, ["run", "-o"]),
    (bench.commands.bench_app.app, ["sweep", "-o"]),
    (bench.commands.bench_app.app, ["peers", "-o"]),
    (bench.commands.bench_app.app, ["roofline", "-o"]),
    (bench.commands.bench_app.app, ["context", "-o"]),
    (bench.commands.bench_app.app, ["batch", "-o"]),
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
        for name in {*group.list_commands(None)} - {"train", "train-pacer", "train-exit"}:
            command = group.get_command(None, name)
            for parameter in (command.imported() if hasattr(command, "imported") else command).params:
                if parameter.name in ("output", "trace"):
                    assert parameter.callback is not None, f"{name} {parameter.name}"
                    found.add(name)
    assert found >= {command[0] for _, command in WRITERS}


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


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["NAME"], "`selfspec NAME` was removed: use OTHER"),
        (["generate", "--gone=3"], "--gone was removed: use --other"),
        (["generate", "--gone", "3"], "--gone was removed: use --other"),
    ],
)
def test_what_was_removed_names_what_to_use(arguments: list[str], answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removed, "COMMANDS", {"NAME": "use OTHER"})
    monkeypatch.setattr(removed, "OPTIONS", {"--gone": "use --other"})
    result = CliRunner().invoke(selfspec.cli.main.app, arguments)
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [f"error: {answer}"]


def test_a_text_after_two_dashes_is_no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removed, "OPTIONS", {"--gone": "use --other"})
    removed.refuse_removed("generate", ["--", "--gone"])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--host", ""], "the address to listen on is empty"),
        (["--max-body-mb", "inf"], "--max-body-mb must be a number of megabytes"),
    ],
)
def test_a_server_is_refused_in_one_line(options: list[str], told: str) -> None:
    result = CliRunner().invoke(selfspec.cli.main.app, ["serve", *options])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and told in line


def test_nothing_that_exists_is_called_removed() -> None:
    assert not removed.COMMANDS.keys() & COMMANDS.keys()


@pytest.mark.parametrize("command", [["generate", "Hello"], ["chat"], ["serve"]])
def test_a_command_of_one_process_says_what_to_use_for_more(command: list[str]) -> None:
    result = CliRunner().invoke(selfspec.cli.main.app, command, env={"WORLD_SIZE": "2"})
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: this command runs in one process: start it without torchrun")
    assert "device_map='auto'" in line and "replicas" in line


def test_python_shows_every_option() -> None:
    shown = inspect.signature(SelfSpecGenerator.generate).parameters
    assert [*shown] == ["self", "prompt", "messages", "streamer", *NAMES]
    assert all(shown[name].default is None for name in NAMES if name != "trace")


def test_the_command_line_has_every_option_that_can_be_written() -> None:
    shown = inspect.signature(generate_command).parameters
    assert {*OWN_OPTIONS} == {*OPTIONS} <= {*shown}
    for name, (_, option) in OPTIONS.items():
        assert option.help == "" or shown[name].annotation.__metadata__[0].help == option.help


def test_custom_generate_takes_the_options_of_speculation() -> None:
    """transformers passes on only what the signature of the callable names."""
    from selfspec.integrations.custom_generate import CustomGenerate

    assert {*get_type_hints(SpeculationOptions)} <= {*inspect.signature(CustomGenerate.__call__).parameters}


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
def test_a_server_allows_nothing_outside_the_range(name: str) -> None:
    """But top_p = 0, which OpenAI's API has: only the most likely token is left."""
    for value in (-0.1, 0.0, 0.5, 1.0, 1.5, 2.0):
        if (name, value) == ("top_p", 0.0):
            continue
        try:
            check_ranges({name: value})
        except ValueError:
            with pytest.raises(ValueError, match=name):
                GenerationRequest.model_validate({"model": "m", name: value})


def test_arguments_of_replicas_are_those_of_serve(tmp_path: Path) -> None:
    """But for those that are Ray's. On Ray's command line every value is a text."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    assert {field.name for field in fields(RayOptions) if f"`{field.name}`" not in page} == set()
    notes = tmp_path / "notes.txt"
    notes.write_text("to copy from", encoding="utf-8")
    given = {
        "num_replicas": "3", "batch_size": "2", "num_cpus": "0.5", "share_prefixes": "true", "max_body_mb": "0.5",
        "default_chat_tokens": "7", "max_tokens": "9", "allow_policy": "del", "copy_from": str(notes),
        "allow_host": "API.example", "dtype": "bfloat16",
    }  # fmt: skip
    load, serve, ray = read_arguments(given)
    assert (load.dtype, ray.num_replicas, ray.num_cpus) == ("bfloat16", 3, 0.5)
    assert (serve.name, serve.batch_size, serve.share_prefixes) == ("demo", 2, True)
    assert (serve.max_body_bytes, serve.default_chat_tokens, serve.max_tokens) == (1 << 19, 7, 9)
    assert (serve.allow_policy, serve.copied_texts) == (["del"], ["to copy from"])
    assert serve.hosts is not None and "api.example" in serve.hosts
    assert read_arguments({"allow_policy": ["del", "ar"]})[1].allow_policy == ["del", "ar"]
    load, serve, _ = read_arguments({})
    own = inspect.signature(serve_command).parameters
    shown = {**asdict(load), **asdict(serve)}
    assert shown.keys() == own.keys()
    assert {name for name in shown if (shown[name] or None) != (own[name].default or None)} == {"max_waiting", "host"}
    assert serve.hosts is None
    for name in ("nonsense", "host", "port", "grace_seconds"):
        with pytest.raises(ValueError, match=name):
            read_arguments({name: "1"})
