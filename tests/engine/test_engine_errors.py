"""An error of one text is that text's alone, and one behind a row that gives no token counts only if the text comes to it."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, LogitsProcessorList, StoppingCriteriaList

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
from callbacks import Grammar, Spoiling, StopAt
from layerskip_models import from_transformers
from layerskip_models.linear import Layout
from policies import NeverStop, ObservationSpec, Plan, Policy
from scripted_policies import ScriptedExit, StopBelow, fixed
from selfspec import NonFiniteLogitsError, SelfSpecGenerator
from tiny_llama import reference_greedy, tiny_llama, tiny_tokenizer

PROMPT = [5, 1, 7]


EXIT_FAULTS = ("plan", "a wrong layer", "observe_prompt", "observe")
STOP_FAULTS = ("start_round", "threshold", "stop_before_draw", "stop_after_draw", "spent")
KINDS = (*EXIT_FAULTS, *STOP_FAULTS, "a criterion", "a processor", "at the first token", "NaN", "fewer scores")
CALL = {"observe_prompt": 1, "stop_before_draw": 8, "stop_after_draw": 8}
"""The call in which a method fails; of the others the third, most of which are called once a round."""


def faulty(parent: type, kind: str) -> type:
    """A subclass of an exit or stopping policy, of which one method fails."""
    method = "plan" if kind == "a wrong layer" else kind
    original, calls = getattr(parent, method), count(1)

    def fails(*arguments: Any) -> Any:
        if next(calls) != CALL.get(kind, 3):
            return original(*arguments)
        if kind == "a wrong layer":
            return Plan(exit_layer=4, max_speculations=3)
        raise ZeroDivisionError(f"a fault in {kind}")

    return type("Faulty", (parent,), {method: fails})


def with_fault(kind: str) -> dict[str, Any]:
    """Arguments of a call that fails some tokens into its text."""
    if kind in EXIT_FAULTS:
        observes = ObservationSpec(shadow_layers=(1, 2), prompt_rows=2)
        return {"policy": Policy(faulty(ScriptedExit, kind)([(2, 3)], observes))}
    if kind in STOP_FAULTS:
        return {"policy": Policy(ScriptedExit([(2, 3)]), faulty(NeverStop, kind)())}
    if kind == "a criterion":
        criterion = StopAt(9, ZeroDivisionError("a fault of a criterion"))
        return {"stopping_criteria": StoppingCriteriaList([criterion]), "policy": "ls:2-3"}
    processors = {"a processor": Spoiling(9), "at the first token": Spoiling(3), "NaN": Spoiling(9, "nan")}
    if kind == "fewer scores":  # which only judging sampled drafts notices
        fewer = LogitsProcessorList([Spoiling(9, "fewer")])
        return {"logits_processor": fewer, "policy": "ls:2-3", "do_sample": True, "seed": 4}
    return {"logits_processor": LogitsProcessorList([processors[kind]]), "policy": "ls:2-3"}


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


# Any two of a fault, a layout, and greedy or sampled meet in every run; all three in the slow one.
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
    others_errors = {"NaN": NonFiniteLogitsError, "a wrong layer": ValueError, "fewer scores": RuntimeError}
    wanted = others_errors.get(kind, ZeroDivisionError)
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


POLICIES = ("ar", "ls:3-20", "ls:1-4", "dv:3,start=0.0", "svip:3,threshold=9", "del", "spide:3,tau=0.01")
PAIRS = [  # as above
    pytest.param(policy, how, do_sample, marks=() if do_sample == (i + j) % 2 else pytest.mark.slow)
    for i, policy in enumerate(POLICIES)
    for j, how in enumerate(["masked", "nan", "raises", "infinite"])
    for do_sample in (False, True)
]


@pytest.fixture(scope="module")
def expected(llama64: LlamaForCausalLM) -> list[int]:
    return reference_greedy(llama64, PROMPT, max_new_tokens=25)


@pytest.mark.parametrize(("policy", "how", "do_sample"), PAIRS)
def test_rows_that_give_no_token(
    engine64: SelfSpecGenerator, llama64: LlamaForCausalLM, expected: list[int], policy: str, how: str, do_sample: bool
) -> None:
    """Behind a stop they break nothing; what the text comes to is judged as transformers judges it: greedily, inf wins."""
    options = {"policy": policy, "do_sample": do_sample, "seed": 7}
    spoiled: dict[str, Any] = {**options, "logits_processor": LogitsProcessorList([Spoiling(9, how)])}
    criteria = StoppingCriteriaList([StopAt(9)])
    result = engine64.generate(PROMPT, max_new_tokens=20, stopping_criteria=criteria, **spoiled)
    assert (len(result.new_tokens), result.stop_reason) == (6, "stopping_criteria")
    assert do_sample or result.new_tokens == expected[:6]
    assert len(engine64.generate(PROMPT, max_new_tokens=6, **spoiled).new_tokens) == 6
    assert (
        engine64.generate(PROMPT, max_new_tokens=12, policy=policy).new_tokens == expected[:12]
    )  # the next text is right
    if how in ("masked", "infinite") and not do_sample:
        processors = spoiled["logits_processor"]
        ids = torch.tensor([PROMPT])
        out: Any = llama64.generate(
            ids, max_new_tokens=20, do_sample=False, logits_processor=processors, attention_mask=torch.ones_like(ids),
            pad_token_id=0,
        )  # fmt: skip
        assert engine64.generate(PROMPT, max_new_tokens=20, **spoiled).new_tokens == out[0, 3:].tolist()
        return
    wanted = ZeroDivisionError if how == "raises" else NonFiniteLogitsError
    with pytest.raises(wanted, match="a fault of a processor" if how == "raises" else "at position 9"):
        engine64.generate(PROMPT, max_new_tokens=20, **spoiled)


def test_a_processor_may_refuse_what_was_only_drafted(engine64: SelfSpecGenerator, expected: list[int]) -> None:
    grammar = LogitsProcessorList([Grammar(len(PROMPT), expected)])
    rejected = 0
    for policy in ("ar", "ls:1-4", "ls:2-9", "del", "dv:1,start=0.0"):
        result = engine64.generate(PROMPT, max_new_tokens=25, policy=policy, logits_processor=grammar)
        assert result.new_tokens == expected
        rejected += result.stats.num_drafted - result.stats.num_accepted
    assert rejected > 5  # texts that it does refuse were there


def test_a_policy_is_not_shown_nan() -> None:
    seen: list[float | None] = []

    class Watch(StopBelow):
        def stop_before_draw(self, row: Any) -> bool:
            seen.append(row.confidence)
            return False

    broken = tiny_llama(dtype=torch.float64, late_scale=1.5, seed=5)
    with torch.no_grad():
        broken.model.embed_tokens.weight[:] = torch.nan
        broken.model.embed_tokens.weight[3] = 1.0
    engine = SelfSpecGenerator(from_transformers(broken, layout="plain"))
    with pytest.raises(NonFiniteLogitsError):
        engine.generate([3], max_new_tokens=25, policy=fixed(1, 4, Watch(0.5)))
    assert all(value == value for value in seen)
