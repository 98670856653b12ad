"""An error ends a step somewhere in the middle, and the same engine goes on: all texts come out as without the error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from batched_runs import LAYOUTS, Wish, assert_same, generator_of, run_alone, run_together, shared_model
from layerskip_models.linear import Layout
from tests.adverse.broken_rounds import trial

GREEDY = {"max_new_tokens": 14}


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


class Narrow(LogitsProcessor):
    """Forgets some of the vocabulary at every second token, once the text is long enough."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores[:, :5] if input_ids.shape[1] > 9 and input_ids.shape[1] % 2 else scores


@pytest.mark.parametrize("layout", LAYOUTS)
def test_faults_in_judging_are_one_text_s_alone(layout: Layout) -> None:
    sampled = {"do_sample": True, "seed": 1, "logits_processor": LogitsProcessorList([Narrow()])}
    others = [
        Wish(prompt=[2, 2, 8, 1], policy="ls:{E}-4", options=GREEDY),
        Wish(prompt=[5, 1, 7] * 4, policy="copy:3", options=GREEDY),
    ]
    wrong = Wish(prompt=[5, 1, 7], policy="ls:{E}-4", options={**GREEDY, **sampled})
    failed, *found = run_together(generator_of(layout), [wrong, *others])
    assert failed.error is not None
    for course, one in zip(found, others):
        assert_same(course, run_alone(shared_model(layout), one), exact=layout == "native")


def test_generated_companies() -> None:
    """KeyboardInterrupt, MemoryError and RuntimeError in 60 places, by every kind of policy."""
    outcomes = trial(5, 40)
    assert [outcome.problem for outcome in outcomes] == [None] * 40
    assert sum(len(outcome.places) for outcome in outcomes) >= 50
