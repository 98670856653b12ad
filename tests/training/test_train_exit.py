"""Exit adapters' training against the model, autograd and each text alone. `test_loop` interrupts it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from fuzz_models import draw_config, random_model
from layerskip_models import LayerSkipModel, from_transformers
from layerskip_models.exits import STEERED
from layerskip_models.exits.adapter import AdapterConfig, ExitAdapters
from layerskip_models.exits.folder import load_adapters
from layerskip_models.families import IN_TRANSFORMERS
from selfspec import SelfSpecGenerator
from selfspec.cli.main import app
from selfspec.exits.frozen_model import FrozenHead, exit_rows
from selfspec.exits.loss import ExitAdapterLoss, accepted_runs, measure, set_scales
from selfspec.exits.training import train_exit
from selfspec.exits.training_texts import TrainingText
from tiny_llama import full_logits, reference_greedy, tiny_llama
from tiny_training import tiny_exits, write_checkpoint

DEPTHS = (1, 2, 3, 4)


def tiny_model(**options: Any) -> LayerSkipModel:
    return from_transformers(tiny_llama(**{"late_scale": 0.7, "seed": 5, **options}), layout="plain")


def loss_of(
    model: LayerSkipModel, *, kl_weight: float = 1.0, ce_weight: float = 0.1, d_pace: bool = False, **changes: Any
) -> ExitAdapterLoss:
    torch.manual_seed(0)
    adapters = ExitAdapters(AdapterConfig(**{"hidden_size": 16, "exit_layers": (1, 2), "rank": 8, **changes}))
    weights = {"kl_weight": kl_weight, "ce_weight": ce_weight}
    return ExitAdapterLoss(adapters, FrozenHead(model), DEPTHS, **weights, d_pace=d_pace)


def texts(number: int = 6) -> list[TrainingText]:
    """Random ones of various lengths; the second half of each counts."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for index in range(number):
        size = 20 - index % 4
        tokens = torch.randint(0, 24, (size,), generator=generator).tolist()
        made.append(TrainingText(tokens, [(size // 2, size)], own=index % 2 == 0))
    return made


@pytest.mark.parametrize("form", ["low_rank", STEERED])
@pytest.mark.parametrize("chunk_rows", [3, 100])
def test_the_loss_and_its_gradient_are_written_out(form: str, chunk_rows: int) -> None:
    """Against transformers' logits and PyTorch's losses, all rows at once."""
    model, llama = tiny_model(), tiny_llama(late_scale=0.7, seed=5)
    steered = {"form": form, "steering_layers": (2, 3), "steering_size": 4} if form == STEERED else {}
    made = [loss_of(model, kl_weight=0.8, ce_weight=0.3, **steered) for _ in range(2)]
    for loss in made:
        for name, parameter in loss.named_parameters():  # those that begin as zeros, too
            parameter.data.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
    made[0].head.chunk_rows = chunk_rows
    rows = exit_rows(model, texts(), DEPTHS)
    distance = torch.arange(len(rows.scored)) % 4 + 1
    loss, means = made[0](rows, distance)
    loss.backward()

    logits = torch.cat([full_logits(llama, text.tokens)[len(text.tokens) // 2 - 1 : -1] for text in texts()])
    labels = torch.where(rows.own, rows.labels, logits.argmax(-1))
    total, expected = torch.zeros(()), []
    for output in made[1].outputs(rows, distance):
        q = made[1].head.logits(output)
        ce = torch.nn.functional.cross_entropy(q, labels)
        kl = torch.nn.functional.kl_div(q.log_softmax(-1), logits.softmax(-1), reduction="batchmean")
        total = total + (0.3 * ce + 0.8 * kl) / 2
        expected.append(torch.stack([ce, kl, (q.argmax(-1) == logits.argmax(-1)).float().mean()]))
    total.backward()
    torch.testing.assert_close(means, torch.stack(expected, dim=-1).flatten().detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss, total, rtol=1e-4, atol=1e-5)
    for mine, other in zip(made[0].parameters(), made[1].parameters(), strict=True):
        assert other.grad is not None and other.grad.any()
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("chunk_rows", [3, 100])
def test_d_pace_is_written_out(chunk_rows: int) -> None:
    """Equations 7 to 9 of the paper for a draft from every scored row, in loops; drafts end with their text."""
    model, llama = tiny_model(), tiny_llama(late_scale=0.7, seed=5)
    loss = loss_of(model, d_pace=True)
    loss.head.chunk_rows = chunk_rows
    rows = exit_rows(model, texts(), DEPTHS)
    found, _ = loss(rows)
    found.backward()
    mine = [parameter.grad.clone() for parameter in loss.parameters() if parameter.grad is not None]
    loss.zero_grad()
    logits = torch.cat([full_logits(llama, text.tokens)[len(text.tokens) // 2 - 1 : -1] for text in texts()])
    labels = torch.where(rows.own, rows.labels, logits.argmax(-1))
    lengths = [len(text.tokens) - len(text.tokens) // 2 for text in texts()]
    total = torch.zeros(())
    for output in loss.outputs(rows):
        for ce in torch.nn.functional.cross_entropy(loss.head.logits(output), labels, reduction="none").split(lengths):
            smoothed = (0.5 * (-ce.detach()).exp() + 0.5).tolist()
            for start in range(len(ce)):
                reach = [math.prod(smoothed[start : end + 1]) for end in range(start, min(start + 8, len(ce)))]
                for place in range(len(reach)):
                    total = total + sum(reach[place:]) * ce[start + place]
    total = total / (2 * sum(lengths))
    total.backward()
    torch.testing.assert_close(found, total, rtol=1e-4, atol=1e-5)
    for one, other in zip(mine, [parameter.grad for parameter in loss.parameters() if parameter.grad is not None]):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", IN_TRANSFORMERS)
def test_rows_are_the_models_and_each_text_is_as_alone(kind: str) -> None:
    """Several texts in a pass, against each by itself and against transformers' logits; labels are the next tokens."""
    theirs = random_model(draw_config(Random(kind), kind, 24), late_scale=0.5, sharpness=1.5, seed=0).double()
    model = from_transformers(theirs, layout="plain")
    depths, head = (1, model.num_layers), FrozenHead(model)
    together, first, place = exit_rows(model, texts(), depths), 0, 0
    for text in texts():
        size, half = len(text.tokens), len(text.tokens) // 2
        alone = exit_rows(model, [text], depths)
        torch.testing.assert_close(together.states[first : first + size], alone.states, rtol=1e-5, atol=1e-5)
        expected = full_logits(theirs, text.tokens)
        torch.testing.assert_close(head.logits(alone.states[:, -1]), expected.float(), rtol=1e-4, atol=1e-4)
        mine = slice(place, place + size - half)
        assert together.scored[mine].tolist() == list(range(first + half - 1, first + size - 1))
        assert together.labels[mine].tolist() == text.tokens[half:] and (together.own[mine] == text.own).all()
        before, there = together.before(torch.full_like(together.scored, half))
        assert there[mine].tolist() == [False] + [True] * (size - half - 1)
        assert before[mine][1:].tolist() == list(range(first, first + size - half - 1))
        first, place = first + size, mine.stop
    assert together.stretches().tolist() == [n for n, text in enumerate(texts()) for _ in range(text.num_scored)]


def test_fitting_raises_the_agreement() -> None:
    """On the texts that it is fitted to, from the bare exit's; adapters as they begin change nothing."""
    model = tiny_model()
    rows, loss = exit_rows(model, texts(12), DEPTHS), loss_of(model)
    set_scales(loss, [rows])
    before = measure(loss, [rows])
    assert all(bare == adapted for bare, adapted in before.values())
    optimizer, seen = torch.optim.AdamW(loss.parameters(), lr=0.02), []
    for _ in range(60):
        found, means = loss(rows)
        seen.append(float(means[2]))
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert seen[-1] < 0.7 * seen[0]
    for layer, (bare, adapted) in measure(loss, [rows]).items():
        assert bare == before[layer][0]
        assert adapted.agreement > bare.agreement + 0.1 and adapted.run > bare.run
        assert adapted.overlap > bare.overlap and adapted.kl < bare.kl
        root = float(rows.states[rows.scored, DEPTHS.index(layer)].square().mean().sqrt())
        scale = float(loss.adapters.at(layer).scale)
        assert 0.7 < root / scale < 1.42 and math.log2(scale).is_integer()


def test_runs_of_accepted_drafts_by_hand() -> None:
    """A stretch of 9 rows, wrong at the fourth: drafts of 8 start at its first two rows, and 3 and 2 are accepted."""
    agrees = torch.tensor([[True] * 3 + [False] + [True] * 8])
    accepted, drafts = accepted_runs(agrees, torch.tensor([0] * 9 + [1] * 3))
    assert (accepted.tolist(), drafts) == ([5], 2)
    short = torch.tensor([[True, False, True]])  # one draft of 3: 1 accepted
    assert [
        value.tolist() if isinstance(value, Tensor) else value for value in accepted_runs(short, torch.zeros(3).long())
    ] == [[1], 1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_steered_adapters_are_trained_and_draft(checkpoint: Path, tmp_path: Path) -> None:
    """From completions, whose prompts have rows that steer and no loss. The card says how, without paths."""
    data = tmp_path / "questions.jsonl"
    data.write_text(
        "\n".join(json.dumps({"prompt": f"a bed {'ab' * n}", "completion": " head, a fig"}) for n in range(30))
    )
    finished = train_exit(tiny_exits(checkpoint, tmp_path / "run", form=STEERED, steering_size=16, data=(str(data),)))
    adapters = load_adapters(finished)
    assert adapters.steering is not None and adapters.config.steering_layers == (2, 3)
    assert all(bool(adapters.get_parameter(f"exits.{layer}.steer.weight").any()) for layer in (1, 2))
    assert not torch.equal(adapters.steering.project.weight, torch.eye(16).repeat(1, 2))
    figures, card = json.loads((finished / "figures.json").read_text()), (finished / "README.md").read_text()
    assert set(figures) == {"1", "2"} and 0 <= figures["1"]["adapted"]["agreement"] <= 1
    assert "Form steered" in card and "steering_size: 16" in card and "| 2 | 0." in card
    assert f"model: {checkpoint.name}" in card and str(checkpoint.parent) not in card
    generator = SelfSpecGenerator.from_pretrained(checkpoint, exits=finished, policy="ls:2-3")
    llama = tiny_llama(num_layers=4, seed=5, late_scale=0.7)
    expected = reference_greedy(llama, [1, 2, 3], max_new_tokens=20)
    assert generator.generate([1, 2, 3], max_new_tokens=20).new_tokens == expected


def test_adapters_beside_a_checkpoint_from_its_own_answers(tmp_path: Path) -> None:
    """From prompts alone, copied into the checkpoint's folder. The model's text is what it was."""
    model, llama = write_checkpoint(tmp_path / "model"), tiny_llama(num_layers=4, seed=5, late_scale=0.7)
    data = tmp_path / "prompts.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"a bed {'ab' * n}"}) for n in range(24)))
    made: dict[str, Any] = {"data": (str(data),), "own_answers": True, "answer_tokens": 12}
    finished = train_exit(tiny_exits(model, tmp_path / "run", **made))
    shutil.copytree(finished, model / "exits")
    assert len((tmp_path / "run" / "answers-train.jsonl").read_text().splitlines()) > 10
    engine = SelfSpecGenerator.from_pretrained(model, policy="ls:2-3")
    assert set(engine.model.adapters) == {1, 2}
    run = engine.generate([1, 2, 3], max_new_tokens=20)
    assert run.new_tokens == reference_greedy(llama, [1, 2, 3], max_new_tokens=20)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--exit-layers", "4"], "exit_layer must be in [1, 3] for this 4-layer model, got 4"),
        (["--form", "layer"], "form must be one of"),
        (["--steering-size", "8"], "steering_size is of form steered"),
        (["--kl-weight", "0", "--ce-weight", "0"], "together must be above 0"),
        (["--data", "nowhere.txt"], "data path does not exist"),
        (["--data", "EMPTY"], "holds no text"),
        (["--device-map", "all"], "device_map must be auto"),
        ([], "data must name"),
    ],
)
def test_the_command_says_what_is_wrong(checkpoint: Path, tmp_path: Path, extra: list[str], message: str) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    extra = [word.replace("EMPTY", str(tmp_path / "empty.txt")) for word in extra]
    data = ["--data", str(checkpoint / "text.txt")] if extra else []
    base = ["train-exit", str(checkpoint), *data, "--holdout-fraction", "0.3"]
    result = CliRunner().invoke(app, [*base, "--output-dir", str(tmp_path / "run"), *extra])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
