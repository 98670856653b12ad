"""SpecBound by replay: where tokens leave, when drafts end, what they cost; rows are those of the model's exits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bench.experiments.__main__ import app
from bench.experiments.bounded_exits.bounded_rounds import Bounds, Played, leaves_at, play
from bench.experiments.bounded_exits.exit_rows import ExitRow, ExitRows
from bench.record import read_record
from bench.report.markdown import markdown
from layerskip_models.kv_cache import KVCache
from selfspec import SelfSpecGenerator
from tiny_llama import tiny_llama

BOUNDS = Bounds(alpha=0.0, threshold=0.5, depth=3, width=4)


class MadeUp:
    """Exit 1 is sure of even positions, and right; exit 2 of every third one, and wrong; no exit of the others."""

    def row(self, committed: int, drafted: tuple[int, ...]) -> ExitRow:
        position = committed + len(drafted)
        sure = (0.9 if position % 2 == 0 else 0.1, 0.9 if position % 3 == 0 else 0.1, 0.2)
        return ExitRow(tokens=(position, -1, position), confidences={0.0: sure})


def test_a_token_leaves_at_the_first_exit_that_is_sure() -> None:
    assert leaves_at(MadeUp().row(4, ()), BOUNDS) == 1
    assert leaves_at(MadeUp().row(9, ()), BOUNDS) == 2
    assert leaves_at(MadeUp().row(5, ()), BOUNDS) is None
    assert leaves_at(MadeUp().row(9, ()), Bounds(alpha=0.0, threshold=0.5, depth=1, width=4)) is None


def test_costs_of_rounds() -> None:
    """Text 0 to 9, a prompt of two, six layers. Round by round, by hand."""
    counts = play(MadeUp(), list(range(10)), 2, 6, BOUNDS)
    # 3 committed: drafts -1 (exit 2), 4 (exit 1), ends at 5: nothing accepted; 3 is the model's own.
    # 4 committed: drafts 4 (exit 1), ends at 5: both committed. 6: drafts 6, ends at 7. 8: one token may be drafted.
    # 8 comes from exit 1, and the last one from the model.
    assert counts == Played(
        tokens=7,
        layers=2 + 1 + 1 + 1 + 1 + 4 * 6,
        heads=2 + 1 + 3 + 1 + 3 + 1 + 3 + 1 + 4,
        rounds=4,
        drafted=5,
        accepted=3,
    )


def test_a_draft_ends_with_its_width_and_before_the_last_token() -> None:
    always = ExitRow(tokens=(7,), confidences={0.0: (1.0,)})
    rows = type("Sure", (), {"row": lambda self, committed, drafted: always})()
    bounds = Bounds(alpha=0.0, threshold=0.5, depth=1, width=2)
    counts = play(rows, [7] * 7, 1, 3, bounds)
    assert (counts.rounds, counts.drafted, counts.accepted, counts.tokens) == (2, 3, 3, 5)


@pytest.fixture(scope="module")
def generator() -> SelfSpecGenerator:
    return SelfSpecGenerator(tiny_llama(num_layers=4))


def test_rows_are_what_the_engine_drafts_from(generator: SelfSpecGenerator) -> None:
    """Every exit's token behind the prompt, and behind drafts that the text does not have, is the engine's own."""
    prompt = torch.tensor([3, 1, 4, 1, 5])
    text = generator.generate(prompt, max_new_tokens=8, policy="ar", do_sample=False, eos_token_id=[]).sequences[0]
    rows = ExitRows(generator.model, text, 5, 3, [0.0, 1.0])
    for layer in (1, 2, 3):
        drafted: tuple[int, ...] = ()
        longer = text[:7]
        for _ in range(4):
            row = rows.row(7, drafted)
            logits = all_rows(generator, longer)[layer - 1][-1]
            assert row.tokens[layer - 1] == int(logits.argmax())
            temperature = 1 + 1.0 * (1 - layer / 4)
            assert row.confidences[1.0][layer - 1] == pytest.approx(
                float((logits / temperature).softmax(-1).max()), abs=1e-5
            )
            drafted += (row.tokens[layer - 1],)
            longer = torch.cat((longer, torch.tensor(drafted[-1:])))


def all_rows(generator: SelfSpecGenerator, text: torch.Tensor) -> list[torch.Tensor]:
    """Draft logits of each exit, from one pass over the whole text."""
    model = generator.model
    found: list[torch.Tensor] = []
    with torch.inference_mode():
        model.run_layers(
            model.embed(text), 0, 4, KVCache(model, text.numel()),
            lambda layers_done, hidden: found.append(model.draft_logits(model.at_exit(hidden, layers_done))),
        )  # fmt: skip
    return found


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "bounded.jsonl"
    arguments = [
        "bounded-exits",
        "code",
        "--tuning",
        "1",
        "--num-samples",
        "1",
        "--prompt-tokens",
        "20",
        "--exit-layer",
        "2",
    ]
    result = CliRunner().invoke(app, [*arguments, "--max-new-tokens", "6", "-o", str(path)])
    assert result.exit_code == 0, result.output
    lines = read_record(path)
    scores = [line for line in lines if line["kind"] == "score"]
    assert {line["tokens"] for line in scores} == {5}
    assert [line["rule"] for line in scores] == ["SpecBound", "SpecBound, no temperatures", "SPIDE", "LayerSkip"]
    page = markdown(lines)
    assert "| SPIDE | `spide:2,tau=" in page and "| 1.00 |" in page
