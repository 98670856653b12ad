import json
import multiprocessing
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, Qwen2Config

from launched_processes import results_of
from layerskip_models import load_model
from layerskip_models.checkpoints.named_models import NAMED_MODELS
from layerskip_models.training import loop
from layerskip_models.training.evaluation import evaluate, is_looping
from layerskip_models.training.loop import train
from layerskip_models.training.saving import latest_checkpoint, rewind_log, write_folder
from tiny_training import TINY, begin_launched, tiny, weights, write_numbers


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_numbers(tmp_path_factory.mktemp("text") / "numbers.txt")


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """An uninterrupted run."""
    config = tiny(text, tmp_path_factory.mktemp("run") / "out", keep_at=(4, 8))
    train(config)
    return Path(config.output_dir)


def assert_same_weights(first, second):
    for name, value in weights(first).items():
        torch.testing.assert_close(value, weights(second)[name], rtol=0, atol=0, msg=name)


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


@pytest.mark.parametrize("optimizer", ["muon", pytest.param("adamw", marks=pytest.mark.slow)])
def test_training_learns(text, tmp_path, optimizer):
    config = tiny(
        text,
        tmp_path / "out",
        max_steps=40,
        eval_every=10,
        long_steps=0,
        own_text_steps=0,
        optimizer=optimizer,
        layer_dropout=0.1,
        learning_rate=1e-2,
    )
    train(config)
    records = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    # from about ln(280) = 5.6 nats to less than half of it was lost: the words are few, their order is simple
    assert records[0]["loss"]["3"] > 5
    assert records[-1]["held_out"]["loss"][-1] < 3.8


def test_killed_run_resumes_to_the_same_weights(text, finished, tmp_path):
    output_dir = tmp_path / "out"
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    process = multiprocessing.get_context("fork").Process(
        target=_train_until_killed,
        args=(["--data", text, "--output-dir", str(output_dir), "--max-steps", "8", *arguments],),
    )
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    latest = latest_checkpoint(output_dir / "checkpoints")
    assert latest is not None
    assert latest[1] == 3
    assert not (output_dir / "model").exists()
    train(tiny(text, output_dir, keep_at=(2, 4)))  # the second step is over, so its model is gone
    assert_same_weights(output_dir / "model", finished / "model")
    assert_same_weights(output_dir / "steps" / "4", finished / "steps" / "4")
    assert [path.name for path in (output_dir / "steps").iterdir()] == ["4"]
    steps = [json.loads(line)["step"] for line in (output_dir / "log.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 9))


def _train_until_killed(arguments):
    """As `python -m layerskip_models.training.loop` with these arguments, killed in its fifth step.

    Three steps are saved by then, and the log knows of five.
    """

    def report(self, done, *_):
        if done == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    loop.ResumableRun._print = report
    sys.argv = ["loop", *arguments]
    loop.main()


def _train_launched(config):
    begin_launched()
    return train(config)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_two_processes_learn_what_one_does_with_the_whole_batch(text, tmp_path, optimizer):
    """Each computes half of a batch, with other layers skipped; the second step has own text and another length."""
    changes = {"max_steps": 2, "long_steps": 1, "own_text_steps": 1, "eval_every": 1, "optimizer": optimizer}
    train(tiny(text, tmp_path / "one", **changes))
    results_of(2, _train_launched, tiny(text, tmp_path / "two", **changes))
    logs = [
        [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    ]
    for one, two in zip(*logs, strict=True):
        assert list(two["loss"].values()) == pytest.approx(list(one["loss"].values()), abs=2e-4)
        assert two["held_out"]["loss"] == pytest.approx(one["held_out"]["loss"], abs=2e-4)
    other = weights(tmp_path / "two" / "model")
    for name, value in weights(tmp_path / "one" / "model").items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=1e-5, msg=name)


def test_micro_batches_change_nothing_but_rounding(text, finished, tmp_path):
    train(tiny(text, tmp_path / "out", micro_batch_tokens=64))
    other = weights(tmp_path / "out" / "model")
    for name, value in weights(finished / "model").items():
        torch.testing.assert_close(value, other[name], rtol=1e-3, atol=1e-4, msg=name)


def test_continuing_from_a_checkpoint(text, finished, tmp_path):
    start = str(finished / "model")
    config = tiny(text, tmp_path / "out", init=start, max_steps=2, warmup_steps=0, learning_rate=1e-9, weight_decay=0)
    train(config)
    for name, value in weights(start).items():
        torch.testing.assert_close(value, weights(tmp_path / "out" / "model")[name], rtol=0, atol=1e-6, msg=name)
    with pytest.raises(ValueError, match=r"sequences of 128 tokens are longer than the context .* \(96\)"):
        train(tiny(text, tmp_path / "long", init=start, sequence_length=128, batch_tokens=128))


def test_continuing_from_a_gguf_file_keeps_tokenizer_and_template(text, finished, tmp_path):
    pytest.importorskip("gguf")
    from bench.engines.gguf_file import write_gguf

    start = tmp_path / "start"
    start.mkdir()
    model = LlamaForCausalLM.from_pretrained(finished / "model", dtype=torch.float32)
    write_gguf(model, start / "model.gguf", "F32")
    tokenizer = AutoTokenizer.from_pretrained(finished / "model")
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(start)
    unmoved = {"max_steps": 2, "warmup_steps": 0, "learning_rate": 1e-9, "weight_decay": 0, "long_steps": 0}
    train(tiny(text, tmp_path / "out", init=str(start / "model.gguf"), **unmoved))
    for name, value in weights(finished / "model").items():
        torch.testing.assert_close(value, weights(tmp_path / "out" / "model")[name], rtol=0, atol=1e-6, msg=name)
    kept = AutoTokenizer.from_pretrained(tmp_path / "out" / "model")
    assert kept.chat_template == tokenizer.chat_template
    assert kept.eos_token_id == tokenizer.eos_token_id
    assert not hasattr(load_model(tmp_path / "out").config, "quantization_config")


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
        ({"own_text_tokens": 40}, "sequences of 104 tokens are longer than context_length 96"),
        ({"batch_tokens": 63}, "batch_tokens must be a multiple of the sequence length 16, got 63"),
        ({"layer_dropout": 1.0}, r"layer_dropout must be in \[0, 1\), got 1.0"),
        ({"max_steps": 0}, "max_steps must be at least 1, got 0"),
        ({"keep_at": (8, 9)}, r"keep_at must be steps in \[1, 8\], up to max_steps, got 9"),
        ({"exit_loss": "decayed"}, "exit_loss must be one of uniform, cumulative, full, got 'decayed'"),
        ({"exit_loss_alpha": 1.5}, r"exit_loss_alpha must be in \[0, 1\], got 1.5"),
        ({"exit_loss_block": 0}, "exit_loss_block must be at least 1, got 0"),
        ({"exit_loss": "full", "curriculum": "none"}, "curriculum none trains no exit"),
        ({"num_layers": 1}, "num_layers must be at least 2, got 1"),
        ({"num_heads": 3, "num_kv_heads": 2}, r"num_kv_heads must divide num_heads \(3\), got 2"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"optimizer": "sgd"}, "optimizer must be one of muon, adamw, got 'sgd'"),
        ({"exit_weights": "1,1"}, r"one number per layer \(4\)"),
        ({"exit_weights": "heavy"}, "published, uniform or 4 numbers"),
        ({"long_steps": 9}, r"long_steps must be at most max_steps \(8\)"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0"),
        ({"decay_fraction": 0.0}, r"decay_fraction must be in \(0, 1\]"),
        ({"seed": -1}, "seed must be at least 0"),
    ],
)
def test_wrong_values_are_named(text, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        tiny(text, tmp_path / "out", **changes)


def test_output_dir_of_another_run(text, finished, tmp_path):
    with pytest.raises(ValueError, match="another learning_rate, seed"):
        train(tiny(text, finished, seed=1, learning_rate=1e-4))
    (tmp_path / "file.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds no training run"):
        train(tiny(text, tmp_path))


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


def test_folders_are_written_whole(tmp_path):
    def fail(path):
        (path / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "step-00000003", fail)
    assert latest_checkpoint(tmp_path) is None
    for content in ("one", "two"):
        write_folder(
            tmp_path / "step-00000003", lambda path, content=content: (path / "f").write_text(content) and None
        )
    assert (tmp_path / "step-00000003" / "f").read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_log_is_rewound(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    rewind_log(log, 2)
    assert log.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_loops():
    varied = list(range(100))
    assert not is_looping(varied)
    assert is_looping(varied + [7, 8] * 16)  # period 2 over the last 32
    assert is_looping(varied + list(range(16)) * 2)
    assert not is_looping(varied + list(range(17)) * 2)
    assert is_looping([1, 2, 3, 4, 0, 1, 2, 3, 4, 9, 1, 2, 3, 4, 8, 1, 2, 3, 4, *range(20, 60)])  # four times
    assert not is_looping([1, 2, 3, 4, 0, 1, 2, 3, 4, 9, 1, 2, 3, 4, *range(20, 60)])
    assert not is_looping([1, 1, 1])


def test_evaluation_of_text_and_prompts(finished):
    model = LlamaForCausalLM.from_pretrained(finished / "model", attn_implementation="sdpa")
    tokenizer = AutoTokenizer.from_pretrained(finished / "model")
    prompts = ["one and", "a much longer prompt: one and two make 3"]
    result = evaluate(model, tokenizer, ["five and five make 10\n" * 20], prompts, length=16, num_tokens=6)
    assert result.held_out_text is not None
    assert result.held_out_text.agreement[-1] == 1
    assert result.own_text is not None
    assert result.own_text.num_rows == 12
    # its own greedy text: the last layer's argmax is the next token, so batching with padding changed nothing
    for sample, prompt in zip(result.samples, prompts):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        alone = model.generate(ids, max_new_tokens=6, eos_token_id=[], pad_token_id=0)
        assert tokenizer.decode(alone[0, ids.shape[1] :]) == sample["continuation"]
