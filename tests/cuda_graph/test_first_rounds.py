"""Graphs that fail, or compute something else: one warning, and the eager runner goes on where they were."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import selfspec.engine.calibrate
from layerskip_models import from_transformers
from policies import DraftRow, NeverStop, ObservationSpec, Policy
from scripted_policies import ScriptedExit, StopBelow
from selfspec import NonFiniteLogitsError, SelfSpecGenerator
from selfspec.engine.runners.cuda_graph import first_rounds
from selfspec.engine.runners.cuda_graph.buffers import StaticPass
from selfspec.engine.runners.cuda_graph.capture import RecordedOperations
from selfspec.engine.runners.cuda_graph.forward import StaticAttention, StaticForward
from selfspec.engine.runners.cuda_graph.runner import CudaGraphRunner
from tiny_llama import reference_greedy, tiny_llama

PROMPT = [5, 1, 7]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_captures")]
Patch = pytest.MonkeyPatch


def captured(llama: LlamaForCausalLM) -> SelfSpecGenerator:
    return SelfSpecGenerator(from_transformers(llama, layout="plain"), runner="captured")


def fails_in_the_nth_capture(patch: Patch, count: int) -> None:
    made = [0]
    init = RecordedOperations.__init__

    def capture(self: RecordedOperations, body: Callable[[], object]) -> None:
        made[0] += 1
        init(self, body)  # it has run, as it has when a capture of CUDA's fails
        if made[0] == count:
            raise RuntimeError("operation not permitted when stream is capturing")

    patch.setattr(RecordedOperations, "__init__", capture)


def fails_in_the_nth_replay(patch: Patch, count: int) -> None:
    replayed = [0]
    replay = RecordedOperations.replay

    def again(self: RecordedOperations) -> None:
        replayed[0] += 1
        if replayed[0] == count:
            raise RuntimeError("an illegal instruction was encountered")
        replay(self)

    patch.setattr(RecordedOperations, "replay", again)


def bakes_the_position_in(patch: Patch, count: int) -> None:
    run = StaticForward.run

    def baked(self: StaticForward, hidden: Tensor, start: int, stop: int, positions: Tensor, *rest: Any) -> Tensor:
        first = positions.tolist()[0]  # no operation: nothing notes it
        return run(self, hidden, start, stop, torch.arange(first, first + positions.shape[0]), *rest)

    patch.setattr(StaticForward, "run", baked)


def writes_other_keys(patch: Patch, count: int) -> None:
    """And other values: what is left in the cache is wrong, whatever a row itself came to."""
    attend = StaticAttention.__call__
    patch.setattr(
        StaticAttention,
        "__call__",
        lambda self, layer, query, key, value: attend(self, layer, query, key * -1.0, value * -1.0),
    )


def gives_other_logits(patch: Patch, count: int) -> None:
    head = StaticPass.head

    def watched(self: StaticPass, *arguments: Any) -> None:
        head(self, *arguments)
        self.logits.mul_(1.2)

    patch.setattr(StaticPass, "head", watched)


def gives_nan(patch: Patch, count: int) -> None:
    run = StaticForward.run
    patch.setattr(StaticForward, "run", lambda *args: run(*args) * torch.nan)


def wipes_the_cache(patch: Patch, count: int) -> None:
    """A graph that fails has written over what was there."""
    replayed = [0]
    run, replay = CudaGraphRunner.run, RecordedOperations.replay
    cache = []

    def noted(self: CudaGraphRunner, *arguments: Any) -> None:
        cache.append(self.cache)
        run(self, *arguments)

    def again(self: RecordedOperations) -> None:
        replayed[0] += 1
        if replayed[0] == count:
            cache[-1].keys.fill_(torch.nan)
            cache[-1].values.fill_(1e30)
            raise RuntimeError("an illegal instruction was encountered")
        replay(self)

    patch.setattr(CudaGraphRunner, "run", noted)
    patch.setattr(RecordedOperations, "replay", again)


FAULTS: list[tuple[Callable[[Patch, int], None], int, str]] = [
    (fails_in_the_nth_capture, 1, "not permitted when stream is capturing"),
    (fails_in_the_nth_capture, 6, "not permitted when stream is capturing"),
    (fails_in_the_nth_replay, 1, "illegal instruction"),
    (fails_in_the_nth_replay, 31, "illegal instruction"),
    (wipes_the_cache, 31, "illegal instruction"),
    (bakes_the_position_in, 0, "differ from the eager ones"),
    (writes_other_keys, 0, "keys and values differ from the eager ones|logits differ from the eager ones"),
    (gives_other_logits, 0, "logits differ from the eager ones"),
    (gives_nan, 0, "differ from the eager ones"),
]


@pytest.mark.parametrize(
    ("fault", "count", "reason"), FAULTS, ids=[f"{fault.__name__} {count}" for fault, count, _ in FAULTS]
)
def test_graphs_that_fail_cost_a_warning_and_no_token(
    fault: Callable[[Patch, int], None], count: int, reason: str, llama64: LlamaForCausalLM, monkeypatch: Patch
) -> None:
    """The call goes on with the tokens that it has; learning and stopping rules go on, too; later calls are eager."""
    engine = captured(llama64)
    fault(monkeypatch, count)
    exit_policy = ScriptedExit([(2, 3), (None, 0), (3, 2)], ObservationSpec(shadow_layers=(1, 2, 3)))
    policy = Policy(exit_policy, StopBelow(0.2))
    with pytest.warns(RuntimeWarning, match=reason) as warned:
        result = engine.generate(PROMPT, max_new_tokens=25, policy=policy)
    assert len(warned) == 1
    expected = reference_greedy(llama64, PROMPT, max_new_tokens=25)
    assert result.new_tokens == expected
    assert (engine.runner, result.stats.runner) == ("eager", "eager")
    assert all(record.shadow is not None for record in exit_policy.records)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = engine.generate(PROMPT, max_new_tokens=25, policy="ls:2-3")
    assert (again.new_tokens, again.stats.runner) == (expected, "eager")


def test_sampling_goes_on_as_well(llama64: LlamaForCausalLM, monkeypatch: Patch) -> None:
    engine = captured(llama64)
    bakes_the_position_in(monkeypatch, 0)
    with pytest.warns(RuntimeWarning, match="differ from the eager ones"):
        result = engine.generate(PROMPT, max_new_tokens=25, policy="ls:2-3", do_sample=True, seed=1, top_k=5)
    assert len(result.new_tokens) == 25


def test_graphs_that_fail_ahead_of_a_call(llama64: LlamaForCausalLM, monkeypatch: Patch) -> None:
    """In `warm_up`, and while costs are measured."""
    fails_in_the_nth_capture(monkeypatch, 4)
    engine = captured(llama64)
    with pytest.warns(RuntimeWarning, match="not permitted"):
        assert engine.warm_up("ls:2-3")[0] == 3
    assert engine.runner == "eager"
    fails_in_the_nth_capture(monkeypatch, 4)
    monkeypatch.setattr(selfspec.engine.calibrate, "_SECONDS", 0.0)
    engine = captured(llama64)
    with pytest.warns(RuntimeWarning, match="not permitted"):
        result = engine.generate(PROMPT, max_new_tokens=10)
    assert result.new_tokens == reference_greedy(llama64, PROMPT, max_new_tokens=10)
    assert result.stats.runner == "eager"


def test_new_weights_do_not_bring_failed_graphs_back(monkeypatch: Patch) -> None:
    llama = tiny_llama(dtype=torch.float64, seed=3)
    engine = SelfSpecGenerator(llama, runner="captured")
    fails_in_the_nth_capture(monkeypatch, 1)
    with pytest.warns(RuntimeWarning, match="not permitted"):
        engine.generate(PROMPT, max_new_tokens=5, policy="ls:2-3")
    with torch.no_grad():
        llama.lm_head.weight.mul_(-1)
    result = engine.generate(PROMPT, max_new_tokens=5, policy="ls:2-3")
    assert result.new_tokens == reference_greedy(llama, PROMPT, max_new_tokens=5)
    assert engine.runner == "eager"


def test_a_right_runner_is_checked_twice_per_kind_and_model(llama64: LlamaForCausalLM, monkeypatch: Patch) -> None:
    checks: list[str] = []
    check = first_rounds.check

    def watched(*arguments: Any) -> None:
        checks.append(arguments[2])
        check(*arguments)

    monkeypatch.setattr(first_rounds, "check", watched)
    for dtype in (torch.float32, torch.bfloat16):
        model = from_transformers(tiny_llama(dtype=dtype, seed=3), layout="plain")
        checks.clear()
        for _ in range(2):
            engine = SelfSpecGenerator(model, runner="captured")
            for policy in ("ar", "ls:2-3", "dv:2"):
                assert engine.generate(PROMPT, max_new_tokens=12, policy=policy).stats.runner == "captured"
            engine.generate(PROMPT, max_new_tokens=12, policy="ls:2-3", do_sample=True, seed=1)
        assert sorted(checks) == ["plain step"] * 2 + ["speculative round"] * 2


class Broken(NeverStop):
    """A policy with a fault of its own."""

    def stop_before_draw(self, row: DraftRow) -> bool:
        raise RuntimeError("a fault of the policy")


def test_others_faults_are_not_blamed_on_graphs(llama64: LlamaForCausalLM) -> None:
    engine = captured(llama64)
    with pytest.raises(RuntimeError, match="a fault of the policy"):
        engine.generate(PROMPT, policy=Policy(ScriptedExit([(2, 3)]), Broken()))
    assert engine.runner == "captured"
    broken = tiny_llama(dtype=torch.float64, seed=3)
    with torch.no_grad():
        broken.model.norm.weight.fill_(torch.nan)
    engine = captured(broken)
    with pytest.raises(NonFiniteLogitsError):
        engine.generate(PROMPT, policy="ls:2-3")
    assert engine.runner == "captured"
