"""What copied drafts gain: rounds charged the costs of another shape, transformers' passes counted, and the table of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from bench.datasets import EncodedPrompt
from bench.engines.peers import transformers_generate, transformers_prompt_lookup
from bench.experiments.__main__ import app
from bench.experiments.copy_index.index_cost import COMMITTED, texts
from bench.experiments.copying.gain import PeerTimes, borrowed_cost, own_gain, peer_gain
from bench.record import read_record
from bench.report.markdown import markdown
from layerskip_models import from_transformers
from policies import LayerCost, cost_of_round
from scripted_policies import made_up_cost
from selfspec import SelfSpecGenerator
from selfspec.engine.calibrate import use_cost
from tiny_llama import tiny_llama

PROMPT = EncodedPrompt(id="one", task="rows", ids=torch.tensor([1, 2, 3, 4, 5, 6, 7, 8] * 3))


def test_another_shape_costs_are_those_of_its_layers_spread_over_ours() -> None:
    cost = made_up_cost(12)
    borrowed = borrowed_cost(cost, 4)
    assert borrowed.autoregressive() == pytest.approx(cost.autoregressive())
    assert borrowed.round(2, 3) == pytest.approx(cost.round(6, 3))
    assert borrowed.copying(1, 5, 2) == pytest.approx(cost.copying(3, 5, 2))


def test_our_rounds_are_charged_what_they_would_cost() -> None:
    llama = tiny_llama(num_layers=4)
    generator = SelfSpecGenerator(from_transformers(llama), prefix_cache=0)
    cost = borrowed_cost(made_up_cost(8), 4)
    use_cost(generator.model, cost)
    plain = own_gain(generator, "ar", PROMPT, 20, cost)
    assert (plain.tokens, plain.rounds, plain.copied, plain.drafted) == (19, 19, 0, 0)
    assert plain.estimated_seconds == pytest.approx(19 * cost.autoregressive())
    copied = own_gain(generator, "copy:4", PROMPT, 20, cost)
    assert copied.text == plain.text
    assert copied.tokens == copied.rounds + copied.copied
    result = generator.generate(
        PROMPT.ids, max_new_tokens=20, policy="copy:4", trace=True, do_sample=False, eos_token_id=[]
    )
    assert result.trace is not None
    rows = [record.num_drafted + 1 for record in result.trace]
    head, layers = cost.head_seconds, cost.layer_seconds
    expected = sum(4 * extended(layers, count) + extended(head, count) for count in rows)
    assert copied.estimated_seconds == pytest.approx(expected)


def extended(seconds: tuple[float, ...], rows: int) -> float:
    """Behind the last one, along the line of the last two."""
    last = len(seconds)
    return seconds[rows - 1] if rows <= last else seconds[-1] + (rows - last) * (seconds[-1] - seconds[-2])


def test_rows_of_transformers_passes_are_counted() -> None:
    llama = tiny_llama(num_layers=2)
    times = PeerTimes(llama, repeats=1)
    times.seconds = {1: 1.0, 3: 2.0, 33: 17.0}
    assert [times.of(rows) for rows in (1, 2, 3, 18)] == pytest.approx([1.0, 1.5, 2.0, 9.5])
    plain = peer_gain(transformers_generate(llama), llama, PROMPT, 12, times)
    assert (plain.tokens, plain.rounds, plain.copied) == (11, 11, 0)
    assert plain.estimated_seconds == pytest.approx(11.0)
    lookup = peer_gain(transformers_prompt_lookup(llama, 4), llama, PROMPT, 12, times)
    assert lookup.text == plain.text
    assert lookup.rounds <= 11 and lookup.tokens == 11
    assert lookup.estimated_seconds is not None and lookup.estimated_seconds >= lookup.rounds


def test_rounds_cost_their_rows() -> None:
    """As `policies.cost.cost_of_round` says of every round of a text that copies and drafts."""
    generator = SelfSpecGenerator(from_transformers(tiny_llama(num_layers=4)), prefix_cache=0)
    result = generator.generate(PROMPT.ids, max_new_tokens=25, policy="copy:3+ls:2-2", trace=True, do_sample=False)
    assert result.trace is not None
    cost = made_up_cost(4)
    tried = 0
    for record in result.trace:
        assert cost_of_round(record, LayerCost(4)) == record.loaded_layers
        least = cost.copying(record.exit_layer or 0, record.num_tried, record.num_drafted)
        if record.num_tried and record.num_drafted == record.num_copied:
            assert cost_of_round(record, cost) in (least, least + cost.look(2) + 2 * cost.layer_seconds[0])
            tried += 1
        assert cost_of_round(record, cost) >= least or record.exit_layer is not None
    assert tried


def measured(shape: Path, path: Path) -> Result:
    arguments = ["copying-gain", "copying", "--costs-of", str(shape), "--num-samples", "1", "--prompt-tokens", "40"]
    return CliRunner().invoke(app, [*arguments, "--max-new-tokens", "6", "--output", str(path)])


def test_the_command_says_what_each_engine_gains(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "gain.jsonl"
    result = measured(checkpoint, path)
    assert result.exit_code == 0, result.output
    lines = read_record(path)
    gains = [line for line in lines if line["kind"] == "gain"]
    engines = ["ar", "auto:copy=off", "auto", "copy:10", "transformers:generate", "transformers:prompt-lookup:10"]
    assert [line["engine"] for line in gains] == engines
    assert all(line["same_text"] for line in gains)
    page = markdown(lines)
    assert "Where committed tokens came from" in page and "transformers prompt lookup 10" in page
    assert "| ar | 1.00 |" in page
    wrong = CliRunner().invoke(app, ["copying-gain", "copying", "--policy", "nonsense"])
    assert wrong.exit_code == 2 and "unknown policy" in wrong.output


def test_the_index_is_timed_on_three_kinds_of_text() -> None:
    found = texts(300, list(range(50)) * 100)
    assert {len(text) for text in found.values()} == {300 + COMMITTED}
    assert found["repetition"][500:1000] == found["repetition"][:500]
    result = CliRunner().invoke(app, ["copy-index", "--lengths", "64"])
    assert result.exit_code == 0, result.output
    assert all(kind in result.output for kind in found)
