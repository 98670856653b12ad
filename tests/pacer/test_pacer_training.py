"""Pacer's data against the engine, the packed mask against each draft alone, metrics by hand, runs taken up again."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from launched_processes import ProcessFailed, in_processes, results_of
from layerskip_models import from_transformers
from layerskip_models.training.resumable_run import StepReport
from preverifiers import random_module
from selfspec import SelfSpecGenerator
from selfspec.cli.main import app
from selfspec.pacer.examples import draft_traces, make_data, read_traces
from selfspec.pacer.labels import DraftTrace, pack
from selfspec.pacer.network import load_preverifier
from selfspec.pacer.quality import (
    auc,
    calibrate_estimates,
    calibration_error,
    confidence_estimates,
    confidence_table,
    fit_calibration,
    quality,
    trace_logits,
    trace_loss,
)
from selfspec.pacer.settings import DataPlan, PreVerifierTraining
from selfspec.pacer.training import PreVerifierFit, train_preverifier
from tiny_llama import tiny_llama, tiny_tokenizer
from tiny_training import begin_launched

PLAN = DataPlan(exit_layers=(1, 3), response_tokens=24, window=10, behind=10, positions=0, shard_responses=2)
PROMPTS = [[1, 2, 3], [9] * 6, [4, 20], [11, 7, 5, 2], [8]]


def generator(**options: Any) -> SelfSpecGenerator:
    llama = tiny_llama(num_layers=4, heads=4, kv_heads=2, seed=5, dtype=torch.float64, **options)
    return SelfSpecGenerator(from_transformers(llama, layout="plain"), tiny_tokenizer(), policy="ar")


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_labels_are_those_of_the_engine_drafting_from_one_position(ignore_eos: bool) -> None:
    """Every position of a response, batched, against a generate call whose first round starts there."""
    engine = generator(eos_token_id=6, late_scale=0.7)
    plan = DataPlan(exit_layers=(1, 3), response_tokens=16, window=7, behind=7, positions=0, ignore_eos=ignore_eos)
    eos = [] if ignore_eos else [6]
    accepted = rejected = 0
    for prompt in PROMPTS[:2]:
        text = prompt + engine.generate(prompt, max_new_tokens=16, eos_token_id=eos).new_tokens
        for trace in draft_traces(engine, prompt, plan, seed=0):
            assert trace.starts.tolist() == list(range(len(prompt) + 1, len(text)))
            parts = zip(trace.starts.tolist(), trace.lengths.tolist(), trace.accepted.tolist())
            for start, length, count in parts:
                run = engine.generate(
                    text[: start - 1],
                    max_new_tokens=9,
                    eos_token_id=eos,
                    policy=f"ls:{trace.exit_layer}-7",
                    trace=True,
                )
                first = run.trace[0]
                assert count == min(first.num_accepted, len(text) - start)
                assert length == min(first.num_drafted, len(text) - start)
                accepted += count
                rejected += count < length
    assert accepted > 10 and rejected > 10


def test_drafts_end_behind_their_mismatch() -> None:
    engine = generator()
    long, short = (
        next(draft_traces(engine, PROMPTS[0], DataPlan(exit_layers=(2,), response_tokens=24, behind=behind), seed=0))
        for behind in (50, 1)
    )
    assert short.accepted.equal(long.accepted)
    assert short.lengths.equal(torch.minimum(long.lengths, long.accepted + 2))
    cut = long.up_to_mismatch(1)
    assert cut.lengths.equal(short.lengths)
    torch.testing.assert_close(cut.hidden, short.hidden, atol=1e-3, rtol=1e-3)  # kept in float16
    assert cut.labels().equal(short.labels())


def trace(lengths: list[int], accepted: list[int], starts: list[int], context: int = 9) -> DraftTrace:
    generator = torch.Generator().manual_seed(0)
    rows = sum(lengths)
    return DraftTrace(
        exit_layer=1,
        context=torch.randn(context, 16, generator=generator),
        starts=torch.tensor(starts),
        lengths=torch.tensor(lengths),
        accepted=torch.tensor(accepted),
        hidden=torch.randn(rows, 16, generator=generator),
        features=torch.randn(rows, 3, generator=generator),
    )


def test_defaults() -> None:
    config = PreVerifierTraining(data=(__file__,), output_dir="out")
    assert (config.learning_rate, config.warmup_steps, config.weight_decay, config.epochs) == (1e-3, 40, 0.05, 4.0)
    assert config.data_plan((2,)) == DataPlan(exit_layers=(2,))


def test_labels_by_hand() -> None:
    """Drafts of 3 and 2 tokens, of which 1 and 2 are accepted: the first one's third token has no fate of its own."""
    made = trace([3, 2], [1, 2], [4, 6])
    assert made.labels().tolist() == [1, 0, 0, 1, 1]
    assert made.fate_known().tolist() == [True, True, False, True, True]
    assert made.draft_index().tolist() == [1, 2, 3, 1, 2]
    with pytest.raises(ValueError, match="add up"):
        DraftTrace(**{part: getattr(made, part) for part in DraftTrace.__slots__} | {"lengths": torch.tensor([3, 3])})


def test_mask_by_hand() -> None:
    """Context of 3 rows; a draft of 3 behind 2 committed tokens: its first row, that of token 1, sees row 0 and itself."""
    packed = pack(trace([3], [1], [2], context=3))
    assert packed.position.tolist() == [0, 1, 2, 1, 2, 3]
    assert packed.mask[3:].int().tolist() == [[1, 0, 0, 1, 0, 0], [1, 0, 0, 1, 1, 0], [1, 0, 0, 1, 1, 1]]
    assert pack(trace([3], [1], [2], context=3), scope="draft").mask[5].int().tolist() == [0, 0, 0, 1, 1, 1]
    assert pack(trace([3], [1], [2], context=3), scope="block", block=2).mask[5].int().tolist() == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("scope", ["full", "draft", "block"])
def test_packed_drafts_are_as_each_alone(scope: str) -> None:
    """To 1e-5: nothing of another draft, nor of the text behind its start, reaches a draft."""
    model = from_transformers(tiny_llama(num_layers=3, seed=1), layout="plain")
    module = random_module(model, scope=scope, block=2)
    together = trace([4, 1, 3, 4], [2, 0, 3, 1], [2, 3, 7, 9])
    with torch.no_grad():
        packed = trace_logits(module, together).split([4, 1, 3, 4])
        for number, got in enumerate(packed):
            rows = together.draft_of_row() == number
            start = int(together.starts[number])
            alone = DraftTrace(
                exit_layer=1,
                context=together.context[: start - 1],
                starts=together.starts[number : number + 1],
                lengths=together.lengths[number : number + 1],
                accepted=together.accepted[number : number + 1],
                hidden=together.hidden[rows],
                features=together.features[rows],
            )
            torch.testing.assert_close(trace_logits(module, alone), got, atol=1e-5, rtol=0)


def test_metrics_by_hand() -> None:
    """Scores .1 .4 .4 .8 of tokens 0 1 0 1: pairs 1, .5, 1, 1 of 4. Two bins of two: |.25 - .5| and |.6 - .5|."""
    scores, labels = torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([0.0, 1.0, 0.0, 1.0])
    assert auc(scores, labels) == pytest.approx(3.5 / 4)
    assert calibration_error(scores, labels, bins=2) == pytest.approx((0.25 + 0.1) / 2)
    measured = quality(scores, labels)  # stops at the first three, of which two are rejected
    assert (measured.stop_precision, measured.stop_recall) == (pytest.approx(2 / 3), 1.0)
    assert measured.share_accepted == 0.5


@pytest.mark.parametrize("distinct", [3, 1000])
def test_auc_counts_the_pairs(distinct: int) -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randint(distinct, (60,), generator=generator) / distinct
    labels = torch.randint(2, (60,), generator=generator).float()
    gaps = scores[labels == 1, None] - scores[labels == 0]
    assert auc(scores, labels) == pytest.approx(
        float((gaps > 0).float().mean() + (gaps == 0).float().mean() / 2), rel=1e-5
    )
    assert math.isnan(auc(scores, torch.ones(60)))


def test_quality_of_nothing_stopped_and_nothing_rejected_is_unknown() -> None:
    measured = quality(torch.tensor([0.9, 0.8]), torch.ones(2))
    assert math.isnan(measured.auc) and math.isnan(measured.stop_precision) and math.isnan(measured.stop_recall)


def test_training_without_scikit_learn_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    config = PreVerifierTraining(data=(str(Path(__file__)),), output_dir=str(tmp_path / "run"))
    with pytest.raises(ValueError, match="pip install scikit-learn"):
        train_preverifier(config)
    assert not (tmp_path / "run").exists()


def test_the_baseline_is_spides_table_and_its_running_product() -> None:
    made = trace([2, 2], [2, 0], [4, 6])
    made.features[:, 0] = torch.tensor([0.955, 0.555, 0.555, 0.955]).log()
    # Bin [.5, .6): one of two accepted, prior worth 2 at .55. Bin [.95, .97): one of one, prior at 1 - sqrt(.05 * .03).
    table = confidence_table([made])
    own, products = confidence_estimates([made], table)
    low, high = (1 + 2 * 0.55) / 4, (1 + 2 * (1 - 0.0015**0.5)) / 3
    assert own.tolist() == pytest.approx([high, low, low, high], abs=1e-6)
    assert products.tolist() == pytest.approx([high, high * low, low, low * high], abs=1e-6)


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("shard-*"))}


def test_data_is_taken_up_where_it_broke_off(tmp_path: Path) -> None:
    """After the second shard; the finished shards are not made again, and all are what one run would have made."""
    engine, plan = generator(), replace(PLAN, response_tokens=10)
    make_data(engine, PROMPTS, plan, tmp_path / "whole")

    class Killed(Exception):
        pass

    def kill(done: int) -> None:
        if done > 4:
            raise Killed

    with pytest.raises(Killed):
        make_data(engine, PROMPTS, plan, tmp_path / "parts", kill)
    assert len(shards(tmp_path / "parts")) == 2
    times = [path.stat().st_mtime_ns for path in sorted((tmp_path / "parts").glob("shard-*"))]
    make_data(engine, PROMPTS, plan, tmp_path / "parts")
    assert [path.stat().st_mtime_ns for path in sorted((tmp_path / "parts").glob("shard-*"))][:2] == times
    assert shards(tmp_path / "parts") == shards(tmp_path / "whole")
    traces = list(read_traces(tmp_path / "whole"))
    assert [made.exit_layer for made in traces] == [1, 3] * 5
    with pytest.raises(ValueError, match="other options"):
        make_data(engine, PROMPTS[:4], plan, tmp_path / "whole")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama(num_layers=4, seed=5).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "text.txt").write_text("\n<|endoftext|>\n".join(f"a bed {'ab' * n} head, a fig. " * 9 for n in range(30)))
    return folder


def options(checkpoint: Path, output: Path, **changes: Any) -> dict[str, Any]:
    return {
        "data": (str(checkpoint / "text.txt"),), "output_dir": str(output), "model": str(checkpoint), "dtype": "float64",
        "exit_layers": (1, 2), "num_prompts": 6, "num_held_out": 3, "prompt_tokens": 12, "response_tokens": 20,
        "window": 6, "positions": 6, "holdout_fraction": 0.3, "epochs": 2.0, "batch_responses": 2, "save_every": 4,
        "log_every": 1, "warmup_steps": 2, **changes,
    }  # fmt: skip


def _launched(config: PreVerifierTraining, lost_in_step: int | None = None) -> Path:
    """Train in this process of several, of which the last may be lost."""
    begin_launched()
    gradient = PreVerifierFit.gradient

    def lost(self: Any, step: int) -> StepReport:
        if step == lost_in_step and os.environ["RANK"] == "1":
            os._exit(1)
        return gradient(self, step)

    PreVerifierFit.gradient = lost  # type: ignore[method-assign]
    return train_preverifier(config)


@pytest.mark.slow
def test_a_training_whose_process_was_lost_goes_on(checkpoint: Path, tmp_path: Path) -> None:
    whole = train_preverifier(PreVerifierTraining(**options(checkpoint, tmp_path / "one")))
    config = PreVerifierTraining(**options(checkpoint, tmp_path / "two"))
    first, second = in_processes(2, _launched, config, 5)
    assert isinstance(first, ProcessFailed)
    assert second is None
    assert [path.name for path in (tmp_path / "two" / "checkpoints").iterdir()] == ["step-00000004"]
    results_of(2, _launched, config)
    one, other = load_preverifier(whole), load_preverifier(tmp_path / "two" / "preverifier")
    for a, b in zip(one.state_dict().values(), other.state_dict().values()):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_a_killed_training_ends_as_the_uninterrupted_one(checkpoint: Path, tmp_path: Path, monkeypatch: Any) -> None:
    whole = train_preverifier(PreVerifierTraining(**options(checkpoint, tmp_path / "whole")))
    gradient = PreVerifierFit.gradient

    def killed(self: Any, step: int) -> StepReport:
        if step == 6:
            raise KeyboardInterrupt
        return gradient(self, step)

    config = PreVerifierTraining(**options(checkpoint, tmp_path / "parts"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PreVerifierFit, "gradient", killed)
        train_preverifier(config)
    parts = train_preverifier(config)
    one, other = load_preverifier(whole), load_preverifier(parts)
    assert all(a.equal(b) for a, b in zip(one.state_dict().values(), other.state_dict().values()))
    again = PreVerifierTraining(**options(checkpoint, tmp_path / "again", data_of=str(tmp_path / "whole")))
    assert all(
        a.equal(b)
        for a, b in zip(one.state_dict().values(), load_preverifier(train_preverifier(again)).state_dict().values())
    )
    assert not (tmp_path / "again" / "data").exists()
    with pytest.raises(ValueError, match="other options"):
        train_preverifier(replace(again, output_dir=str(tmp_path / "more"), window=7))
    steps = [json.loads(line)["step"] for line in (tmp_path / "parts" / "log.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 13))
    measured = json.loads((tmp_path / "whole" / "quality.json").read_text())
    assert set(measured) == {"1", "2", "1/2"}
    assert 0 <= measured["1/2"]["preverifier"]["token"]["auc"] <= 1
    with pytest.raises(ValueError, match="another learning_rate"):
        train_preverifier(PreVerifierTraining(**options(checkpoint, tmp_path / "whole", learning_rate=1e-4)))
    engine = SelfSpecGenerator.from_pretrained(checkpoint, policy=f"pacer:{whole}")
    assert engine.generate("a bed", max_new_tokens=9).stats.preverifier_layers >= 0


def test_the_loss_learns_what_the_features_say() -> None:
    """Tokens whose entropy is low are accepted, by construction: after some steps the estimates know."""
    model = from_transformers(tiny_llama(num_layers=3, seed=1), layout="plain")
    module = random_module(model, exit_layers=(1,)).train()
    made = trace([1] * 30, [number % 2 for number in range(30)], [5] * 30)
    made.features[:, 2] = torch.tensor([3.0, 0.1] * 15)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        loss: Tensor = trace_loss(module, made)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 < losses[0]


def test_calibration_undoes_what_was_too_sure() -> None:
    """Labels drawn from known chances; logits that exaggerate them by known numbers."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(20_000, generator=generator) * 2
    labels = (torch.rand(20_000, generator=generator) < truth.sigmoid()).float()
    scale, shift = fit_calibration(3.0 * truth + 1.5, labels)
    assert scale == pytest.approx(1 / 3, abs=0.02)
    assert shift == pytest.approx(-0.5, abs=0.05)
    assert fit_calibration(truth, torch.ones(20_000)) == (1.0, 0.0)


def test_each_exit_layer_has_its_own_calibration() -> None:
    model = from_transformers(tiny_llama(num_layers=3, seed=1), layout="plain")
    module = random_module(model, exit_layers=(1, 2))
    accepted = [number % 4 for number in range(30)]
    traces = [trace([2] * 30, accepted, [5] * 30), replace(trace([2] * 30, accepted, [5] * 30), exit_layer=2)]
    module.calibration.copy_(torch.tensor([1.0, 0.0]).expand(2, 2))
    before = float(trace_loss(module, traces[0]).detach())
    calibrate_estimates(module, traces[:1])
    assert float(trace_loss(module, traces[0]).detach()) < before - 0.1
    assert torch.equal(module.calibration[1], torch.tensor([1.0, 0.0]))


def test_data_may_be_taken_up_with_another_layout_but_not_with_other_weights(tmp_path: Path) -> None:
    """Rounding differs with the layout that is fastest today, so a fingerprint's last digit may."""
    make_data(generator(), PROMPTS[:2], PLAN, tmp_path)
    described = json.loads((tmp_path / "data.json").read_text())
    described["fingerprint"][0] += 1e-4
    (tmp_path / "data.json").write_text(json.dumps(described))
    make_data(generator(), PROMPTS[:2], PLAN, tmp_path)
    described["fingerprint"] = described["fingerprint"][::-1]
    (tmp_path / "data.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match="other options"):
        make_data(generator(), PROMPTS[:2], PLAN, tmp_path)


def test_a_folder_that_holds_something_else_is_left_alone(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="holds no training run"):
        train_preverifier(PreVerifierTraining(**options(checkpoint, tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_command_says_what_is_wrong(checkpoint: Path, tmp_path: Path) -> None:
    base = ["train-pacer", "--data", str(checkpoint / "text.txt"), "--model", str(checkpoint)]
    for extra, message in (
        (["--exit-layers", "4"], "exit_layer must be in [1, 3]"),
        (["--scope", "all"], "scope must be one of"),
        (["--window", "0"], "window must be at least 1"),
    ):
        result = CliRunner().invoke(app, [*base, "--output-dir", str(tmp_path / extra[0]), *extra])
        assert result.exit_code == 2
        assert message in result.stderr
