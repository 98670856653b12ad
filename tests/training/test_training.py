import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, Qwen2Config

from layerskip_models import load_model
from layerskip_models.checkpoints.named_models import NAMED_MODELS
from layerskip_models.training.layerskip import train
from tiny_training import tiny, weights, write_numbers


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_numbers(tmp_path_factory.mktemp("text") / "numbers.txt")


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    config = tiny(text, tmp_path_factory.mktemp("run") / "out", keep_at=(4, 8))
    train(config)
    return Path(config.output_dir)


def test_run_leaves_a_usable_model_and_a_log(finished):
    model = LlamaForCausalLM.from_pretrained(finished / "model")
    tokenizer = AutoTokenizer.from_pretrained(finished / "model")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert not model.generation_config.do_sample
    ids = tokenizer("one and one make", return_tensors="pt")["input_ids"]
    assert model.generate(ids, max_new_tokens=3).shape[1] == ids.shape[1] + 3
    records = [json.loads(line) for line in (finished / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 9))
    held_out = records[-1]["held_out"]
    assert len(held_out["loss"]) == len(held_out["agreement"]) == 4
    assert held_out["agreement"][-1] == 1
    assert records[-1]["loss"].keys() == {"3"}  # layers 7 mod 4 = 3 and the last, which is the same
    assert records[-2]["loss"].keys() == {"2", "3"}
    final, early, last = (weights(finished / name) for name in ("model", "steps/4", "steps/8"))
    assert all(torch.equal(final[name], last[name]) for name in final)
    assert not torch.equal(final["lm_head.weight"], early["lm_head.weight"])


@pytest.mark.parametrize("optimizer", ["muon", pytest.param("adamw", marks=pytest.mark.slow)])
def test_training_learns(text, tmp_path, optimizer):
    config = tiny(
        text,
        tmp_path / "out",
        max_steps=40,
        eval_every=10,
        long_steps=0,
        optimizer=optimizer,
        layer_dropout=0.1,
        learning_rate=1e-2,
    )
    train(config)
    records = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    # from about ln(280) = 5.6 nats to less than half of it was lost: the words are few, their order is simple
    assert records[0]["loss"]["3"] > 5
    assert records[-1]["held_out"]["loss"][-1] < 3.8


def test_micro_batches_change_nothing_but_rounding(text, finished, tmp_path):
    train(tiny(text, tmp_path / "out", micro_batch_tokens=64))
    other = weights(tmp_path / "out" / "model")
    for name, value in weights(finished / "model").items():
        torch.testing.assert_close(value, other[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_continuing_from_a_checkpoint_keeps_tokenizer_and_template(kind, text, finished, tmp_path):
    start = tmp_path / "start"
    tokenizer = AutoTokenizer.from_pretrained(finished / "model")
    tokenizer.chat_template = "{{ messages[0].content }}"
    if kind == "folder":
        shutil.copytree(finished / "model", start)
    else:
        from bench.engines.gguf_file import write_gguf

        start.mkdir()
        model = LlamaForCausalLM.from_pretrained(finished / "model", dtype=torch.float32)
        write_gguf(model, start / "model.gguf", "F32")
    tokenizer.save_pretrained(start)
    init = str(start / "model.gguf" if kind == "gguf" else start)
    unmoved = {"max_steps": 2, "warmup_steps": 0, "learning_rate": 1e-9, "weight_decay": 0, "long_steps": 0}
    train(tiny(text, tmp_path / "out", init=init, **unmoved))
    for name, value in weights(finished / "model").items():
        torch.testing.assert_close(value, weights(tmp_path / "out" / "model")[name], rtol=0, atol=1e-6, msg=name)
    kept = AutoTokenizer.from_pretrained(tmp_path / "out" / "model")
    assert (kept.chat_template, kept.eos_token_id) == (tokenizer.chat_template, tokenizer.eos_token_id)
    assert not hasattr(load_model(tmp_path / "out").config, "quantization_config")
    with pytest.raises(ValueError, match=r"sequences of 128 tokens are longer than the context .* \(96\)"):
        train(tiny(text, tmp_path / "long", init=init, sequence_length=128, batch_tokens=128))


def test_a_start_that_cannot_be_trained_is_said(text, finished, tmp_path, monkeypatch):
    monkeypatch.setitem(NAMED_MODELS, "small", replace(NAMED_MODELS["smollm2"], package="no-such-package"))
    with pytest.raises(FileNotFoundError, match="selfspec get small downloads it"):
        train(tiny(text, tmp_path / "out", init="small"))
    other = tmp_path / "other"
    AutoTokenizer.from_pretrained(finished / "model").save_pretrained(other)
    Qwen2Config(vocab_size=280, hidden_size=16, num_attention_heads=2, num_key_value_heads=1).save_pretrained(other)
    with pytest.raises(ValueError, match=r"init must be a Llama checkpoint, .* is of type 'qwen2'"):
        train(tiny(text, tmp_path / "out", init=str(other)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": ()}, "at least one file"),
        ({"data": ("missing.txt",)}, r"does not exist: 'missing\.txt'"),
        ({"sequence_length": 128, "batch_tokens": 128}, "longer than context_length 96"),
        ({"batch_tokens": 63}, "batch_tokens must be a multiple of the sequence length 16, got 63"),
        ({"layer_dropout": 1.0}, r"layer_dropout must be in \[0, 1\), got 1.0"),
        ({"keep_at": (8, 9)}, r"keep_at must be steps in \[1, 8\], up to max_steps, got 9"),
        ({"exit_loss": "full", "curriculum": "none"}, "curriculum none trains no exit"),
        ({"num_layers": 1}, "num_layers must be at least 2, got 1"),
        ({"loops": 2}, "with loops, the exits of all loops are trained alike: leave layer_dropout at its default"),
        ({"loops": 65}, r"loops must be in \[1, 64\], got 65"),
        ({"num_heads": 3, "num_kv_heads": 2}, r"num_kv_heads must divide num_heads \(3\), got 2"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"optimizer": "sgd"}, "optimizer must be one of muon, adamw, got 'sgd'"),
        ({"exit_weights": "1,1"}, r"one number per layer \(4\)"),
        ({"exit_weights": "heavy"}, "published, uniform or 4 numbers"),
        ({"long_steps": 9}, r"long_steps must be at most max_steps \(8\)"),
        ({"decay_fraction": 0.0}, r"decay_fraction must be in \(0, 1\]"),
    ],
)
def test_wrong_values_are_named(text, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        tiny(text, tmp_path / "out", **changes)


def test_schedules(text, tmp_path):
    wsd = tiny(text, tmp_path, max_steps=10, warmup_steps=1, decay_fraction=0.5, learning_rate=1.0)
    # rise 1/2; constant until half; then (10 - step) / 5
    assert [wsd.learning_rate_at(step, 10) for step in range(10)] == pytest.approx(
        [0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]
    )
    cosine = tiny(text, tmp_path, max_steps=10, warmup_steps=0, lr_schedule="cosine", learning_rate=1.0)
    # (1 + cos(pi/2)) / 2 of the way between 1 and .1 in the middle
    assert [cosine.learning_rate_at(step, 10) for step in (0, 5)] == pytest.approx([1, 0.55])
    assert [wsd.sequence_length_at(step) for step in (7, 8)] == [16, 32]
