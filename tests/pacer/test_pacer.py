"""Pacer's stopping rule on estimates by hand; its network against the module it is trained as, in every round of a text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from layerskip_models import DEMO_PATH, LayerSkipModel, from_transformers, load_demo
from policies import DraftRow, LayerCost, MeasuredCost, PacerStopping, Plan, Policy, parse_policy
from policies.fixed import FixedExit
from preverifiers import random_module, random_preverification
from selfspec import SelfSpecGenerator
from selfspec.engine.hidden_states import HiddenStates
from selfspec.pacer.inference import PreVerification
from selfspec.pacer.network import (
    LeanPreVerifier,
    PreVerifierConfig,
    count_parameters,
    describe_layer,
    draft_features,
    load_preverifier,
    save_preverifier,
)
from selfspec.pacer.tuning import PlayedDraft, best_settings, play
from tiny_llama import tiny_llama


class Scripted:
    """Estimates by hand, a list per block."""

    exit_layers = (1, 2)

    def __init__(self, blocks: Sequence[Sequence[float]] = ()) -> None:
        self.defaults = {"exit_layer": 2, "b": 2, "t": 0.6}
        self.blocks = list(blocks)
        self.asked: list[tuple[int, int, int]] = []

    def estimate(self, context, exit_layer, position, first_index, hidden, features, scope) -> list[float]:
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
    assert policy.threshold(1) == pytest.approx(0.7 * 1.05**4)
    assert drafted(policy) == 12
    assert drafted(policy) == 4  # at most t, so the first block already: t is back at .7
    assert [asked[:2] for asked in policy.preverifier.asked[:4]] == [(7, 1), (11, 5), (15, 9), (19, 13)]


@pytest.mark.parametrize(("criterion", "stops"), [("mean", False), ("any", True), ("last", False)])
def test_criteria(criterion: str, stops: bool) -> None:
    """Block (.9, .6, .9) against .7: mean .8, smallest .6, last .9."""
    policy = PacerStopping(Scripted([[0.9, 0.6, 0.9], [0.0] * 3]), b=3, criterion=criterion)
    assert drafted(policy) == (3 if stops else 6)


def test_what_a_round_spends_and_when_it_is_not_judged() -> None:
    policy = PacerStopping(Scripted([[0.9] * 4, [0.9] * 4]), max_length=12)
    assert drafted(policy) == 12
    assert policy.spent().layers == 2  # nothing would follow a verdict on the third block
    assert drafted(PacerStopping(Scripted()), cap=3) == 3
    policy.start_round(Plan(exit_layer=1, max_speculations=4))
    assert policy.spent().layers == 0
    assert policy.observes.context_layers == (1, 2)


@pytest.mark.parametrize(
    "options", [{"b": 0}, {"t": 1.0}, {"rho": 0.0}, {"criterion": "median"}, {"max_length": 0}], ids=str
)
def test_settings_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        PacerStopping(Scripted(), **options)


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
    best = best_settings([good, good, bad], 8, max_length=32)[0]
    assert best.exit_layer == 2 and best.tokens_per_layer >= 13 / (20 + 20 + 13)


def test_names() -> None:
    def parse(text: str) -> Policy:
        return parse_policy(text, num_layers=4, preverifier=lambda path: Scripted())

    pacer = parse("pacer:some/folder,t=0.5,rho=1,criterion=last,scope=draft,max_length=9").stopping
    assert isinstance(pacer, PacerStopping)
    assert (pacer.b, pacer.t, pacer.rho, pacer.criterion, pacer.scope) == (2, 0.5, 1.0, "last", "draft")
    plan = parse("pacer").exit.plan(None)
    assert (plan.exit_layer, plan.max_speculations) == (2, 32)
    assert parse("pacer:exit_layer=1").exit.plan(None).exit_layer == 1
    both = parse("auto:cost=layers+pacer:b=4")
    assert both.exit.learner.layers == (1, 2)
    assert both.exit.learner.cost == LayerCost(4, block=4)
    with pytest.raises(ValueError, match="exit layers 1, 2 only"):
        parse("ls:3-8+pacer")
    with pytest.raises(ValueError, match="exit layers 1, 2 only"):
        parse("pacer:exit_layer=3")
    with pytest.raises(ValueError, match="needs a pre-verifier"):
        parse_policy("pacer", num_layers=4)
    with pytest.raises(ValueError, match="judges exit layers 1, 2"):
        pacer.start_round(Plan(exit_layer=3, max_speculations=4))


def test_cost_with_a_preverifier() -> None:
    """9 drafts at layer 2 of 8: 9 * 2 + 8, and a pass behind the 4th and the 8th."""
    cost = LayerCost(8, block=4)
    assert cost.round(2, 9) == 9 * 2 + 8 + 2
    assert (cost.autoregressive(), cost.look(2), cost.num_layers) == (8.0, 0.0, 8)
    assert LayerCost(8, block=4, block_seconds=2.5).round(2, 9) == 9 * 2 + 8 + 2 * 2.5


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
        costs[kind] = policy.exit.learner.cost
    assert costs["layers"] == LayerCost(4, block=3)
    assert costs["measured"] == replace(measured, block=3, block_seconds=300.0)
    assert 0 < PreVerification(network).pass_seconds(3) < 60


def test_features_by_hand() -> None:
    """p = (1/2, 1/4, 1/4): log p1 = -.693, margin log 2, entropy 1.5 log 2; an impossible token changes nothing."""
    half = 0.6931472
    p = torch.tensor([[0.5, 0.25, 0.25, 0.0]])
    assert draft_features(p.log())[0].tolist() == pytest.approx([-half, half, 1.5 * half])


class Checked(PreVerification):
    """Holds every answer to the module's, over the committed rows and the round's rows given all at once."""

    def __init__(self, module: Any, model: LayerSkipModel) -> None:
        super().__init__(LeanPreVerifier(module, model.dtype, model.device))
        self.module, self.count, self.first = module.to(model.dtype), 0, 0
        self.rows: list[tuple[Tensor, Tensor]] = []

    def estimate(self, context, exit_layer, position, first_index, hidden, features, scope) -> list[float]:
        if first_index == 1:
            self.rows = []
        self.rows.append((hidden.clone(), features.clone()))
        got = super().estimate(context, exit_layer, position, first_index, hidden, features, scope)
        drafts = torch.cat([part for part, _ in self.rows])
        start, rows = position - first_index + 1, len(drafts)
        before = context.rows(exit_layer, 0, start)
        size = start + rows
        mask = torch.ones(size, size, dtype=torch.bool).tril()
        index = torch.cat([torch.zeros(start, dtype=torch.long), torch.arange(1, rows + 1)])
        if scope == "draft":
            mask[start:, :start] = False
        elif scope == "block":
            for row in range(rows):
                mask[start + row, : start + row - row % hidden.shape[0]] = False
        everything = torch.cat([torch.zeros(start, 3), *(part for _, part in self.rows)])
        with torch.no_grad():
            out = self.module(
                torch.cat([before, drafts]).clone(), everything.clone(), index, torch.arange(size), mask, exit_layer
            )[start:].sigmoid()
        want = out.cumprod(0) if self.module.config.estimates == "conditional" else out
        assert got == pytest.approx(want[-len(got) :].tolist(), abs=1e-5)
        self.count += 1
        return got


@pytest.mark.parametrize("scope", ["full", "draft", "block"])
@pytest.mark.parametrize("estimates", ["conditional", "prefix"])
def test_every_answer_is_the_modules(scope: str, estimates: str) -> None:
    """With its own cache rolled back, texts and exit layers changing: as if every round began afresh."""
    model = from_transformers(tiny_llama(num_layers=5, heads=4, kv_heads=2, seed=2), layout="plain")
    engine = SelfSpecGenerator(model)
    module = random_module(model, estimates=estimates, seed=4)
    checked = Checked(module, model)
    for exit_policy in (FixedExit(1, 20, num_layers=5), FixedExit(3, 20, num_layers=5)):
        policy = Policy(exit_policy, PacerStopping(checked, b=2, t=0.2, scope=scope))
        for prompt in ([1, 2, 3], [9] * 12, [5, 1, 7, 7]):
            stats = engine.generate(prompt, max_new_tokens=20, policy=policy).stats
            assert stats.preverifier_layers > 0
            assert stats.etpl_charged == pytest.approx(
                (stats.num_new_tokens - 1) / (stats.loaded_layers + stats.preverifier_layers)
            )
    assert checked.count > 60


def test_the_context_holds_what_a_full_pass_gives(llama64: LlamaForCausalLM) -> None:
    """Whatever was drafted and rejected between, and with plain rounds: h of every committed row at every exit layer."""
    model = from_transformers(llama64, layout="plain")
    engine = SelfSpecGenerator(model)
    seen: list[HiddenStates] = []
    plain = random_preverification(model)

    class Watching(PreVerification):
        def estimate(self, context, *rest) -> list[float]:
            seen.append(context)
            return plain.estimate(context, *rest)

    stopping = PacerStopping(Watching(plain.network), b=2, t=0.2)
    prompt = [3, 1, 4, 1, 5]
    result = engine.generate(prompt, max_new_tokens=25, policy=Policy(FixedExit(2, 9, num_layers=4), stopping))
    assert result.stats.num_accepted < result.stats.num_drafted
    text = prompt + result.new_tokens
    with torch.no_grad():
        states = llama64(torch.tensor([text]), output_hidden_states=True).hidden_states
    for layer in (1, 2, 3):
        torch.testing.assert_close(seen[-1].rows(layer, 0, len(text) - 1), states[layer][0, :-1], atol=1e-9, rtol=0)


def test_saved_and_loaded(tmp_path: Path) -> None:
    model = from_transformers(tiny_llama(num_layers=4, seed=1), layout="plain")
    module = random_module(model, exit_layers=(1, 3), scope="draft")
    save_preverifier(module, tmp_path)
    again = load_preverifier(tmp_path)
    assert again.config == module.config
    assert all(a.equal(b) for a, b in zip(again.state_dict().values(), module.state_dict().values()))
    engine = SelfSpecGenerator(model)
    assert engine.generate([1, 2], max_new_tokens=9, policy=f"pacer:{tmp_path},b=2").stats.rounds > 0


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
    (tmp_path / "preverifier.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no pre-verifier"):
        load_preverifier(tmp_path)


BROKEN: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "cut weights": ("preverifier.safetensors", lambda data: data[:-8], "SafetensorError"),
    "no safetensors": ("preverifier.safetensors", lambda data: b"nothing", "SafetensorError"),
    "no JSON": ("preverifier.json", lambda data: data[:9], "JSONDecodeError"),
    "a list": ("preverifier.json", lambda data: b"[1]", "TypeError"),
    "bytes that are no text": ("preverifier.json", lambda data: b"\xff" + data, "UnicodeDecodeError"),
    "a number of text": ("preverifier.json", lambda data: data.replace(b'"max_drafts": ', b'"max_drafts": 0.5'), "drafts"),
    "no heads": ("preverifier.json", lambda data: re.sub(rb'(_value_heads": )\d+', rb"\g<1>0", data), "ZeroDivisionError"),
    "a layer that is none": ("preverifier.json", lambda data: data.replace(b'"hidden_size"', b'"hidden"'), "Error"),
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


def test_weights_of_none_are_named(tmp_path: Path) -> None:
    """In the calibration, too, which is no parameter."""
    for name, value in (("head.weight", torch.nan), ("calibration", torch.inf)):
        module = random_module(from_transformers(tiny_llama(seed=1), layout="plain"))
        module.state_dict()[name].view(-1)[0] = value
        save_preverifier(module, tmp_path)
        with pytest.raises(ValueError, match=f"preverifier.safetensors holds NaN or infinite weights, first in {name}"):
            load_preverifier(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_same_weights_in_another_dtype_are_the_same_model(dtype: torch.dtype, tmp_path: Path) -> None:
    save_preverifier(random_module(from_transformers(tiny_llama(seed=1), layout="plain")), tmp_path)
    engine = SelfSpecGenerator(from_transformers(tiny_llama(seed=1, dtype=dtype), layout="plain"))
    assert engine.generate([1, 2], max_new_tokens=9, policy=f"pacer:{tmp_path},b=2").stats.rounds > 0


def test_parameters_at_published_shapes(llama64: LlamaForCausalLM) -> None:
    """A Llama-2-7B layer has 4 * 4096^2 + 3 * 4096 * 11008 + 2 * 4096 = 202,383,360; the rest: norms, positions, head."""
    described = describe_layer(llama64.config)
    described |= {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "head_dim": 128}
    described |= {"num_key_value_heads": 32}
    config = PreVerifierConfig(
        base_model="", fingerprint=(), exit_layers=(8,), layer=described, features=False, max_drafts=50
    )
    assert count_parameters(config) == 202_383_360 + 2 * 4096 + 51 * 4096 + 4097
    assert count_parameters(replace(config, features=True)) - count_parameters(config) == 4 * 4096


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
