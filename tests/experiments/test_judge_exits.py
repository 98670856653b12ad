"""What exits of a chat model are worth, and what a smaller draft head would gain, by hand and on a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bench.experiments.__main__ import app
from bench.experiments.exit_adapters.draft_rows import (
    agreement_needed,
    best_replayed,
    coverage,
    least_of,
    likeliest,
    tokens_of,
    with_draft_head,
)
from bench.experiments.exit_adapters.judged_exits import JudgedExits
from bench.record import matching, read_record
from bench.report.markdown import markdown
from layerskip_models import from_transformers
from layerskip_models.exits.adapter import ExitAdapters
from layerskip_models.exits.folder import config_for
from policies import LayerCost, MeasuredCost
from selfspec.analysis.replay import AgreementTrace
from selfspec.exits.frozen_head import FrozenHead
from tiny_llama import tiny_llama, tiny_tokenizer

COST = MeasuredCost(num_layers=4, layer_seconds=(1.0, 1.0), head_seconds=(4.0, 4.0))


def test_the_likeliest_tokens_and_how_many_of_a_text_they_hold() -> None:
    rows = likeliest([[7, 7, 5], [7, 5, 9]], 4, vocab_size=12)
    assert rows.tolist() == [0, 5, 7, 9]  # three that occur, and the lowest id of the others
    assert coverage([[7, 7, 3], [9]], rows) == 3 / 4


def test_only_the_chosen_rows_are_drafted() -> None:
    model = from_transformers(tiny_llama(), layout="plain")
    head, states = FrozenHead(model), torch.randn(300, model.hidden_size)
    whole = tokens_of(head, states)
    assert torch.equal(whole, head.logits(states).argmax(-1))
    rows = whole.unique()[::2]
    some = tokens_of(head, states, rows)
    assert {*some.tolist()} <= {*rows.tolist()}
    held = torch.isin(whole, rows)
    assert torch.equal(some[held], whole[held])  # where the likeliest is among them it stays
    assert 0 < int(held.sum()) < 300


def test_a_smaller_head_makes_draft_steps_cheaper_and_nothing_else() -> None:
    quarter = with_draft_head(COST, whole=2.0, smaller=0.5)
    assert quarter.autoregressive() == COST.autoregressive() == 8.0
    # Two drafts at exit 1: each 1 layer and a head of 4, or of 1; then the last row's layer, three layers and the head.
    assert COST.round(1, 2) == 2 * (1 + 4) + 1 + 3 + 4
    assert quarter.round(1, 2) == 2 * (1 + 1) + 1 + 3 + 4


def test_other_programs_only_add_to_a_calibration() -> None:
    disturbed = replace(COST, layer_seconds=(3.0, 1.5), head_seconds=(2.0, 9.0), draft_seconds=0.5)
    least = least_of([replace(COST, draft_seconds=1.0, layer_seconds=(1.0, 2.0)), disturbed])
    assert least.layer_seconds == (1.0, 1.5)
    assert least.head_seconds == (2.0, 4.0)
    assert least.draft_seconds == 3 + 2 + 0.5 - 1 - 2  # the quicker draft step took 5.5, the other 1 + 4 + 1


def test_the_best_length_is_found_by_replay() -> None:
    trace = AgreementTrace(tokens=(5, 6, 7, 8, 9), agrees={1: (1.0, 1.0, 0.0, 1.0)}, num_layers=4)
    best = best_replayed([trace], 1, LayerCost(num_layers=4))
    # With 2 drafts the first round commits 3 tokens for 6 layers, and the last token takes a round of 4.
    assert best.num_speculations == 2
    assert best.gain == pytest.approx(4 / (4 + 2 + 4) * 4)
    assert best.accepted == pytest.approx(2 / 2)


def test_the_agreement_that_a_gain_needs() -> None:
    cost = LayerCost(num_layers=4)
    needed = agreement_needed(1, cost, 1.1)
    assert needed is not None
    # One draft at exit 1: (1 + a) / 5 against 1 / 4, so a gain of 1.1 needs a = .375. More drafts need more at that a.
    assert needed == pytest.approx(0.375, abs=2e-3)
    assert (
        agreement_needed(3, MeasuredCost(num_layers=4, layer_seconds=(1.0, 3.0), head_seconds=(4.0, 9.0)), 1.1) is None
    )


def test_judging_a_tiny_model() -> None:
    """Adapters that change nothing are judged as bare exits are, and cost something."""
    model = from_transformers(tiny_llama(), layout="plain")
    adapters = ExitAdapters(config_for(model, exit_layers=(1, 2), rank=4)).eval()
    prompts = [torch.tensor([3, 1, 4, 1, 5]), torch.tensor([9, 2, 6])]
    judged = JudgedExits.of(model, adapters, (1, 2), prompts, 12)
    lines = [*judged.exits([8], judged.answers), *judged.auto_by_layers()]
    whole = matching(lines, "head", rows=model.vocab_size)[0]
    assert whole["coverage"] == 1.0
    for line in matching(lines, "exit", exits="bare", rows=model.vocab_size):
        same = matching(lines, "exit", exits="adapted", rows=model.vocab_size, exit_layer=line["exit_layer"])[0]
        assert same["agreement"] == line["agreement"]
    assert len(matching(lines, "exit")) == 2 * 2 * 2
    bare, adapted = (matching(lines, "auto", exits=which)[0]["gain"] for which in ("bare", "adapted"))
    assert adapted <= bare


@pytest.mark.usefixtures("with_studies")
def test_the_command_and_its_tables(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_llama().save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    chats, others, record = tmp_path / "chats.jsonl", tmp_path / "others.jsonl", tmp_path / "record.jsonl"
    for path, questions in ((chats, ("abc", "bad")), (others, ("fig", "head", "cab"))):
        lines = [json.dumps({"messages": [{"role": "user", "content": one}]}) for one in questions]
        path.write_text("\n".join(lines), encoding="utf-8")
    arguments = ["judge-exits", str(folder), "--chats", str(chats), "--exit-layer", "1", "--max-new-tokens", "8"]
    arguments += ["--repeats", "1", "--output", str(record)]
    result = CliRunner().invoke(app, [*arguments, "--training-chats", str(others), "--head-rows", "6"])
    assert result.exit_code == 0, result.output
    found = read_record(record)
    assert {line["kind"] for line in found} == {"run", "head", "cost", "exit", "auto", "speed"}
    assert "Draft heads over the likeliest tokens" in result.output
    assert found[0]["configuration"]["questions"] == 2
    assert "Where the numbers come from" in markdown(found)  # every table has a heading
    assert found[0]["configuration"]["counted_tokens"] == 3 * 8
    assert {line["policy"] for line in matching(found, "speed")} >= {"ar", "auto", "auto:copy=off"}
    refused = CliRunner().invoke(app, [*arguments, "--head-rows", "6"])
    assert refused.exit_code == 2
    assert "--head-rows needs --training-chats" in refused.output
