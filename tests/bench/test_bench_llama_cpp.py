"""The GGUF file by value, and llama.cpp on it against transformers. Each part needs the package that it is about."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from bench.commands.bench_app import app
from bench.commands.peer_makers import LLAMA_CPP, engine_on_file
from bench.engines.llama_batches import names_of
from bench.engines.peers import transformers_generate
from bench.measure import compare_outputs
from bench.record import read_record
from fuzz_models import ROPES
from tiny_llama import tiny_llama, tiny_tokenizer

gguf = pytest.importorskip("gguf")

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 16, 96
PROMPT = torch.randint(0, 24, (40,), generator=torch.Generator().manual_seed(1))


def llama(**options: Any) -> LlamaForCausalLM:
    """Rows that Q8_0 holds, heads that are not the hidden size together, biases that are not 0."""
    shape = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "hidden_size": HIDDEN, "intermediate_size": 64}
    model = tiny_llama(seed=3, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-3, **shape, **options)
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0, 0.1, generator=generator)
        parameter.data = parameter.data.bfloat16().float()
    return model


def read(model: LlamaForCausalLM, path: Path, kind: str) -> Any:
    from bench.engines.gguf_file import write_gguf

    write_gguf(model, path, kind)
    return gguf.GGUFReader(path)


def values(reader: Any) -> dict[str, torch.Tensor]:
    """Every tensor in float32, its stored type left behind."""
    return {
        tensor.name: torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))
        for tensor in reader.tensors
    }


@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_every_tensor_is_the_models(kind: str, tmp_path: Path) -> None:
    model = llama()
    found = values(read(model, tmp_path / "model.gguf", kind))
    layer = model.model.layers[1]
    expected = {
        "token_embd.weight": model.model.embed_tokens.weight,
        "output.weight": model.lm_head.weight,
        "output_norm.weight": model.model.norm.weight,
        "blk.1.attn_norm.weight": layer.input_layernorm.weight,
        "blk.1.attn_v.weight": layer.self_attn.v_proj.weight,
        "blk.1.attn_v.bias": layer.self_attn.v_proj.bias,
        "blk.1.attn_output.weight": layer.self_attn.o_proj.weight,
        "blk.1.ffn_norm.weight": layer.post_attention_layernorm.weight,
        "blk.1.ffn_gate.weight": layer.mlp.gate_proj.weight,
        "blk.1.ffn_up.weight": layer.mlp.up_proj.weight,
        "blk.1.ffn_down.weight": layer.mlp.down_proj.weight,
        "blk.1.ffn_down.bias": layer.mlp.down_proj.bias,
    }
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.detach()), name
    assert len(found) == 1 + sum(1 for _ in model.named_parameters())  # and the rotary factors


def test_rows_of_queries_and_keys_are_in_pairs(tmp_path: Path) -> None:
    model = llama()
    found = values(read(model, tmp_path / "model.gguf", "F32"))
    attention = model.model.layers[0].self_attn
    half = HEAD_DIM // 2
    for name, projection, heads in (("q", attention.q_proj, HEADS), ("k", attention.k_proj, KV_HEADS)):
        for head in range(heads):
            for pair in range(half):
                for which in (0, 1):  # row 2i of a head is its row i, row 2i + 1 its row i + half
                    row, source = head * HEAD_DIM + 2 * pair + which, head * HEAD_DIM + pair + which * half
                    assert torch.equal(found[f"blk.0.attn_{name}.weight"][row], projection.weight[source])
                    assert found[f"blk.0.attn_{name}.bias"][row] == projection.bias[source]


def test_the_description_is_the_models(tmp_path: Path) -> None:
    model = llama(rope="linear", tie_word_embeddings=True)
    reader = read(model, tmp_path / "model.gguf", "F16")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    expected = {
        "general.architecture": "llama", "llama.block_count": 4, "llama.context_length": 64,
        "llama.embedding_length": HIDDEN, "llama.feed_forward_length": 64, "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS, "llama.attention.key_length": HEAD_DIM,
        "llama.attention.value_length": HEAD_DIM, "llama.rope.dimension_count": HEAD_DIM, "llama.vocab_size": 24,
        "tokenizer.ggml.model": "no_vocab",
    }  # fmt: skip
    assert {name: fields[name] for name in expected} == expected
    assert fields["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-3)
    assert fields["llama.rope.freq_base"] == 1e4
    found = values(reader)
    assert "output.weight" not in found  # the embedding serves
    assert torch.allclose(found["rope_freqs.weight"], torch.full((HEAD_DIM // 2,), 2.0))  # "linear" divides by 2


def test_q8_rounds_matrices_and_nothing_else(tmp_path: Path) -> None:
    model = llama()
    reader = read(model, tmp_path / "model.gguf", "Q8_0")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["blk.0.ffn_up.weight"] == kinds["token_embd.weight"] == "Q8_0"
    assert kinds["blk.0.ffn_up.bias"] == kinds["blk.0.attn_norm.weight"] == "F32"
    weight = model.model.layers[0].mlp.up_proj.weight.detach().unflatten(1, (-1, 32))
    error = (values(reader)["blk.0.ffn_up.weight"].unflatten(1, (-1, 32)) - weight).abs()
    step = weight.abs().amax(-1, keepdim=True) / 127  # of each 32 numbers; it is itself kept in float16
    assert bool((error <= 0.51 * step + 127 * 2**-11 * step).all())
    assert float(error.max()) > 0


def test_rows_that_q8_cannot_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of 32 numbers; this model's are of 16, 24"):
        read(tiny_llama(), tmp_path / "model.gguf", "Q8_0")


def written(model: LlamaForCausalLM, kind: str, program: str = LLAMA_CPP) -> Any:
    """An engine on the model's weights as this kind."""
    from bench.engines.gguf_file import written_gguf

    with written_gguf(model, kind) as path:
        return engine_on_file(program, path, 64, **names_of(program, kind))[0]


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("tied", [True, False])
def test_llama_cpp_computes_what_transformers_does(rope: str, tied: bool) -> None:
    pytest.importorskip("llama_cpp")
    model = llama(rope=rope, tie_word_embeddings=tied)
    reference, engine = transformers_generate(model), written(model, "F16")
    expected = reference.next_logits(PROMPT)
    assert float((engine.next_logits(PROMPT) - expected).abs().max()) < 0.01 * float(expected.abs().max())
    theirs, ours = reference.generate(PROMPT, 20), engine.generate(PROMPT, 20)
    difference = compare_outputs(PROMPT, theirs.tokens, ours.tokens, reference, torch.float16)
    assert difference is None or difference.near_tie


def test_a_run_does_not_depend_on_the_one_before() -> None:
    pytest.importorskip("llama_cpp")
    engine = written(llama(), "BF16")
    first = engine.generate(PROMPT, 12)
    engine.generate(PROMPT[:5], 3)
    engine.generate(PROMPT[:7], 9)
    again = engine.generate(PROMPT, 12)
    assert first.tokens == again.tokens
    assert len(first.tokens) == 12
    assert again.time_to_first_token is not None and again.decode_seconds is not None
    assert again.seconds == pytest.approx(again.time_to_first_token + again.decode_seconds)


def test_a_file_as_it_is(tmp_path: Path) -> None:
    """Its text is that of the same weights written by the engine, and its vocabulary is the file's."""
    pytest.importorskip("llama_cpp")
    from bench.engines.gguf_file import write_gguf
    from bench.engines.llama_cpp import LlamaCppFile

    write_gguf(llama(), tmp_path / "model.gguf", "F16")
    engine = LlamaCppFile(tmp_path / "model.gguf", 64)
    assert engine.generate(PROMPT, 12).tokens == written(llama(), "F16").generate(PROMPT, 12).tokens
    assert engine.next_logits(PROMPT).shape == (24,)
    with pytest.raises(RuntimeError, match=r"llama.cpp did not load none.gguf"):
        LlamaCppFile(tmp_path / "none.gguf", 64)


def test_texts_in_one_pass_are_the_texts_alone() -> None:
    pytest.importorskip("llama_cpp")
    engine = written(llama(), "F16")
    prompts = [PROMPT, PROMPT[:5], PROMPT[3:]]
    run = engine.run(prompts, 9)
    alone = [list(engine.generate(prompt, 9).tokens) for prompt in prompts]
    assert [len(text) for text in run.tokens] == [9, 9, 9]
    same = sum(together == text for together, text in zip(run.tokens, alone))
    assert same >= 2  # a near-tie may fall either way
    assert run.decode_tokens == 3 * 8 and run.decode_seconds is not None and run.decode_seconds < run.seconds


def test_peers_with_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llama_cpp")
    checkpoint, temporary, record = tmp_path / "tiny", tmp_path / "temporary", tmp_path / "peers.jsonl"
    temporary.mkdir()
    llama().save_pretrained(checkpoint)
    tiny_tokenizer().save_pretrained(checkpoint)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr("bench.commands.started_peers.START_METHOD", "fork")
    run = ["--prompt-tokens", "12", "--max-new-tokens", "10", "--repeats", "2", "--warmups", "1", "--num-samples", "2"]
    options = ["--model", str(checkpoint), "--llama-cpp", "all", "--output", str(record)]
    result = CliRunner().invoke(app, ["peers", *options, *run])
    assert result.exit_code == 0, result.output
    assert not list(temporary.rglob("*.gguf"))
    lines = read_record(record)
    names = [name for name in lines[0]["engines"] if "llama.cpp" in name]
    assert names == ["llama.cpp:BF16", "llama.cpp:F16", "llama.cpp:Q8_0", "llama.cpp:Q4_0"]
    samples = [line for line in lines if line["kind"] == "sample" and line["engine"] in names]
    assert len(samples) == 4 * 2 * 2
    assert all(line["decode_seconds"] > 0 and line["time_to_first_token"] > 0 for line in samples)
    assert {line["reference"] for line in lines if line["kind"] == "output"} == {"selfspec:ar"}
    assert lines[0]["provenance"]["llama_cpp"].count("(") == 1
    assert "| llama.cpp BF16 |" in CliRunner().invoke(app, ["report", str(record)]).output
    assert str(tmp_path) not in json.dumps(lines)
