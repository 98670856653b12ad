"""The order of work on a device: nothing is read before it is written, and nothing is written over before it is read.

On a lazy device (`lazy_device.py`), where work that nobody waits for has not happened.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import selfspec.engine.runners.cuda_graph.first_rounds
import selfspec.engine.runners.cuda_graph.runner
from layerskip_models import from_transformers
from lazy_device import LazyDevice
from policies import ObservationSpec, Policy, RoundRecord
from scripted_policies import ScriptedExit, StopBelow
from selfspec import SelfSpecGenerator
from selfspec.engine.runners.cuda_graph.streams import HostRead
from test_captured import PROMPT, facts
from tiny_llama import tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_captures")]


# The device itself


def test_work_waits_for_somebody_to_ask() -> None:
    device = LazyDevice()
    x, y = torch.zeros(2), torch.zeros(2)
    host = device.host_memory(2)
    event = device.event()
    with device:
        y.copy_(x + 1)
        host.copy_(y)
        event.record()
        y.add_(5)
        assert host.tolist() == [0.0, 0.0]
        event.synchronize()
        assert host.tolist() == [1.0, 1.0]
        assert y.tolist() == [6.0, 6.0]
        assert float(y.sum()) == 12.0
    assert device.num_operations == 5


def test_random_numbers_come_in_the_order_of_their_launch() -> None:
    numbers = []
    for lazy in (False, True):
        generator = torch.Generator().manual_seed(3)
        device = LazyDevice()
        with device if lazy else torch.no_grad():
            first = torch.empty(2).exponential_(generator=generator)
            second = torch.rand(2, generator=generator)
        numbers.append([first.tolist(), second.tolist()])
    assert numbers[0] == numbers[1]


# Rounds


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return tiny_llama(dtype=torch.float64, late_scale=0.6, seed=3)


class Reading(ScriptedExit):
    """Reads all of a record when it is told of the round, as policies do that learn."""

    def __init__(self, plans: list[tuple[int | None, int]], observes: ObservationSpec) -> None:
        super().__init__(plans, observes)
        self.read: list[tuple[Any, ...]] = []

    def observe(self, record: RoundRecord) -> None:
        self.read.append(facts(record))


def policies() -> list[tuple[Reading, Policy]]:
    """Learning in every round, in some, and in none; with plain steps, drops and drafts of several lengths."""
    found = []
    for every, stopping in ((1, None), (1, StopBelow(0.4)), (3, None), (0, StopBelow(0.4))):
        observes = ObservationSpec(shadow_layers=(1, 2, 3) if every else (), learn_every=max(every, 1))
        exit_policy = Reading([(2, 3), (2, 3), (None, 0), (None, 0), (3, 1)], observes)
        found.append((exit_policy, Policy(exit_policy, stopping)))
    return found


ALL, SOME = slice(0, 4), slice(1, 3)
"""All of these policies, or two: one learns in every round and drops drafts, the other in every third and drops none."""


def run(engine: SelfSpecGenerator, which: slice, **options: Any) -> list[tuple[list[int], list[tuple[Any, ...]]]]:
    """Text and rounds, as the policy read them, of some of these policies."""
    found = []
    for exit_policy, policy in policies()[which]:
        result = engine.generate(PROMPT, max_new_tokens=14, policy=policy, **options)
        found.append((result.new_tokens, exit_policy.read))
    return found


def lazy_engine(
    llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, seed: int | None = None
) -> tuple[SelfSpecGenerator, LazyDevice]:
    device = LazyDevice(seed)
    monkeypatch.setattr(selfspec.engine.runners.cuda_graph.runner, "streams_for", lambda _: device)
    monkeypatch.setattr(
        selfspec.engine.runners.cuda_graph.first_rounds, "CHECKED", 0
    )  # comparing waits for all that was launched
    return SelfSpecGenerator(from_transformers(llama, layout="plain"), runner="captured"), device


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "processors": {"repetition_penalty": 1.3, "eos_token_id": [11]},
    "sampled": {"do_sample": True, "seed": 4, "top_k": 8},
}


@pytest.fixture(scope="module")
def expected(llama: LlamaForCausalLM) -> dict[str, Any]:
    """The eager runner's rounds."""
    engine = SelfSpecGenerator(from_transformers(llama, layout="plain"), runner="eager")
    found = {name: run(engine, ALL, **options) for name, options in OPTIONS.items()}
    assert sum(shadow is not None for _, rounds in found["greedy"] for *_, shadow in rounds) > 10
    return found


@pytest.mark.parametrize(
    ("name", "seed", "which"),
    [
        ("greedy", None, ALL),
        ("processors", None, SOME),
        ("sampled", None, SOME),
        ("greedy", 1, SOME),
        pytest.param("processors", None, ALL, marks=pytest.mark.slow),
        pytest.param("sampled", None, ALL, marks=pytest.mark.slow),
        pytest.param("greedy", 1, ALL, marks=pytest.mark.slow),
    ],
)
def test_rounds_on_a_lazy_device_are_the_eager_runner_s(
    name: str,
    seed: int | None,
    which: slice,
    llama: LlamaForCausalLM,
    expected: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Text, drafts, confidences, and what is learned from: shadow tokens, their confidences, target tokens."""
    engine, device = lazy_engine(llama, monkeypatch, seed)
    with device:
        found = run(engine, which, **OPTIONS[name])
    assert found == expected[name][which]
    assert device.num_operations > 1000


@pytest.mark.parametrize(
    ("seed", "which"),
    [(None, SOME), pytest.param(None, ALL, marks=pytest.mark.slow), pytest.param(1, ALL, marks=pytest.mark.slow)],
)
def test_a_text_that_joins_a_batch_on_a_lazy_device(
    seed: int | None,
    which: slice,
    llama: LlamaForCausalLM,
    expected: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was launched ahead for a captured text does not disturb the eager rounds that follow, nor is it waited for."""
    engine, device = lazy_engine(llama, monkeypatch, seed)
    for (exit_policy, policy), rounds in [*zip(policies(), expected["greedy"])][which]:
        with device, engine.engine() as texts:
            first = texts.add(PROMPT, max_new_tokens=14, policy=policy)
            found: list[int] = []
            for step in range(30):
                if step == 3:
                    other = texts.add([9, 2], max_new_tokens=5, policy="ls:1-2")
                for progress in texts.step():
                    found += progress.tokens if progress.ticket == first else []
                    assert progress.ticket in (first, other) if step > 2 else progress.ticket == first
                    if progress.result is not None and progress.ticket == first:
                        assert progress.result.stats.runner == "eager"
        assert (found, exit_policy.read) == rounds


def test_the_host_waits_once_for_each_row_and_for_nothing_else(
    llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each drafted row is read once, and each verification. No read waits for what was launched after it."""
    engine, device = lazy_engine(llama, monkeypatch)
    waits: list[int] = []
    wait = HostRead.wait
    monkeypatch.setattr(HostRead, "wait", lambda self: (waits.append(1), wait(self))[1])
    for policy in ("ar", "ls:2-3"):
        waits.clear()
        with device, engine.engine() as texts:
            texts.add(PROMPT, max_new_tokens=20, policy=policy, trace=True)
            texts.step()  # the prompt, which is read eagerly
            drained = device.num_drains
            (result,) = [output.result for _ in range(40) if len(texts) for output in texts.step() if output.result]
        assert device.num_drains == drained + 1  # for the result's ids
        assert result.stats.runner == "captured"
        assert len(waits) == result.stats.num_drafted + result.stats.rounds


def copy_after_the_event(patch: pytest.MonkeyPatch) -> None:
    def start(self: HostRead, numbers: Tensor) -> None:
        self._size = numbers.shape[0]
        self.event.record()
        self._host[: self._size].copy_(numbers, non_blocking=True)

    patch.setattr(HostRead, "start", start)


def read_without_waiting(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostRead, "wait", lambda self: self._host[: self._size].tolist())


@pytest.mark.parametrize(
    "fault",
    [copy_after_the_event, read_without_waiting],
)
def test_an_order_that_is_not_kept_is_seen(
    fault: Callable[[pytest.MonkeyPatch], None],
    llama: LlamaForCausalLM,
    expected: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, device = lazy_engine(llama, monkeypatch)
    fault(monkeypatch)
    exit_policy, policy = policies()[0]
    with device:
        tokens = engine.generate(PROMPT, max_new_tokens=14, policy=policy).new_tokens
    assert (tokens, exit_policy.read) != expected["greedy"][0]
