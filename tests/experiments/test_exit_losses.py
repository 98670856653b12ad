"""The study of exit losses: its arms, its tables, and the command on a tiny model."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from bench.experiments.__main__ import app
from bench.experiments.exit_losses.exit_loss_tables import exit_loss_tables
from bench.experiments.exit_losses.outcome import HeldOut, outcome
from bench.experiments.exit_losses.study import Arm, arms_and_seeds, parse_arm
from bench.record import read_record
from bench.report.markdown import markdown
from layerskip_models import DEMO_PATH
from layerskip_models.training.evaluation import greedy_continuations


def tiny(vocab_size: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            max_position_embeddings=128,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=0,
            tie_word_embeddings=True,
            attn_implementation="sdpa",
        )
    )


def test_arms_are_read_and_named():
    assert parse_arm("uniform") == Arm(loss="uniform")
    assert parse_arm("full:0.30") == Arm(loss="full", alpha=0.3)
    assert parse_arm("cumulative:0.5").name == "cumulative:0.5"
    for wrong in ("full", "uniform:0.5", "full:2", "full:x", "decayed:0.5"):
        with pytest.raises(ValueError, match=f"got '{wrong}'"):
            parse_arm(wrong)
    order = arms_and_seeds([parse_arm("uniform"), parse_arm("full:0.5")], 2)
    assert [(arm.name, seed) for arm, seed in order] == [
        ("uniform", 0),
        ("full:0.5", 0),
        ("uniform", 1),
        ("full:0.5", 1),
    ]


def test_outcome_is_what_each_exit_says_after_every_token():
    model = tiny(40).eval()
    blocks = torch.randint(0, 40, (3, 13), generator=torch.Generator().manual_seed(1))
    text = HeldOut(blocks=blocks, prompts=blocks[:, :5].tolist())
    line = outcome(model, text, 2, 9)
    for row, tokens in enumerate(greedy_continuations(model, text.prompts, 9)):
        for place in range(8):
            ids = torch.tensor([[*text.prompts[row], *tokens[: place + 1]]])
            states = model.model(ids, output_hidden_states=True).hidden_states
            for layer in (1, 2):
                said = model.lm_head(model.model.norm(states[layer][0, -1])).argmax().item()
                assert (said == tokens[place + 1]) == (line["agrees"][row][str(layer)][place] == "1")
    with torch.no_grad():
        logits = model(blocks[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten()).item()
    assert line["loss"][-1] == pytest.approx(expected, abs=1e-4)
    assert len(line["loss"]) == 3 and line["agreement"][-1] == 1


def run_line(arm, seed, loss, bits, loops=(False,)):
    return {
        "kind": "exits",
        "arm": arm,
        "seed": seed,
        "loss": [loss + 1, loss],
        "agreement": [0.5, 1.0],
        "loops": list(loops),
        "agrees": [{"1": bits}] * len(loops),
    }


def test_tables_by_hand():
    # Four layers, exit 1, five tokens, so four after the first. "1111": one round of three drafts and its own token
    # loads 3 + 4 layers for 4 tokens; plain decoding loads 16: 16 / 7 = 2.286. "0000": a draft never pays, 16 / (3 * 5 + 4)
    # = .842, since the last round has no room for a draft.
    lines = [
        {"kind": "run", "command": "exit-losses", "configuration": {"num_layers": 4, "exits": 1}},
        run_line("uniform", 0, 3.0, "0000"),
        run_line("uniform", 1, 3.2, "1111"),
        run_line("full:0.5", 0, 3.1, "1111"),
        run_line("full:0.5", 1, 3.1, "1111", loops=[True]),
    ]
    tables = {table.name: table for table in exit_loss_tables(lines)}
    assert tables["exit_losses"].rows == (
        ("uniform", "1.564 (0.842 to 2.286)", "3.100 (3.000 to 3.200)", "0.000"),
        ("full:0.5", "2.286", "3.100", "0.500 (0.000 to 1.000)"),
    )
    assert tables["exit_losses_paired"].rows == (
        ("full:0.5", "+0.722 (+0.000 to +1.444)", "+0.000 (-0.100 to +0.100)", "+0.500 (+0.000 to +1.000)"),
    )
    assert tables["exit_losses_free"].rows[1] == ("full:0.5", "–")  # one seed has no text without a loop
    assert tables["exit_losses_oracle"].rows[0][1] == "1.643 (1.000 to 2.286)"
    assert tables["exit_losses_agreement"].rows[0][1] == "0.500 (0.000 to 1.000)"


def test_the_command_trains_each_arm_and_finds_what_is_done(tmp_path: Path):
    tiny(4096).save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(DEMO_PATH).save_pretrained(tmp_path / "base")
    words = random.Random(0)
    documents = [
        " ".join(words.choice(["one", "two", "three", "apples", "pears", "and"]) for _ in range(40)) for _ in range(300)
    ]
    (tmp_path / "text.txt").write_text("\n<|endoftext|>\n".join(documents))
    output = tmp_path / "exits.jsonl"
    arguments = ["exit-losses", "--data", str(tmp_path / "text.txt"), "--init", str(tmp_path / "base"), "--exits", "2"]
    arguments += ["--work-dir", str(tmp_path / "runs"), "--seeds", "1", "--steps", "2", "--batch-tokens", "96"]
    arguments += ["--sequence-length", "48", "--own-texts", "2", "--own-text-tokens", "20", "--prompts", "2"]
    arguments += ["--max-new-tokens", "6", "--arm", "uniform", "--arm", "full:0.3", "--output", str(output)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    lines = read_record(output)
    runs = [line for line in lines if line["kind"] == "exits"]
    assert [(line["arm"], line["seed"]) for line in runs] == [
        ("before training", None),
        ("uniform", 0),
        ("full:0.3", 0),
    ]
    assert len({tuple(line["loss"]) for line in runs}) == 3  # training changed the model, and the arms differ
    assert "Against uniform weights" in markdown(lines)
    weights = tmp_path / "runs" / "full-0.3-seed0" / "model" / "model.safetensors"
    weights.unlink()  # would be needed again if the run were
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert not weights.exists() and read_record(output)[1:] == lines[1:]
    wrong = CliRunner().invoke(app, [*arguments, "--exits", "3"])
    assert wrong.exit_code == 2 and "exits must be in [1, 2] for this 3-layer model, got 3" in wrong.output
