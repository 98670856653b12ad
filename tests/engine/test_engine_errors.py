"""An error of one text is that text's alone: the others of its batch go on as if nothing had happened."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from batched_runs import (
    LAYOUTS,
    CacheCount,
    Course,
    Wish,
    assert_same,
    generator_of,
    needs_native,
    run_alone,
    run_together,
    shared_model,
)
from layerskip_models import from_transformers
from layerskip_models.linear import Layout
from policies import (
    Drafter,
    DraftRow,
    NeverStop,
    ObservationSpec,
    Plan,
    Policy,
    RoundContext,
    RoundRecord,
    ShadowTokens,
)
from scripted_policies import ScriptedExit
from selfspec import NonFiniteLogitsError, SelfSpecGenerator
from test_verification import From
from tiny_llama import tiny_llama, tiny_tokenizer

PROMPT = [5, 1, 7]


class Faulty(ScriptedExit):
    """Fails in one of an exit policy's methods, in its third round."""

    def __init__(self, where: str) -> None:
        super().__init__([(2, 3)], ObservationSpec(shadow_layers=(1, 2), prompt_rows=2))
        self.where = where

    def _fail(self, where: str, number: int = 2) -> None:
        if (where, number) == (self.where, 2):
            raise ZeroDivisionError(f"a fault in {where}")

    def plan(self, context: RoundContext) -> Plan:
        self._fail("plan", context.round_index)
        if self.where == "a wrong layer" and context.round_index == 2:
            return Plan(exit_layer=4, max_speculations=3)
        return super().plan(context)

    def observe_prompt(self, shadow: ShadowTokens) -> None:
        self._fail("observe_prompt")

    def observe(self, record: RoundRecord) -> None:
        self._fail("observe", record.index)


class FaultyStop(NeverStop):
    """Fails in one of a stopping policy's methods, in its third round and at its second row."""

    def __init__(self, where: str) -> None:
        self.where, self.round = where, -1

    def _fail(self, where: str) -> None:
        if where == self.where and self.round == 2:
            raise ZeroDivisionError(f"a fault in {where}")

    def start_round(self, plan: Plan) -> None:
        self.round += 1
        self._fail("start_round")

    def stop_before_draw(self, row: DraftRow) -> bool:
        if row.num_drafted == 1:
            self._fail("stop_before_draw")
        return False

    def stop_after_draw(self, row: DraftRow, token: int) -> bool:
        if row.num_drafted == 1:
            self._fail("stop_after_draw")
        return False

    def threshold(self, drafter: Drafter) -> None:
        self._fail("threshold")

    def spent(self) -> Any:
        self._fail("spent")
        return super().spent()


class Raising(LogitsProcessor):
    """A fault of its own, whatever the text is once it has some length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] >= self.length:
            raise ZeroDivisionError("a fault of a processor")
        return scores


class RaisingCriterion(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        if input_ids.shape[1] >= 9:
            raise ZeroDivisionError("a fault of a criterion")
        return False


EXIT_FAULTS = ("plan", "a wrong layer", "observe_prompt", "observe")
STOP_FAULTS = ("start_round", "threshold", "stop_before_draw", "stop_after_draw", "spent")


def with_fault(kind: str) -> dict[str, Any]:
    """Arguments of a call that fails some tokens into its text."""
    if kind in EXIT_FAULTS:
        return {"policy": Policy(Faulty(kind))}
    if kind in STOP_FAULTS:
        return {"policy": Policy(ScriptedExit([(2, 3)]), FaultyStop(kind))}
    if kind == "a criterion":
        return {"stopping_criteria": StoppingCriteriaList([RaisingCriterion()]), "policy": "ls:2-3"}
    processors = {"a processor": Raising(9), "at the first token": Raising(3), "NaN": From(9, "nan")}
    return {"logits_processor": LogitsProcessorList([processors[kind]]), "policy": "ls:2-3"}


KINDS = (*EXIT_FAULTS, *STOP_FAULTS, "a criterion", "a processor", "at the first token", "NaN")


OTHERS = (
    Wish(prompt=PROMPT, policy="ls:{E}-4"),
    Wish(prompt=[2, 2, 8, 1], policy="dv:{E}"),
    Wish(prompt=[11], policy="changing plans", joins=2),
)


def common_options(do_sample: bool) -> dict[str, Any]:
    return {"max_new_tokens": 20, "do_sample": do_sample, "seed": 4 if do_sample else None}


@cache
def others_alone(layout: Layout, do_sample: bool) -> list[Course]:
    model, options = shared_model(layout), common_options(do_sample)
    return [run_alone(model, replace(text, options=options)) for text in OTHERS]


# Any two of a fault, a layout, and greedy or sampled meet in every run; all three of them in the slow one.
@pytest.mark.parametrize(
    ("kind", "layout", "do_sample"),
    [
        pytest.param(kind, layout, do_sample, marks=[*marks, *([] if do_sample == (i + j) % 2 else [pytest.mark.slow])])
        for i, kind in enumerate(KINDS)
        for j, (layout, marks) in enumerate([("native", [needs_native]), ("plain", [])])
        for do_sample in (False, True)
    ],
)
def test_an_error_of_one_text_is_that_text_s_alone(
    kind: str, layout: Layout, do_sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have the same tokens by the same rounds, bit for bit on our kernels; caches are given back."""
    caches = CacheCount(monkeypatch)
    generator = generator_of(layout)
    common = common_options(do_sample)
    bad = Wish(prompt=PROMPT, options={**common, **with_fault(kind)})
    texts = [replace(text, options=common) for text in OTHERS]
    first, failed, *others = run_together(generator, [texts[0], bad, *texts[1:]])
    wanted = NonFiniteLogitsError if kind == "NaN" else ValueError if kind == "a wrong layer" else ZeroDivisionError
    assert isinstance(failed.error, wanted), failed.error
    assert failed.result is None
    assert caches.alive == 1  # the error keeps no function's variables, and so not the text
    assert sys.version_info < (3, 11) or kind == "NaN" or "Raised in" in failed.error.__notes__[0]
    for course, alone in zip([first, *others], others_alone(layout, do_sample)):
        assert_same(course, alone, exact=layout == "native")
        assert len(course.tokens) == 20
    failed_alone = run_together(generator_of(layout), [replace(bad, options={**common, **with_fault(kind)})])[0]
    assert isinstance(failed_alone.error, wanted)
    assert failed.tokens == failed_alone.tokens
    again = run_together(generator, texts[:1])[0]
    assert_same(again, first, exact=layout == "native")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_of_one_text_s_rows_is_that_text_s_alone(layout: Layout) -> None:
    """A token without an embedding: a text that comes to it fails there, and one that only drafts it goes on."""
    dtype = torch.float32 if layout == "native" else torch.float64
    llama = tiny_llama(heads=4, kv_heads=2, late_scale=0.9, dtype=dtype, seed=21)
    sound = from_transformers(llama, layout=layout)
    texts = [
        Wish(prompt=[number, 5], policy=policy, options={"max_new_tokens": 24})
        for number in range(4)
        for policy in ("ls:{E}-6", "ar", "stop before a draw")
    ]
    expected = [run_alone(sound, text) for text in texts]
    failures = drafted = 0
    for token in range(7, 24, 3):
        with torch.no_grad():
            llama.model.embed_tokens.weight[token], kept = torch.nan, llama.model.embed_tokens.weight[token].clone()
            model = from_transformers(llama, layout=layout)
            llama.model.embed_tokens.weight[token] = kept
        for part in (slice(0, 3), slice(3, None)):
            courses = run_together(SelfSpecGenerator(model, tiny_tokenizer()), texts[part])
            for course, own in zip(courses, expected[part]):
                assert own.result is not None and own.result.trace is not None
                if token in own.tokens[:-1]:
                    assert isinstance(course.error, NonFiniteLogitsError)
                    assert course.tokens == own.tokens[: own.tokens.index(token) + 1]
                    failures += 1
                else:
                    assert_same(course, own, rounds=False, exact=layout == "native")
                    drafted += any(token in record.draft_tokens for record in own.result.trace)
    assert min(failures, drafted) > 2


def test_an_error_of_what_all_need_ends_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory, say: nobody is blamed, and the engine can be closed."""
    generator = generator_of("plain")
    with generator.engine() as engine:
        for _ in range(2):
            engine.add(PROMPT, max_new_tokens=9, policy="ar")
        engine.step()
        engine.step()
        monkeypatch.setattr(type(generator.model), "run_layers", lambda *_: (_ for _ in ()).throw(MemoryError("full")))
        with pytest.raises(MemoryError, match="full"):
            engine.step()
        monkeypatch.undo()
    assert generator.generate(PROMPT, max_new_tokens=9, policy="ar").stats.num_new_tokens == 9
