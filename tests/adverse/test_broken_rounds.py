"""An error ends a step somewhere in the middle, and the same engine goes on: all texts come out as without the error."""

from __future__ import annotations

import torch

from batched_runs import generator_of
from tests.adverse.broken_rounds import trial


def test_a_caller_s_own_generator_is_not_set_back() -> None:
    """Others may have drawn from it since."""
    source = torch.Generator().manual_seed(0)
    generator = generator_of("plain")
    with generator.engine() as engine:
        engine.add([5, 1], max_new_tokens=9, policy="ls:2-3", do_sample=True, generator=source)
        engine.step()
        engine._slots[1].sequence.plan(1)  # a round that goes no further
        torch.rand(3, generator=source)
        state = source.get_state()
        engine._slots[1].sequence.plan(1)
        assert torch.equal(source.get_state(), state)


def test_generated_companies() -> None:
    """KeyboardInterrupt, MemoryError and RuntimeError in 60 places, by every kind of policy."""
    outcomes = trial(5, 40)
    assert [outcome.problem for outcome in outcomes] == [None] * 40
    assert sum(len(outcome.places) for outcome in outcomes) >= 50
