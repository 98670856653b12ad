"""Exit adapters' training against the model, autograd, each text alone, one process, and the run that nobody killed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from typer.testing import CliRunner

from fuzz_models import draw_config, random_model
from layerskip_models import LayerSkipModel, from_transformers
from layerskip_models.checkpoints.conversion import from_transformers as convert
from layerskip_models.exits.adapter import AdapterConfig, ExitAdapters
from layerskip_models.exits.folder import load_adapters
from layerskip_models.families import FAMILIES
from layerskip_models.training.accepted_length import accepted_length_weights
from layerskip_models.training.saving import latest_checkpoint
from selfspec import SelfSpecGenerator
from selfspec.cli.main import app
from selfspec.exits import fitting as exit_fitting
from selfspec.exits import hidden_state_dataset
from selfspec.exits.fitting import ExitFit, measure
from selfspec.exits.frozen_head import FrozenHead
from selfspec.exits.hidden_state_dataset import (
    ExitSequence,
    HiddenStateDataset,
    StatesPlan,
    capture,
    join,
    plan_for,
    write_states,
)
from selfspec.exits.settings import ExitTraining, FitSettings
from selfspec.exits.training import train_exit
from selfspec.exits.training_texts import TrainingText
from tiny_llama import full_logits, reference_greedy, tiny_llama, tiny_tokenizer

DEPTHS = (1, 2, 3, 4)


def tiny_model(**options: Any) -> LayerSkipModel:
    return from_transformers(tiny_llama(**{"late_scale": 0.7, "seed": 5, **options}), layout="plain")


def described(**changes: Any) -> AdapterConfig:
    return AdapterConfig(**{"hidden_size": 16, "exit_layers": (1, 2), "rank": 8, **changes})


def texts(number: int = 6, *, length: int = 20, scored: bool = True) -> list[TrainingText]:
    """Random ones of various lengths; the second half of each counts, or all."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for index in range(number):
        size = length - index % 4
        tokens = torch.randint(0, 24, (size,), generator=generator).tolist()
        made.append(TrainingText(tokens, [(1 if scored else size // 2, size)], own=index % 2 == 0))
    return made


def plan(dtype: torch.dtype = torch.float32) -> StatesPlan:
    return StatesPlan(depths=DEPTHS, dtype=dtype)


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": False}, {"seed": 8}])
@pytest.mark.parametrize("layout", ["plain", None])
def test_the_head_is_the_models(options: dict[str, Any], layout: Any) -> None:
    """Of untrained weights, too: the norm's are drawn at random. None is this machine's layout, perhaps our kernels'."""
    model = convert(tiny_llama(**options), layout=layout)
    rows = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(FrozenHead(model).logits(rows), model.logits(rows), rtol=1e-5, atol=1e-5)


def test_another_kind_of_head_is_refused() -> None:
    model = tiny_model()
    logits = model.logits
    model.logits = lambda hidden: logits(hidden).tanh()  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="RMSNorm and a linear head"):
        FrozenHead(model)


def test_losses_and_their_gradient_are_autograds() -> None:
    model = tiny_model(dtype=torch.float64)  # whose operators autograd knows, unlike those in float32
    head = FrozenHead(model)
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.randn(7, 16, generator=generator) * 3).requires_grad_()
    last, labels = torch.randn(7, 16, generator=generator), torch.randint(0, 24, (7,), generator=generator)
    target = head.target(last)
    gradient = torch.empty(7, 16)
    loss = head.loss(hidden.detach(), target, labels, ce_weight=0.3, kl_weight=0.8, gradient=gradient)
    logits = model.logits(hidden.double())
    p = model.logits(last.double()).softmax(-1)
    ce = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    kl = torch.nn.functional.kl_div(logits.log_softmax(-1), p, reduction="none").sum(-1)
    (0.3 * ce + 0.8 * kl).sum().backward()
    torch.testing.assert_close(loss.ce, ce.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss.kl, kl.detach(), rtol=1e-4, atol=1e-5)
    assert hidden.grad is not None
    torch.testing.assert_close(gradient, hidden.grad, rtol=1e-4, atol=1e-6)
    assert loss.agrees.equal(logits.argmax(-1) == p.argmax(-1))
    overlap = torch.minimum(p, logits.softmax(-1)).sum(-1).detach()
    torch.testing.assert_close(head.overlap(hidden.detach(), target), overlap, rtol=1e-4, atol=1e-5)


def test_states_are_the_models_and_each_text_is_as_alone() -> None:
    """Several texts in a pass, against each by itself and against transformers' logits; labels are the next tokens."""
    llama = tiny_llama(late_scale=0.7, seed=5)
    model, head = convert(llama, layout="plain"), FrozenHead(convert(llama, layout="plain"))
    made = texts(scored=False)
    together = capture(model, made, plan())
    for text, found in zip(made, together):
        (alone,) = capture(model, [text], plan())
        torch.testing.assert_close(found.states, alone.states, rtol=1e-5, atol=1e-5)
        expected = full_logits(llama, text.tokens)[found.positions]
        torch.testing.assert_close(head.logits(found.states[:, -1]), expected, rtol=1e-4, atol=1e-4)
        half = len(text.tokens) // 2
        scored = found.positions >= half - 1
        following = torch.tensor(text.tokens)[found.positions + 1]
        assert found.labels.equal(torch.where(scored, following, -1)) and bool(found.own.eq(text.own).all())
        assert found.positions.tolist() == list(range(half - 1, len(text.tokens) - 1))


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_has_states_and_a_head(kind: str) -> None:
    """In float64, two texts in a pass, to transformers' logits."""
    theirs = random_model(draw_config(Random(kind), kind, 24), late_scale=0.5, sharpness=1.5, seed=0).double()
    model = from_transformers(theirs, layout="plain")
    made = texts(2)
    kept = plan_for((1,), model, torch.float32)
    for text, found in zip(made, capture(model, made, kept)):
        expected = full_logits(theirs, text.tokens)[:-1]
        torch.testing.assert_close(FrozenHead(model).logits(found.states[:, -1]), expected, rtol=1e-4, atol=1e-4)


def test_stretches_by_hand() -> None:
    """Two texts, of positions 0, 1, 2, 5 and 0, 1."""
    sequence = ExitSequence(
        states=torch.zeros(6, 1, 2),
        labels=torch.zeros(6).long(),
        positions=torch.tensor([0, 1, 2, 5, 0, 1]),
        texts=torch.tensor([0, 0, 0, 0, 1, 1]),
        own=torch.zeros(6).bool(),
    )
    assert sequence.runs(torch.arange(6)).tolist() == [0, 0, 0, 1, 2, 2]


def test_fitting_raises_the_agreement() -> None:
    """On the texts that it is fitted to, from the bare exit's; adapters as they begin change nothing."""
    model = tiny_model()
    head = FrozenHead(model)
    sequences = [join(capture(model, texts(12), plan()))]
    adapters = ExitAdapters(described())
    before = measure(adapters, sequences, DEPTHS, head)
    assert all(found.bare == found.adapted for found in before.values())
    settings = FitSettings(steps=60, learning_rate=0.03, arm="full")
    fit, seen = ExitFit(adapters, sequences, DEPTHS, head, settings, Accelerator(cpu=True)), []
    for step in range(settings.steps):
        seen.append(fit.gradient(step).mean_kl)
        fit.optimizer.param_groups[0]["lr"] = settings.learning_rate_at(step, settings.steps)
        torch.nn.utils.clip_grad_norm_(adapters.parameters(), settings.max_grad_norm)
        fit.optimizer.step()
        fit.optimizer.zero_grad(set_to_none=True)
    assert seen[-1] < 0.7 * seen[0]
    for layer, found in measure(adapters, sequences, DEPTHS, head).items():
        assert found.bare == before[layer].bare and found.rows == before[layer].rows
        assert found.adapted.agreement > found.bare.agreement + 0.1
        assert found.adapted.overlap > found.bare.overlap and found.adapted.kl < found.bare.kl
        assert found.adapted.run > found.bare.run
        root = float(sequences[0].states[:, DEPTHS.index(layer)].square().mean().sqrt())
        scale = float(adapters.at(layer).scale)
        assert 0.7 < root / scale < 1.42 and math.log2(scale).is_integer()


def test_runs_of_accepted_drafts_by_hand() -> None:
    """A stretch of 9 rows, wrong at the fourth: drafts of 8 start at its first two rows, and 3 and 2 are accepted."""
    tally = exit_fitting._Tally()
    agrees = torch.tensor([True] * 3 + [False] + [True] * 8)
    tally.add(agrees.expand(3, -1), torch.tensor([0] * 9 + [1] * 3))
    assert tally.quality().run == 2.5
    tally.add(torch.tensor([True, False, True]).expand(3, -1), torch.zeros(3).long())  # one draft of 3: 1 accepted
    assert tally.quality().run == 2.0


def test_position_weights_end_where_a_stretch_does() -> None:
    losses, runs = torch.rand(9, generator=torch.Generator().manual_seed(0)) * 3, torch.tensor([0] * 5 + [1] * 4)

    def weights(losses: Tensor, runs: Tensor, arm: str = "full") -> Tensor:
        return exit_fitting.in_runs(losses, runs, partial(accepted_length_weights, arm=arm, alpha=0.5, block=8))

    found = weights(losses, runs)
    assert float(found.mean()) == pytest.approx(1.0) and float(found.std()) > 0.1
    changed = weights(torch.cat([losses[:5], losses[5:] + 1]), runs)
    assert torch.allclose(found[:5] / found[0], changed[:5] / changed[0])  # but for the mean, nothing crosses over
    assert weights(losses, runs, "uniform").tolist() == [1.0] * 9
    assert not torch.allclose(found, weights(losses, torch.zeros(9).long()))


def test_states_stop_at_the_budget_and_are_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, kept = tiny_model(), plan(torch.float16)
    made = texts(12)
    per_row = kept.bytes_per_row(16)
    assert per_row == 4 * 16 * 2 + 8
    limits: dict[str, Any] = {"max_tokens": 0, "max_bytes": 100 * per_row}
    monkeypatch.setattr(hidden_state_dataset, "_SHARD_BYTES", 40 * per_row)
    whole = write_states(model, iter(made), kept, tmp_path / "whole", **limits)
    assert whole["ended"] == "budget" and whole["texts"] == 5 and whole["bytes"] <= limits["max_bytes"]
    shards = sorted((tmp_path / "whole").glob("shard-*"))
    assert sum(path.stat().st_size for path in shards) < 1.3 * whole["bytes"] and len(shards) == 2

    class Killed(Exception):
        pass

    def kill(tokens: int) -> None:
        if tokens > 55:
            raise Killed

    with pytest.raises(Killed):
        write_states(model, iter(made), kept, tmp_path / "parts", **limits, advance=kill)
    first = (tmp_path / "parts" / shards[0].name).stat().st_mtime_ns
    assert write_states(model, iter(made), kept, tmp_path / "parts", **limits) == whole
    assert (tmp_path / "parts" / shards[0].name).stat().st_mtime_ns == first
    for path in shards:
        assert path.read_bytes() == (tmp_path / "parts" / path.name).read_bytes()
    few = write_states(model, iter(made), kept, tmp_path / "few", max_tokens=30, max_bytes=1e9)
    assert (few["texts"], few["tokens"], few["ended"]) == (2, 37, "tokens")
    assert write_states(model, iter(made[:1]), kept, tmp_path / "all", max_tokens=0, max_bytes=1e9)["ended"] == "data"


def test_states_that_overflow_are_refused() -> None:
    model = from_transformers(tiny_llama(initializer_range=0.02), layout="plain")
    embed = model.embed
    model.embed = lambda tokens: embed(tokens) * 1e6  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="states_dtype float32"):
        capture(model, texts(1), plan(torch.float16))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama(num_layers=4, seed=5, late_scale=0.7).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "text.txt").write_text("\n<|endoftext|>\n".join(f"a bed {'ab' * n} head, a fig. " * 3 for n in range(30)))
    return folder


def options(checkpoint: Path, output: Path, **changes: Any) -> dict[str, Any]:
    return {
        "data": (str(checkpoint / "text.txt"),), "output_dir": str(output), "model": str(checkpoint),
        "exit_layers": (1, 2), "rank": 4, "holdout_fraction": 0.3, "sequence_length": 32, "batch_tokens": 64,
        "max_tokens": 500, "held_out_tokens": 100, "epochs": 1.5, "save_every": 4, "log_every": 1, "warmup_steps": 2,
        **changes,
    }  # fmt: skip


def weights(folder: Path) -> list[Tensor]:
    return [*load_adapters(folder).state_dict().values()]


def same(one: Path, other: Path) -> bool:
    return all(a.equal(b) for a, b in zip(weights(one), weights(other)))


def test_a_killed_run_ends_as_the_uninterrupted_one(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = options(checkpoint, tmp_path / "whole", arm="full", positions=20)
    whole = train_exit(ExitTraining(**made))
    assert whole == tmp_path / "whole" / "exits"
    gradient = ExitFit.gradient

    def killed(self: Any, step: int) -> Any:
        if step == 6:
            raise KeyboardInterrupt
        return gradient(self, step)

    config = ExitTraining(**{**made, "output_dir": str(tmp_path / "parts")})
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ExitFit, "gradient", killed)
        train_exit(config)
    assert same(whole, train_exit(config))
    steps = [json.loads(line)["step"] for line in (tmp_path / "parts" / "log.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 14))

    again = ExitTraining(**{**made, "output_dir": str(tmp_path / "again"), "states_of": str(tmp_path / "whole")})
    assert same(whole, train_exit(again)) and not (tmp_path / "again" / "states").exists()
    train_exit(replace(again, output_dir=str(tmp_path / "other"), exit_layers=(2,), epochs=0.2))
    with pytest.raises(ValueError, match="another learning_rate"):
        train_exit(replace(config, learning_rate=1e-4))
    latest = latest_checkpoint(tmp_path / "parts" / "checkpoints")
    assert latest is not None
    (latest[0] / "state.json").write_text('{"seconds": 1.0}')  # as an earlier version wrote it
    with pytest.raises(ValueError, match="was written by an earlier version or with other options"):
        train_exit(config)

    figures = json.loads((whole / "figures.json").read_text())
    assert set(figures) == {"1", "2"} and 0 <= figures["1"]["adapted"]["agreement"] <= 1
    card = (whole / "README.md").read_text()
    assert f"selfspec train-exit {checkpoint.name} \\" in card and "--arm full" in card and "| 2 | 0." in card
    assert str(checkpoint.parent) not in card


def test_states_of_another_model_or_of_other_layers_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    made = ExitTraining(**options(checkpoint, tmp_path / "made", epochs=0.1))
    train_exit(made)
    with pytest.raises(ValueError, match="no states after layers 3"):
        train_exit(replace(made, output_dir=str(tmp_path / "more"), states_of=made.output_dir, exit_layers=(3,)))
    other = tmp_path / "model"
    tiny_llama(num_layers=4, seed=6).save_pretrained(other)
    tiny_tokenizer().save_pretrained(other)
    with pytest.raises(ValueError, match="states of another model"):
        train_exit(replace(made, output_dir=str(tmp_path / "two"), states_of=made.output_dir, model=str(other)))


def test_steered_adapters_are_trained_and_draft(checkpoint: Path, tmp_path: Path) -> None:
    """On states of the rows that steer, which another form's run has not kept."""
    data = tmp_path / "questions.jsonl"  # where rows before an answer have no loss
    data.write_text(
        "\n".join(json.dumps({"prompt": f"a bed {'ab' * n}", "completion": " head, a fig"}) for n in range(30))
    )
    made = ExitTraining(**options(checkpoint, tmp_path / "run", form="steered", steering_size=16, data=(str(data),)))
    finished = train_exit(made)
    adapters = load_adapters(finished)
    assert adapters.steering is not None and adapters.config.steering_layers == (2, 3)
    assert all(bool(adapters.get_parameter(f"exits.{layer}.steer.weight").any()) for layer in (1, 2))
    assert not torch.equal(adapters.steering.project.weight, torch.eye(16).repeat(1, 2))
    done = json.loads((tmp_path / "run" / "states" / "train" / "done.json").read_text())
    assert done["tokens"] < done["rows"] <= 9 * done["tokens"]
    card = (finished / "README.md").read_text()
    assert "Form steered" in card and "after layers 2, 3 (width 16)" in card and "--steering-size 16" in card
    generator = SelfSpecGenerator.from_pretrained(checkpoint, exits=finished, policy="ls:2-3")
    llama = tiny_llama(num_layers=4, seed=5, late_scale=0.7)
    assert generator.generate([1, 2, 3], max_new_tokens=20).new_tokens == reference_greedy(
        llama, [1, 2, 3], max_new_tokens=20
    )
    plain = ExitTraining(**options(checkpoint, tmp_path / "plain", epochs=0.1, exit_layers=(1, 2, 3)))
    train_exit(plain)
    with pytest.raises(ValueError, match="let a run with form steered make the states"):
        train_exit(replace(made, output_dir=str(tmp_path / "again"), states_of=plain.output_dir))


def test_adapters_beside_a_checkpoint_from_its_own_answers(checkpoint: Path, tmp_path: Path) -> None:
    """From prompts alone; what lay there before is replaced. The model's text is what it was."""
    model = tmp_path / "model"
    llama = tiny_llama(num_layers=4, seed=5, late_scale=0.7)
    llama.save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    (model / "exits").mkdir()
    (model / "exits" / "exits.json").write_text("{}")
    data = tmp_path / "prompts.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"a bed {'ab' * n}"}) for n in range(24)))
    made = {"model": str(model), "data": (str(data),), "own_answers": True, "answer_tokens": 12, "beside": True}
    finished = train_exit(ExitTraining(**options(checkpoint, tmp_path / "run", **made)))
    assert same(finished, model / "exits") and (model / "exits" / "README.md").exists()
    done = json.loads((tmp_path / "run" / "states" / "train" / "done.json").read_text())
    answers = (tmp_path / "run" / "states" / "answers-train.jsonl").read_text().splitlines()
    assert done["tokens"] == sum(len(json.loads(line)["answer"]) for line in answers)
    kept = plan_for((1, 2), tiny_model(), torch.float16)
    states = HiddenStateDataset(tmp_path / "run" / "states" / "train", kept, (4,), length=64, seed=0)
    head = FrozenHead(tiny_model())
    for sequence in states:
        chosen = head.logits(sequence.states[:, 0]).argmax(-1)
        # Nearly all, since states are rounded to 16 bits.
        assert sequence.own.all() and (chosen == sequence.labels).float().mean() > 0.95
    engine = SelfSpecGenerator.from_pretrained(model, policy="ls:2-3")
    assert set(engine.model.adapters) == {1, 2}
    run = engine.generate([1, 2, 3], max_new_tokens=20)
    assert run.new_tokens == reference_greedy(llama, [1, 2, 3], max_new_tokens=20)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--exit-layers", "4"], "exit_layers must be in [1, 3] for this 4-layer model, got 4"),
        (["--arm", "none"], "arm must be one of"),
        (["--form", "layer"], "form must be one of"),
        (["--steering-size", "8"], "steering_size is of form steered"),
        (["--alpha", "2"], "alpha must be in [0, 1]"),
        (["--disk-gb", "0"], "disk_gb must be above 0"),
        (["--disk-gb", "0.000001"], "raise disk_gb"),
        (["--states-of", "nowhere"], "holds no complete states"),
        (["--data", "nowhere.txt"], "data path does not exist"),
    ],
)
def test_the_command_says_what_is_wrong(checkpoint: Path, tmp_path: Path, extra: list[str], message: str) -> None:
    base = ["train-exit", str(checkpoint), "--data", str(checkpoint / "text.txt"), "--holdout-fraction", "0.3"]
    result = CliRunner().invoke(app, [*base, "--output-dir", str(tmp_path / "run"), *extra])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_the_command_needs_data_and_a_folder_for_beside(tmp_path: Path) -> None:
    for extra, message in (([], "data must name"), (["--data", __file__, "--beside"], "beside needs a checkpoint")):
        result = CliRunner().invoke(app, ["train-exit", "--output-dir", str(tmp_path / "run"), *extra])
        assert result.exit_code == 2
        assert message in result.stderr
