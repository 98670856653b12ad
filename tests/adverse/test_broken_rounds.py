"""An error ends a step somewhere in the middle, and the same engine goes on: all texts come out as without the error."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from batched_runs import (
    LAYOUTS,
    Course,
    Wish,
    assert_same,
    generator_of,
    needs_native,
    run_alone,
    run_together,
    shared_model,
)
from layerskip_models.kernels.native_forward import NativeForward
from layerskip_models.linear import Layout
from layerskip_models.model import LayerSkipModel
from selfspec import SelfSpecGenerator
from selfspec.engine.engine import Engine
from selfspec.engine.results import StepOutput
from selfspec.engine.sequence import Sequence
from tests.adverse.broken_rounds import Fault, trial

GREEDY = {"max_new_tokens": 14}
PACER = "pacer:random,exit_layer={E},b=2,t=0.3"


def cells(*policies: str) -> list[Any]:
    """Each policy in each layout; drafts in fewer bits need our kernels."""
    found = [(policy, layout) for policy in policies for layout in ("plain", "native")]
    found += [("bits:8-5", "native"), ("bits:4-2", "native")]
    return [pytest.param(*cell, marks=[needs_native] if "native" in cell else []) for cell in found]


def run(
    generator: SelfSpecGenerator,
    wishes: list[Wish],
    fault: Fault,
    broken: Callable[[Engine], object] = lambda engine: None,
) -> list[Course]:
    """As `run_together`, but steps may be broken off. broken: called then."""
    courses: dict[int, tuple[Course, Sequence]] = {}
    with generator.engine() as engine:
        for wish in wishes:
            ticket = engine.add(wish.prompt, **wish.arguments(generator.model))
            courses[ticket] = Course(), engine._slots[ticket].sequence
        for step in range(100):
            found: list[StepOutput] = []
            try:
                with fault.watched():
                    found = engine.step()
            except (KeyboardInterrupt, MemoryError):
                broken(engine)
            for progress in found:
                course, text = courses[progress.ticket]
                course.take(step, progress, text)
            if not len(engine):
                break
    return [course for course, _ in courses.values()]


@pytest.mark.parametrize(("policy", "layout"), cells("ls:{E}-5", PACER, "copy:3", "auto:cost=layers"))
def test_texts_are_the_same_wherever_a_step_is_broken_off(policy: str, layout: Layout) -> None:
    generator = generator_of(layout)
    texts = [
        Wish(prompt=[5, 1, 7, 5, 1, 7, 5], policy=policy, options=GREEDY),
        Wish(prompt=[2, 2, 8], policy="ls:{E}-4", options={"max_new_tokens": 10, "do_sample": True, "seed": 3}),
    ]
    alone = [run_alone(shared_model(layout), text) for text in texts]
    counting = Fault()
    run(generator, texts, counting)
    random = Random(policy)
    for _ in range(4):
        fault = Fault({random.randint(1, counting.events): KeyboardInterrupt for _ in range(2)})
        for found, expected in zip(run(generator, texts, fault), alone):
            assert_same(found, expected, rounds=False, exact=layout == "native")
        assert fault.places


@pytest.mark.parametrize(("policy", "layout"), cells("ls:{E}-5", "dv:{E}", PACER))
def test_no_memory_in_a_verification(policy: str, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts have written to the first layers by then. Nobody is blamed; the other text is cancelled to free memory."""
    generator = generator_of(layout)
    wish = Wish(prompt=[5, 1, 7], policy=policy, options={"max_new_tokens": 20})
    expected = run_alone(shared_model(layout), wish)
    full, errors = iter([False] * 4 + [True]), []

    def failing(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, x: Tensor, *arguments: Any, **options: Any) -> Any:
            verifies = shared_model(layout).num_layers in arguments  # or reads the prompt
            if verifies and next(full, False):
                raise MemoryError("no memory")
            return original(self, x, *arguments, **options)

        return run

    monkeypatch.setattr(NativeForward, "rows", failing(NativeForward.rows))
    monkeypatch.setattr(LayerSkipModel, "run_layers", failing(LayerSkipModel.run_layers))
    other = Wish(prompt=[3, 3], policy="ls:{E}-3", options={"max_new_tokens": 20})
    course, _ = run(generator, [wish, other], Fault(), lambda engine: errors.append(engine.cancel(2)))
    assert len(errors) == 1
    assert_same(course, expected, rounds=False, exact=layout == "native")


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_text_goes_on_from_rows_of_one_that_broke_off(layout: Layout) -> None:
    generator = generator_of(layout)
    wish = Wish(prompt=[5, 1, 7, 9, 4, 3], policy="ls:{E}-5", options=GREEDY)
    counting = Fault()
    run(generator, [wish], counting)
    begun: list[list[int]] = []

    def cancel(engine: Engine) -> None:
        text = engine._slots[1].sequence
        begun.append(text.tokens[0, : text.length].tolist())
        engine.cancel(1)

    for at in range(1, counting.events * 3 // 4, counting.events // 6):
        run(generator, [wish], Fault({at: KeyboardInterrupt}), cancel)
        later = Wish(prompt=[*begun[-1], 6], options=GREEDY)
        (found,) = run(generator, [later], Fault())
        assert_same(found, run_alone(shared_model(layout), later), exact=layout == "native")
    assert len({*map(len, begun)}) > 2


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
    outcomes = trial(5, 6)
    assert [outcome.problem for outcome in outcomes] == [None] * 6
    assert sum(len(outcome.places) for outcome in outcomes) >= 6
