"""`selfspec export-hub`: what transformers makes of the folder."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.dynamic_module_utils
from transformers import AutoModelForCausalLM, GenerationConfig, TextStreamer, pipeline
from typer.testing import CliRunner

from layerskip_models import DEMO_PATH
from selfspec.cli.main import app
from selfspec.integrations.custom_generate import SelfSpecOutput
from selfspec.integrations.hub_folder import export_hub
from tiny_llama import reference_greedy, tiny_llama, tiny_tokenizer


@pytest.fixture(autouse=True)
def own_module_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers copies a folder's code into a cache before it runs it."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    before = sys.path[:], {*sys.modules}
    yield
    sys.path[:] = before[0]
    for name in {name for name in sys.modules if name.partition(".")[0] == "transformers_modules"}:
        del sys.modules[name]


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    return export_hub(checkpoint, tmp_path / "exported", policy="ls:2-3")


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options)


def test_from_pretrained_decodes_with_selfspec(folder: Path) -> None:
    model = load(folder)
    plain = tiny_llama(seed=3)
    ids = torch.tensor([[5, 1, 7]])
    expected = reference_greedy(plain, [5, 1, 7], max_new_tokens=12)
    assert model.generate(ids, max_new_tokens=12, do_sample=False)[0, 3:].tolist() == expected
    out = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False, return_dict_in_generate=True)
    assert isinstance(out, SelfSpecOutput) and out.sequences[0, 3:].tolist() == expected
    assert out.stats is not None and out.stats[0].num_drafted > 0
    config = GenerationConfig(max_new_tokens=12, do_sample=False, return_dict_in_generate=True)
    assert model.generate(ids, config, policy="ar").stats[0].num_drafted == 0
    assert model.generate(ids, generation_config=config, num_speculations=0).stats[0].num_drafted == 0
    streamer = TextStreamer(tiny_tokenizer(), skip_prompt=True)  # as `transformers serve` has one
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        model.generate(ids, streamer=streamer, max_new_tokens=12, do_sample=False)
    assert shown.getvalue().strip() == tiny_tokenizer().decode(expected).strip()
    for name, value in (("assistant_model", plain), ("num_beams", 2)):
        with pytest.raises(ValueError, match=name):
            model.generate(ids, max_new_tokens=4, **{name: value})
    untrusted: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert not isinstance(untrusted.generate(ids, config), SelfSpecOutput)


@pytest.mark.parametrize("place", ["argument", "configuration", "checkpoint"])
def test_stop_strings_wherever_they_are(place: str, folder: Path) -> None:
    """A caller's configuration stays as it is."""
    model, tokenizer, plain = load(folder), tiny_tokenizer(), tiny_llama(seed=3)
    text = tokenizer.decode(reference_greedy(plain, [5, 1, 7], max_new_tokens=12)[3:5])
    expected = reference_greedy(plain, [5, 1, 7], max_new_tokens=12, stop_strings=[text])
    assert len(expected) < 12
    config = GenerationConfig(max_new_tokens=12, do_sample=False, stop_strings=[text])
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    if place == "checkpoint":
        model.generation_config.stop_strings = [text]
    else:
        options = {"generation_config": config} if place == "configuration" else {**options, "stop_strings": [text]}
    found = model.generate(torch.tensor([[5, 1, 7]]), tokenizer=tokenizer, **options)
    assert found[0, 3:].tolist() == expected and config.stop_strings == [text]


def test_a_pipeline(folder: Path) -> None:
    ours = pipeline("text-generation", str(folder), trust_remote_code=True)
    plain = pipeline("text-generation", str(folder))
    calls: list[Any] = []
    generate = ours.model.generate
    ours.model.generate = lambda *args, **options: calls.append(generate(*args, **options)) or calls[-1]
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
    assert ours("a bed", **options) == plain("a bed", **options)
    assert ours("a bed", stop_sequence="b", **options) == plain("a bed", stop_sequence="b", **options)
    ours("a bed", return_dict_in_generate=True, **options)
    assert isinstance(calls[-1], SelfSpecOutput)


def test_what_is_in_the_folder(tmp_path: Path, checkpoint: Path) -> None:
    exported = export_hub(DEMO_PATH, tmp_path / "demo", link=True)
    assert all(
        (exported / name).exists() for name in ("generation_config.json", "selfspec.json", "pacer/preverifier.json")
    )
    assert (exported / "model.safetensors").is_symlink()
    assert not (exported / "tokenizer.json").is_symlink()
    card = (exported / "README.md").read_text(encoding="utf-8")
    assert re.match(r"---\n(.*\n)*tags:\n(- \w+\n)*- custom_generate\n", card)
    assert "# Demo checkpoint" in card  # its own card goes on below
    assert (exported / "custom_generate" / "requirements.txt").read_text(encoding="utf-8").startswith("selfspec>=")
    copied = tmp_path / "copied"
    assert CliRunner().invoke(app, ["export-hub", str(checkpoint), str(copied), "--policy", "del"]).exit_code == 0
    assert "POLICY = 'del'" in (copied / "custom_generate" / "generate.py").read_text(encoding="utf-8")
    assert not (copied / "model.safetensors").is_symlink()


def test_the_cards_example_keeps_its_promise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Greedy text is the model's own, also where the weights are saved in bfloat16."""
    source = tmp_path / "source"
    tiny_llama(seed=3, max_position_embeddings=128).to(torch.bfloat16).save_pretrained(source)
    tiny_tokenizer().save_pretrained(source)
    exported = export_hub(source, tmp_path / "exported", policy="ls:2-3")
    (example,) = re.findall(r"```python\n(.*?)```", (exported / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    exec(example.replace("PATH_OR_NAME_OF_THIS_FOLDER", str(exported)).replace("def fibonacci(n):", "a bed"), {})
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ids = tiny_tokenizer()("a bed", return_tensors="pt")
    assert capsys.readouterr().out == tiny_tokenizer().decode(plain.generate(**ids, max_new_tokens=64)[0]) + "\n"


def test_nothing_is_copied_that_is_not_part_of_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoint, source)
    weights = (source / "model.safetensors").read_bytes()
    for name in (
        "checkpoints/step-00000010/model.safetensors", "checkpoints/step-00000010/tokenizer.json", "optimizer.safetensors",
        "pacer/checkpoints/state.safetensors", "exits/states/kept.safetensors", ".git/tokenizer", "consolidated.safetensors",
        "LICENSES/notes/secret", "tokenizer/vocab.txt",
    ):  # fmt: skip
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(weights)
    exported = export_hub(source, tmp_path / "exported")
    names = {str(path.relative_to(exported)) for path in exported.rglob("*") if path.is_file()}
    own = {path.name for path in checkpoint.iterdir()}
    assert names == own | {"README.md", "custom_generate/generate.py", "custom_generate/requirements.txt"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["MODEL", "FULL"], "is not empty"),
        (["MODEL", "NEW", "--policy", "ls:9-2"], "exit_layer"),
        (["./nothing-here", "NEW"], "no checkpoint folder"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    places = {"MODEL": str(checkpoint), "FULL": str(tmp_path / "full"), "NEW": str(tmp_path / "new")}
    result = CliRunner().invoke(app, ["export-hub", *[places.get(word, word) for word in arguments]])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1) and message in result.stderr
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_by_its_hub_name(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the local cache, offline: links point at the files themselves, not at the cache's links."""
    repo = tmp_path / "hub" / "models--someone--tiny"
    snapshot = repo / "snapshots" / "0123"
    for folder in (snapshot, repo / "blobs", repo / "refs"):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text("0123", encoding="utf-8")
    for number, path in enumerate(sorted(checkpoint.iterdir())):
        (repo / "blobs" / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = CliRunner().invoke(app, ["export-hub", "someone/tiny", str(tmp_path / "out"), "--link"])
    assert result.exit_code == 0, result.stderr
    weights = tmp_path / "out" / "model.safetensors"
    assert weights.is_symlink() and weights.readlink().parent == (repo / "blobs").resolve()
    assert "base_model: someone/tiny" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
