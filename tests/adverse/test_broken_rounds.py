"""An error ends a step somewhere in the middle, and the same engine goes on: all texts come out as without the error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from batched_runs import LAYOUTS, Wish, assert_same, generator_of, run_alone, run_together, shared_model
from layerskip_models.linear import Layout
from layerskip_models.model import LayerSkipModel
from tests.adverse.broken_rounds import trial

GREEDY = {"max_new_tokens": 14}


def test_a_result_that_a_broken_step_had_made_comes_with_the_next_one() -> None:
    """The second text's criterion breaks the step off when the first text is complete already."""

    class Interrupt(StoppingCriteria):
        calls = 0

        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
            self.calls += 1
            if self.calls == 3:
                raise KeyboardInterrupt
            return False

    generator = generator_of("plain")
    with generator.engine() as engine:
        first = engine.add([5, 1], max_new_tokens=3, policy="ar")
        second = engine.add(
            [5, 2], max_new_tokens=5, policy="ar", stopping_criteria=StoppingCriteriaList([Interrupt()])
        )
        engine.step()
        engine.step()
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert len(engine) == 2
        found = engine.step()
        assert [progress.ticket for progress in found] == [first, second]
        assert found[0].result is not None
        assert found[0].result.new_tokens == generator.generate([5, 1], max_new_tokens=3, policy="ar").new_tokens
        assert len(engine) == 1


def test_no_memory_in_a_verification_is_no_text_s_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts have written to the first layers by then. The step raises it, and the text goes on as without it."""
    generator, run_layers = generator_of("plain"), LayerSkipModel.run_layers
    call: dict[str, Any] = {"prompt": [5, 1, 7], "max_new_tokens": 20, "policy": "ls:2-5"}
    expected, full = generator.generate(**call).new_tokens, iter([False] * 4 + [True])

    def failing(model: LayerSkipModel, hidden: Tensor, start: int, stop: int, *rest: Any) -> Tensor:
        if stop == 4 and next(full, False):
            raise MemoryError("no memory")
        return run_layers(model, hidden, start, stop, *rest)

    monkeypatch.setattr(LayerSkipModel, "run_layers", failing)
    with generator.engine() as engine:
        engine.add(**call)
        found = [engine.step() for _ in range(4)]
        with pytest.raises(MemoryError):
            engine.step()
        while len(engine):
            found.append(engine.step())
    assert [token for step in found for progress in step for token in progress.tokens] == expected


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
