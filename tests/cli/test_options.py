"""Options of the commands: one description for all, and what is checked before any work."""

from __future__ import annotations

import inspect
from dataclasses import asdict, fields
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from bench.commands.bench_app import app as bench_app
from layerskip_models.output_paths import output_file, output_folder
from selfspec import SelfSpecGenerator
from selfspec.cli.batch_file import OWN_OPTIONS
from selfspec.cli.commands import generate_command, serve_command
from selfspec.cli.main import app as selfspec_app
from selfspec.integrations.custom_generate import CustomGenerate
from selfspec.options import NAMES, OPTIONS, SpeculationOptions, check_ranges
from selfspec.serve.api_requests import GenerationRequest
from selfspec.serve.replicas import RayOptions, read_arguments


def test_a_path_that_cannot_be_written_is_one_line_of_every_command_that_writes_a_file(tmp_path: Path) -> None:
    """Told before anything else is looked at."""
    (tmp_path / "file").touch()
    target, tried = tmp_path / "file" / "below" / "x.jsonl", 0
    for app in (bench_app, selfspec_app):
        group: Any = get_command(app)
        for name in group.list_commands(None):
            command = group.get_command(None, name)
            for parameter in command.params:
                if parameter.name in ("output", "trace", "svg"):
                    result = CliRunner().invoke(app, [name, parameter.opts[-1], str(target)])
                    told = f"error: cannot write {target}: Not a directory; choose another path\n"
                    assert (result.exit_code, result.stderr) == (2, told), name
                    tried += 1
    assert tried > 10


def test_folders_are_made_and_what_is_no_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "x.jsonl"
    assert output_file(path) == path
    assert list((tmp_path / "new").rglob("*")) == [path.parent]
    assert output_folder(tmp_path / "other").is_dir()
    path.write_text("kept", encoding="utf-8")
    output_file(path)
    assert path.read_text(encoding="utf-8") == "kept"
    with pytest.raises(ValueError, match="it is a folder; name a file in it"):
        output_file(tmp_path)
    assert output_file(Path("/dev/null")) == Path("/dev/null")
    with pytest.raises(ValueError, match="it is not a regular file"):  # renaming onto it would replace the device
        output_file(Path("/dev/null"), replaced=True)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["trace", "-o", "x.png"], ["pictures need matplotlib: pip install matplotlib"]),
        (["verify", "no/such/folder"], ["no/such/folder"]),
        (["chat", "smolm2"], ["no model or folder is called 'smolm2': did you mean smollm2?"]),
        (["serve", "--host", ""], ["the address to listen on is empty"]),
        (["serve", "--max-body-mb", "inf"], ["--max-body-mb must be a number of megabytes"]),
        *(
            (["WORLD", *command], ["runs in one process: start it without torchrun", "device_map='auto'", "replicas"])
            for command in (["generate", "Hello"], ["chat"], ["serve"])
        ),
    ],
)
def test_what_is_refused_names_what_to_use_in_one_line(
    arguments: list[str], told: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A wrong model name, a missing package, wrong server settings, and a start by torchrun (WORLD)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("selfspec.cli.commands.find_spec", lambda name: None)
    if arguments[0] == "WORLD":
        monkeypatch.setenv("WORLD_SIZE", "2")
        arguments = arguments[1:]
    result = CliRunner().invoke(selfspec_app, arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and all(part in line for part in told)


@pytest.mark.parametrize(
    ("app", "typed", "meant"), [(selfspec_app, "genrate", "generate"), (bench_app, "perrs", "peers")]
)
def test_a_misspelt_command_gets_a_suggestion(app: Any, typed: str, meant: str) -> None:
    result = CliRunner().invoke(app, [typed])
    assert result.exit_code == 2 and f"Did you mean '{meant}'" in result.stderr


def test_python_and_the_command_line_have_every_option() -> None:
    shown = inspect.signature(SelfSpecGenerator.generate).parameters
    assert [*shown] == ["self", "prompt", "messages", "streamer", *NAMES]
    assert all(shown[name].default is None for name in NAMES if name != "trace")
    own = inspect.signature(generate_command).parameters
    assert {*OWN_OPTIONS} == {*OPTIONS} <= {*own}
    for name, (_, option) in OPTIONS.items():
        assert option.help == "" or own[name].annotation.__metadata__[0].help == option.help
    # transformers passes on only what the signature of the callable names.
    assert {*SpeculationOptions.__annotations__} <= {*inspect.signature(CustomGenerate.__call__).parameters}


def test_a_server_allows_nothing_outside_the_range() -> None:
    """But top_p = 0, which OpenAI's API has: only the most likely token is left."""
    for name, value in product(["temperature", "top_p", "min_p"], [-0.1, 0.0, 0.5, 1.0, 1.5, 2.0]):
        try:
            check_ranges({name: value})
        except ValueError:
            if (name, value) != ("top_p", 0.0):
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
