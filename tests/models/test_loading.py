"""Checkpoints of every LayerSkip shape, saved by transformers and read back; what cannot run is refused with the list."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    CodeGenConfig,
    CodeGenForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
)

from layerskip_models import (
    DEMO_PATH,
    LAYERSKIP_CHECKPOINTS,
    from_transformers,
    load_model,
    load_tokenizer,
)
from layerskip_models.checkpoints.conversion import arithmetic_dtype
from layerskip_models.checkpoints.loading import resolve_device, resolve_dtype
from selfspec import SelfSpecGenerator
from small_checkpoints import FORMATS
from tiny_llama import full_logits, lean_logits, tiny_llama, tiny_tokenizer

TEXT = [(7 * i + 3) % 24 for i in range(30)]


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(saved: torch.dtype, tmp_path: Path) -> None:
    """ "auto" is float32 on a CPU whatever was saved; weights are rounded to a dtype that is asked for."""
    tiny_llama(dtype=saved, seed=2).save_pretrained(tmp_path)
    assert load_model(tmp_path, device="cpu").dtype == torch.float32
    for dtype in (saved, torch.float64):
        model = load_model(tmp_path, dtype=dtype, device="cpu")
        assert model.weights_dtype == dtype
        assert model.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        reference = LlamaForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        bound = {torch.float64: 1e-5, torch.float32: 1e-4}.get(dtype, 0.2)
        torch.testing.assert_close(lean_logits(model, TEXT), full_logits(reference, TEXT), rtol=1e-5, atol=bound)


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


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "intermediate_size"])
@pytest.mark.parametrize("kind", ["safetensors", "safetensors, sharded"])
def test_a_size_that_the_weights_do_not_have_takes_no_memory(tmp_path: Path, kind: str, field: str) -> None:
    """A trillion numbers: whoever takes memory before comparing shapes ends with the allocator's error."""
    FORMATS[kind](tmp_path, 1)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, field: 10**12}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"another shape|builds no model|is meant"):
        load_model(tmp_path, device="cpu")
