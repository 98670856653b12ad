"""Pacer: its rule by hand, its network against the module it is trained as, its data, and runs taken up again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from layerskip_models import DEMO_PATH, LayerSkipModel, from_transformers, load_demo
from layerskip_models.choices import choices_of
from policies import Drafter, DraftRow, LayerCost, MeasuredCost, PacerStopping, Plan, Policy, parse_policy
from policies.fixed import FixedExit
from preverifiers import random_module
from selfspec import SelfSpecGenerator
from selfspec.cli.main import app
from selfspec.engine.draft import _features
from selfspec.pacer import OURS, PAPER
from selfspec.pacer.examples import draft_traces, make_data, read_traces
from selfspec.pacer.inference import PreVerification
from selfspec.pacer.labels import DraftTrace, pack
from selfspec.pacer.network import LeanPreVerifier, load_preverifier, save_preverifier
from selfspec.pacer.quality import PlayedDraft, auc, best_settings, evaluate, fit_calibration, play, trace_logits
from selfspec.pacer.settings import DataPlan
from selfspec.pacer.training import PreVerifierLoss, train_preverifier
from tiny_llama import tiny_llama, tiny_tokenizer
from tiny_training import tiny_pacer, write_checkpoint


class Scripted:
    """Estimates by hand, a list per block."""

    exit_layers = (1, 2)

    def __init__(self, blocks: Sequence[Sequence[float]] = ()) -> None:
        self.defaults = {"exit_layer": 2, "b": 2, "t": 0.6}
        self.blocks = list(blocks)
        self.asked: list[tuple[int, int, int]] = []

    def estimate(self, context, exit_layer, position, first_index, hidden, features) -> list[float]:
        self.asked.append((position, first_index, len(hidden)))
        return list(self.blocks.pop(0))


class NoContext:
    max_length = 10

    def rows(self, exit_layer: int, start: int, stop: int) -> Tensor:
        raise AssertionError("the scripted pre-verifier does not look")


def drafted(policy: PacerStopping, cap: int = 40, exit_layer: int = 1) -> int:
    """Tokens that a round of this policy drafts."""
    policy.start_round(Plan(exit_layer=exit_layer, max_speculations=cap))
    for number in range(cap):
        row = DraftRow(
            num_drafted=number, exit_layer=exit_layer, position=7 + number, exit_hidden=torch.zeros(4),
            features=torch.zeros(3), context=NoContext(),
        )  # fmt: skip
        assert not policy.stop_before_draw(row)
        if policy.stop_after_draw(row, 5):
            return number + 1
    return cap


def test_threshold_grows_per_block_and_is_reset_per_round() -> None:
    """t = .7, .735, .77175: means .71, .74 and .78 pass each in its turn, .77 does not pass the third."""
    passing = [[0.71] * 4, [0.74] * 4, [0.78] * 4]
    policy = PacerStopping(Scripted([*passing, [0.0] * 4, *passing[:2], [0.77] * 4, [0.7] * 4]))
    assert drafted(policy) == 16
    assert policy.threshold(Drafter(1)) == pytest.approx(0.7 * 1.05**4)
    assert drafted(policy) == 12
    assert drafted(policy) == 4  # at most t, so the first block already: t is back at .7
    assert [asked[:2] for asked in policy.preverifier.asked[:4]] == [(7, 1), (11, 5), (15, 9), (19, 13)]


def test_what_a_round_spends_and_when_it_is_not_judged() -> None:
    """Block (.9, .6, .9) against .7 goes on: its mean is .8, though one estimate is below."""
    assert drafted(PacerStopping(Scripted([[0.9, 0.6, 0.9], [0.0] * 3]), b=3)) == 6
    policy = PacerStopping(Scripted([[0.9] * 4, [0.9] * 4]), max_length=12)
    assert drafted(policy) == 12
    assert policy.spent().layers == 2  # nothing would follow a verdict on the third block
    assert drafted(PacerStopping(Scripted()), cap=3) == 3
    policy.start_round(Plan(exit_layer=1, max_speculations=4))
    assert policy.spent().layers == 0
    assert policy.observes.context_layers == (1, 2)


def test_playing_by_hand() -> None:
    """L = 8, E = 2, b = 2, t = .5. A draft of 5, all accepted, ends with the text: judged twice, 6 tokens for 5 * 2 + 8 + 2
    layers. One that failed at once, (.9, .2), goes on (mean .55), then nothing is known: 1 token for 4 * 2 + 8 + 2."""
    good = PlayedDraft(exit_layer=2, estimates=(0.9, 0.9, 0.8, 0.8, 0.7), accepted=5, is_cut=False)
    bad = PlayedDraft(exit_layer=2, estimates=(0.9, 0.2), accepted=0, is_cut=True)
    assert play([good], 8, b=2, t=0.5, rho=1.0, max_length=32) == pytest.approx(6 / 20)
    assert play([bad], 8, b=2, t=0.5, rho=1.0, max_length=32) == pytest.approx(1 / 18)
    assert play([bad], 8, b=2, t=0.55, rho=1.0, max_length=32) == pytest.approx(1 / 13)
    assert play([good], 8, b=2, t=0.7, rho=1.2, max_length=32) == pytest.approx(5 / 18)  # .8 is not above .84
    assert play([good], 8, b=2, t=0.5, rho=1.0, max_length=4) == pytest.approx(5 / 17)
    rate, best = best_settings([good, good, bad], 8, max_length=32)[0]
    assert best["exit_layer"] == 2 and rate >= 13 / (20 + 20 + 13)
    assert play([good, good, bad], 8, **{name: best[name] for name in ("b", "t", "rho")}, max_length=32) == rate


def test_names() -> None:
    def parse(text: str) -> Policy:
        return parse_policy(text, num_layers=4, preverifier=lambda path: Scripted())

    pacer = parse("pacer:some/folder,t=0.5,rho=1,max_length=9").stopping
    assert isinstance(pacer, PacerStopping)
    assert (pacer.b, pacer.t, pacer.rho) == (2, 0.5, 1.0)
    plan = parse("pacer").exit.plan(None)
    assert (plan.exit_layer, plan.max_speculations) == (2, 32)
    assert parse("pacer:exit_layer=1").exit.plan(None).exit_layer == 1
    both = parse("auto:cost=layers+pacer:b=4")
    assert both.exit.exit_layers == (1, 2)
    assert both.exit.costs.cost == LayerCost(4, block=4)
    with pytest.raises(ValueError, match="exit layers 1, 2 only"):
        parse("ls:3-8+pacer")
    with pytest.raises(ValueError, match="exit layers 1, 2 only"):
        parse("pacer:exit_layer=3")
    with pytest.raises(ValueError, match="needs a pre-verifier"):
        parse_policy("pacer", num_layers=4)
    with pytest.raises(ValueError, match="judges exit layers 1, 2"):
        pacer.start_round(Plan(exit_layer=3, max_speculations=4))


def test_a_measured_cost_charges_what_a_pass_takes() -> None:
    """Counted in layers a pass is a layer; in seconds it is what its pre-verifier was timed at."""

    class Timed(PreVerification):
        def pass_seconds(self, block: int) -> float:
            return 100.0 * block

    model = from_transformers(tiny_llama(num_layers=4, seed=1), layout="plain")
    network = PreVerification(
        LeanPreVerifier(random_module(model, exit_layers=(1, 2)), model.dtype, model.device)
    ).network
    measured = MeasuredCost(num_layers=4, layer_seconds=(1.0, 1.0), head_seconds=(1.0, 1.0))
    costs = {}
    for kind in ("layers", "measured"):
        policy = parse_policy(
            f"auto:cost={kind}+pacer:b=3", num_layers=4, measure=lambda: measured, preverifier=lambda _: Timed(network)
        )
        costs[kind] = policy.exit.costs.cost
    assert costs["layers"] == LayerCost(4, block=3)
    # 9 drafts at layer 2 of 8: 9 * 2 + 8, and a pass behind the 4th and the 8th.
    assert LayerCost(8, block=4).round(2, 9) == 9 * 2 + 8 + 2
    assert LayerCost(8, block=4, block_seconds=2.5).round(2, 9) == 9 * 2 + 8 + 2 * 2.5
    assert costs["measured"] == replace(measured, block=3, block_seconds=300.0)
    assert 0 < PreVerification(network).pass_seconds(3) < 60


def test_features_by_hand() -> None:
    """p = (1/2, 1/4, 1/4): log p1 = -.693, margin log 2, entropy 1.5 log 2; an impossible token changes nothing."""
    half = 0.6931472
    p = torch.tensor([[0.5, 0.25, 0.25, 0.0]])
    (output,) = choices_of(p.log(), "all").outputs()
    assert _features(output, torch.device("cpu")).tolist() == pytest.approx([-half, half, 1.5 * half])


class Checked(PreVerification):
    """Holds every answer to the module's, over the committed rows and the round's rows given all at once."""

    def __init__(self, module: Any, model: LayerSkipModel) -> None:
        super().__init__(LeanPreVerifier(module, model.dtype, model.device))
        self.module, self.count, self.first = module.to(model.dtype), 0, 0
        self.rows: list[tuple[Tensor, Tensor]] = []

    def estimate(self, context, exit_layer, position, first_index, hidden, features) -> list[float]:
        if first_index == 1:
            self.rows = []
        self.rows.append((hidden.clone(), features.clone()))
        got = super().estimate(context, exit_layer, position, first_index, hidden, features)
        drafts = torch.cat([part for part, _ in self.rows])
        start, rows = position - first_index + 1, len(drafts)
        before = context.rows(exit_layer, 0, start)
        size = start + rows
        mask = torch.ones(size, size, dtype=torch.bool).tril()
        index = torch.cat([torch.zeros(start, dtype=torch.long), torch.arange(1, rows + 1)])
        everything = torch.cat([torch.zeros(start, 3), *(part for _, part in self.rows)])
        with torch.no_grad():
            out = self.module(
                torch.cat([before, drafts]).clone(), everything.clone(), index, torch.arange(size), mask, exit_layer
            )[start:].sigmoid()
        wanted = out if self.module.config.design == PAPER else out.cumprod(0)
        assert got == pytest.approx(wanted[-len(got) :].tolist(), abs=1e-5)
        self.count += 1
        return got


@pytest.mark.parametrize("design", [OURS, PAPER])
def test_every_answer_is_the_modules(design: str) -> None:
    """With its own cache rolled back, texts and exit layers changing: as if every round began afresh."""
    model = from_transformers(tiny_llama(num_layers=5, heads=4, kv_heads=2, seed=2), layout="plain")
    engine = SelfSpecGenerator(model)
    module = random_module(model, seed=4, design=design)
    checked = Checked(module, model)
    for exit_policy in (FixedExit(1, 20, num_layers=5), FixedExit(3, 20, num_layers=5)):
        policy = Policy(exit_policy, PacerStopping(checked, b=2, t=0.2))
        for prompt in ([1, 2, 3], [9] * 12, [5, 1, 7, 7]):
            stats = engine.generate(prompt, max_new_tokens=20, policy=policy).stats
            assert stats.preverifier_layers > 0
            assert stats.etpl_charged == pytest.approx(
                (stats.num_new_tokens - 1) / (stats.loaded_layers + stats.preverifier_layers)
            )
    assert checked.count > 60


def test_one_for_another_model_is_an_error(tmp_path: Path) -> None:
    model = from_transformers(tiny_llama(num_layers=4, seed=1), layout="plain")
    save_preverifier(random_module(model), tmp_path)
    same_shape = SelfSpecGenerator(from_transformers(tiny_llama(num_layers=4, seed=2), layout="plain"))
    with pytest.raises(ValueError, match="whose weights are not those of"):
        same_shape.generate([1], max_new_tokens=4, policy=f"pacer:{tmp_path}")
    other = SelfSpecGenerator(from_transformers(tiny_llama(hidden_size=24, num_layers=4), layout="plain"))
    with pytest.raises(ValueError, match="another shape"):
        other.generate([1], max_new_tokens=4, policy=f"pacer:{tmp_path}")
    with pytest.raises(ValueError, match="no pre-verifier beside"):
        other.generate([1], max_new_tokens=4, policy="pacer")
    with pytest.raises(FileNotFoundError, match=r"preverifier\.json is missing"):
        other.generate([1], max_new_tokens=4, policy=f"pacer:{tmp_path / 'nothing'}")


BROKEN: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "cut weights": ("preverifier.safetensors", lambda data: data[:-8], "SafetensorError"),
    "nothing in it": ("preverifier.json", lambda data: b"{}", ""),
    "bytes that are no text": ("preverifier.json", lambda data: b"\xff" + data, "UnicodeDecodeError"),
    "a number of text": ("preverifier.json", lambda data: data.replace(b'"max_drafts": ', b'"max_drafts": 0.5'), "drafts"),
    "a variant that is gone": ("preverifier.json", lambda data: data.replace(b"{", b'{"scope": "draft",', 1), "scope"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_one_line(name: str, tmp_path: Path) -> None:
    save_preverifier(random_module(from_transformers(tiny_llama(seed=1), layout="plain")), tmp_path)
    file, change, message = BROKEN[name]
    (tmp_path / file).write_bytes(change((tmp_path / file).read_bytes()))
    with pytest.raises(
        ValueError, match=f"{tmp_path} holds no pre-verifier that can be read: train it again.*{message}"
    ) as found:
        load_preverifier(tmp_path)
    assert "\n" not in str(found.value)


def test_the_shipped_one_judges_the_demo_model() -> None:
    """Its estimates tell accepted drafts from rejected ones, and the rounds it ends early waste fewer."""
    generator = SelfSpecGenerator(*load_demo())
    prompt = "Question: Tom has 3 boxes with 4 apples each. How many apples does he have?\nAnswer:"
    paced = generator.generate(prompt, max_new_tokens=64, policy="pacer", eos_token_id=[])
    layer = next(iter(paced.stats.rounds_by_exit_layer))
    long = generator.generate(prompt, max_new_tokens=64, policy=f"ls:{layer}-12", eos_token_id=[])
    assert paced.new_tokens == long.new_tokens
    assert paced.stats.acceptance_rate > long.stats.acceptance_rate
    assert paced.stats.etpl_charged > long.stats.etpl
    assert (DEMO_PATH / "pacer" / "preverifier.json").is_file()


PLAN = DataPlan(exit_layers=(1, 3), response_tokens=10, window=10, behind=10, positions=0)
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
                    text[: start - 1], max_new_tokens=9, eos_token_id=eos, policy=f"ls:{trace.exit_layer}-7", trace=True
                )
                first = run.trace[0]
                assert count == min(first.num_accepted, len(text) - start)
                assert length == min(first.num_drafted, len(text) - start)
                accepted += count
                rejected += count < length
    assert accepted > 10 and rejected > 10


def test_drafts_end_behind_their_mismatch() -> None:
    engine = generator()
    long, short, bare = (
        next(draft_traces(engine, PROMPTS[0], DataPlan(exit_layers=(2,), response_tokens=24, behind=behind), seed=0))
        for behind in (50, 1, 0)
    )
    assert short.accepted.equal(long.accepted)
    assert short.lengths.equal(torch.minimum(long.lengths, long.accepted + 2))
    cut = long.up_to_mismatch()
    assert cut.lengths.equal(bare.lengths)
    torch.testing.assert_close(cut.hidden, bare.hidden, atol=1e-3, rtol=1e-3)  # kept in float16
    assert cut.labels().equal(bare.labels())


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


def test_labels_and_mask_by_hand() -> None:
    """Drafts of 3 and 2 tokens, of which 1 and 2 are accepted: the first one's third token has no fate of its own.

    Then a context of 3 rows. A draft of 3 behind 2 committed tokens: its first row, that of token 1, sees row 0 and itself.
    Another draft sees nothing of it.
    """
    made = trace([3, 2], [1, 2], [4, 6])
    assert made.labels().tolist() == [1, 0, 0, 1, 1]
    assert made.fate_known().tolist() == [True, True, False, True, True]
    assert made.draft_index().tolist() == [1, 2, 3, 1, 2]
    packed = pack(trace([3, 1], [1, 0], [2, 1], context=3))
    assert packed["position"].tolist() == [0, 1, 2, 1, 2, 3, 0]
    rows = [[1, 0, 0, 1, 0, 0, 0], [1, 0, 0, 1, 1, 0, 0], [1, 0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0, 1]]
    assert packed["mask"][3:].int().tolist() == rows


def test_metrics_by_hand() -> None:
    """Scores .1 .4 .4 .8 of tokens 0 1 0 1: pairs 1, .5, 1, 1 of 4."""
    scores, labels = torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([0.0, 1.0, 0.0, 1.0])
    assert auc(scores, labels) == pytest.approx(3.5 / 4)
    assert math.isnan(auc(scores, torch.ones(4)))


def test_figures_are_of_rows_whose_fate_is_known() -> None:
    """Per token up to the first mismatch, and per draft for every row; of each exit layer and of all."""
    module = random_module(from_transformers(tiny_llama(num_layers=3, seed=1), layout="plain"), exit_layers=(1, 2))
    measured = evaluate(module, [trace([3, 2], [1, 2], [4, 6])])
    assert set(measured) == {"1", "1/2"} and measured["1"] == measured["1/2"]
    assert [measured["1"][kind]["num_tokens"] for kind in ("token", "prefix")] == [4, 5]
    assert [measured["1"][kind]["share_accepted"] for kind in ("token", "prefix")] == pytest.approx([3 / 4, 3 / 5])


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*"))


def test_data_is_taken_up_where_it_broke_off(tmp_path: Path) -> None:
    """After the second response; finished ones are not made again, and all are what one run would have made."""
    engine, plan, whole, parts = generator(), PLAN, tmp_path / "whole", tmp_path / "parts"
    make_data(engine, PROMPTS, plan, whole)

    class Killed(Exception):
        pass

    def kill(done: int) -> None:
        if done == 2:
            raise Killed

    with pytest.raises(Killed):
        make_data(engine, PROMPTS, plan, parts, kill)
    times = [path.stat().st_mtime_ns for path in files(parts)]
    assert len(times) == 2
    make_data(engine, PROMPTS, plan, parts)
    assert [path.stat().st_mtime_ns for path in files(parts)][:2] == times
    assert [path.read_bytes() for path in files(parts)] == [path.read_bytes() for path in files(whole)]
    traces = list(read_traces(tmp_path / "whole"))
    assert [made.exit_layer for made in traces] == [1, 3] * 5
    with pytest.raises(ValueError, match="other prompts"):
        make_data(engine, PROMPTS[:4], plan, whole)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("design", [OURS, PAPER])
def test_a_finished_run_decodes(design: str, checkpoint: Path, tmp_path: Path) -> None:
    whole = train_preverifier(tiny_pacer(checkpoint, tmp_path / "whole", design=design))
    measured = json.loads((tmp_path / "whole" / "quality.json").read_text())
    assert set(measured) == {"1", "2", "1/2"}
    assert 0 <= measured["1/2"]["token"]["auc"] <= 1
    engine = SelfSpecGenerator.from_pretrained(checkpoint, policy=f"pacer:{whole}")
    assert engine.generate("a bed", max_new_tokens=9).stats.preverifier_layers >= 0
    if design == PAPER:  # its settings are the paper's, and drafts go on behind a mismatch to the window's end
        policy = engine.resolve_policy(f"pacer:{whole}").stopping
        assert (policy.b, policy.t, policy.rho) == (4, 0.7, 1.05)
        made = list(read_traces(tmp_path / "whole" / "data" / "train"))
        ends = [one.starts + one.lengths for one in made]
        assert all(((one.lengths == 6) | (end == len(one.context))).all() for one, end in zip(made, ends))


def test_the_papers_loss_is_of_every_row_and_sees_no_features() -> None:
    module = random_module(
        from_transformers(tiny_llama(num_layers=3, seed=1), layout="plain"), design=PAPER, exit_layers=(1,)
    )
    made = trace([3, 2], [1, 2], [4, 6])
    loss, _ = PreVerifierLoss(module)(made)
    estimates = trace_logits(module, replace(made, features=torch.zeros(5, 3))).sigmoid()
    right = torch.where(made.labels().bool(), estimates, 1 - estimates)  # of the labels 1, 0, 0, 1, 1
    assert float(loss.detach()) == pytest.approx(-float(right.log().mean().detach()), rel=1e-5)


def test_the_loss_learns_what_the_features_say() -> None:
    """Tokens whose entropy is low are accepted, by construction: after some steps the estimates know."""
    model = from_transformers(tiny_llama(num_layers=3, seed=1), layout="plain")
    module = random_module(model, exit_layers=(1,)).train()
    made = trace([1] * 30, [number % 2 for number in range(30)], [5] * 30)
    made.features[:, 2] = torch.tensor([3.0, 0.1] * 15)
    trained, losses = PreVerifierLoss(module), []
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for _ in range(40):
        loss, _ = trained(made)
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


def test_the_command_says_what_is_wrong(checkpoint: Path, tmp_path: Path) -> None:
    base = ["train-pacer", "--data", str(checkpoint / "text.txt"), "--model", str(checkpoint)]
    for extra, message in (
        (["--exit-layers", "4"], "exit_layer must be in [1, 3]"),
        (["--window", "0"], "window must be at least 1"),
        (["--design", "mine"], "design must be one of ours, paper"),
    ):
        result = CliRunner().invoke(app, [*base, "--output-dir", str(tmp_path / extra[0]), *extra])
        assert result.exit_code == 2
        assert message in result.stderr
