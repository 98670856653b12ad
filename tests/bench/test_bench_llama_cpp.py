"""The GGUF file by value, and llama.cpp on it against transformers. Each part needs the package that it is about."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from bench.engines.transformers_engine import transformers_engines
from bench.measure import compare_outputs
from bench.record import matching, read_record
from fuzz_models import ROPES
from tiny_llama import tiny_llama, tiny_tokenizer

PROMPT = torch.randint(0, 24, (40,), generator=torch.Generator().manual_seed(1))


def llama(**options: Any) -> LlamaForCausalLM:
    """Rows that Q8_0 holds, heads that are not the hidden size together, biases that are not 0."""
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 16, "hidden_size": 96, "intermediate_size": 64}
    model = tiny_llama(seed=3, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-3, **shape, **options)
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0, 0.1, generator=generator)
        parameter.data = parameter.data.bfloat16().float()
    return model


def test_rows_that_q8_cannot_hold_are_refused(tmp_path: Path) -> None:
    from bench.engines.gguf_file import write_gguf

    with pytest.raises(ValueError, match="multiple of 32 numbers; this model's are of 16, 24"):
        write_gguf(tiny_llama(), tmp_path / "model.gguf", "Q8_0")


def written(model: LlamaForCausalLM, kind: str) -> Any:
    """llama.cpp on the model's weights as this kind."""
    from bench.engines.gguf_file import written_gguf
    from bench.engines.llama_cpp import LLAMA_CPP, LlamaCppEngine

    with written_gguf(model, kind) as path:
        return LlamaCppEngine(LLAMA_CPP, path, 64, kind)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("tied", [True, False])
def test_llama_cpp_computes_what_transformers_does(rope: str, tied: bool) -> None:
    pytest.importorskip("llama_cpp")
    model = llama(rope=rope, tie_word_embeddings=tied)
    reference, engine = transformers_engines(model, None)[0], written(model, "F16")
    expected = reference.next_logits(PROMPT)
    assert float((engine.next_logits(PROMPT) - expected).abs().max()) < 0.01 * float(expected.abs().max())
    theirs, ours = reference.generate(PROMPT, 20), engine.generate(PROMPT, 20)
    difference = compare_outputs(PROMPT, theirs.tokens, ours.tokens, reference, torch.float16)
    assert not difference or difference["near_tie"]


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


def test_peers_with_llama_cpp(invoke: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llama_cpp")
    checkpoint, temporary, record = tmp_path / "tiny", tmp_path / "temporary", tmp_path / "peers.jsonl"
    temporary.mkdir()
    llama().save_pretrained(checkpoint)
    tiny_tokenizer().save_pretrained(checkpoint)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    options = ["--prompt-tokens", "12", "--max-new-tokens", "10", "--repeats", "2", "--num-samples", "2"]
    engines = ["--engine", "llama.cpp:BF16", "--engine", "llama.cpp:Q8_0", "--output", str(record)]
    result = invoke("peers", "--model", checkpoint, *engines, *options)
    assert result.exit_code == 0, result.output
    assert not list(temporary.rglob("*.gguf"))
    lines = read_record(record)
    outputs = matching(lines, "output")
    assert {line["engine"] for line in outputs} >= {"llama.cpp:BF16", "llama.cpp:Q8_0"}
    assert {line["reference"] for line in outputs} == {"selfspec:ar"}
    assert {line["repeats_that_differ"] for line in outputs} == {0}  # a run does not depend on the one before
    assert lines[0]["provenance"]["versions"]["llama.cpp"].count("(") == 1
    assert "| llama.cpp BF16 |" in invoke("report", record).output
