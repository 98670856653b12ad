"""`generate_batch`: many prompts a few at a time, each with its own options, and each the text that it would be alone."""

from __future__ import annotations

import threading
from time import perf_counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    SequenceBiasLogitsProcessor,
    StoppingCriteriaList,
)

from batched_runs import generator_of
from callbacks import Spoiling, StopAt
from layerskip_models import from_transformers
from policies import parse_policy
from selfspec import BatchError, SelfSpecGenerator
from selfspec.batch import check_all
from selfspec.engine.engine import BoundRequest, Engine
from selfspec.engine.results import GenerationResult, StepOutput
from tiny_llama import reference_greedy, tiny_tokenizer

PROMPTS = [[5, 1, 7], [2], [9, 9, 3, 0, 23, 4, 4, 1], [*range(20)], [7, 7], [11, 3, 5]]
FEW = {"max_new_tokens": 12, "policy": "ls:2-3"}
LONGEST = 14


def texts(results: list[GenerationResult]) -> list[list[int]]:
    return [result.new_tokens for result in results]


@pytest.fixture(scope="module")
def references(llama64: LlamaForCausalLM) -> list[list[int]]:
    return [reference_greedy(llama64, prompt, max_new_tokens=LONGEST) for prompt in PROMPTS]


@given(chosen=st.lists(st.integers(0, len(PROMPTS) - 1), max_size=9), batch_size=st.integers(1, 12), data=st.data())
@settings(max_examples=25)
def test_never_more_than_the_batch_size_at_once(
    llama64: LlamaForCausalLM, references: list[list[int]], chosen: list[int], batch_size: int, data: st.DataObject
) -> None:
    """And as many as that while there are any left."""
    prompts = [PROMPTS[number] for number in chosen]
    lengths = [data.draw(st.integers(1, LONGEST)) for _ in prompts]
    generator = SelfSpecGenerator(from_transformers(llama64, layout="plain"), policy="ls:2-3")
    seen: list[tuple[int, int]] = []
    complete: list[int] = []
    step = Engine.step

    def counted(self: Engine) -> list[StepOutput]:
        seen.append((len(self), len(complete)))
        return step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", counted)
        found = generator.generate_batch(
            prompts, batch_size=batch_size, max_new_tokens=lengths, on_result=lambda index, _: complete.append(index)
        )
    assert texts(found) == [references[number][:length] for number, length in zip(chosen, lengths)]
    assert sorted(complete) == [*range(len(prompts))]
    assert all(at_once == min(batch_size, len(prompts) - done) for at_once, done in seen)


def test_breaking_off_in_on_result_ends_the_batch() -> None:
    generator = generator_of("plain")
    policy = parse_policy("dv:2", num_layers=4)
    came: list[int] = []

    def stop(index: int, result: GenerationResult) -> None:
        came.append(index)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generator.generate_batch(PROMPTS, max_new_tokens=[20, 3, 20, 20, 20, 20], policy=policy, on_result=stop)
    assert came == [1]
    before = policy.state()
    generator.generate([1], max_new_tokens=9, policy=policy)
    assert policy.state() != before  # it is free: nobody is using it any more


def biased(token: int) -> LogitsProcessorList:
    return LogitsProcessorList([SequenceBiasLogitsProcessor([[[token], 8.0]])])


PER_TEXT: dict[str, tuple[Any, list[Any]]] = {
    "max_new_tokens": (7, [1, 3, 20]),
    "do_sample": (True, [True, False, True]),
    "temperature": (0.5, [0.5, 1.0, 2.0]),
    "top_k": (4, [1, 3, 9]),
    "repetition_penalty": (1.3, [1.3, 0.8, 1.0]),
    "eos_token_id": ([9, 11, 23], [[9], [], [4, 5]]),
    "stop_strings": (["a", "b", "c"], [["a"], None, ["b", "cab"]]),
    "policy": ("dv:1", ["ar", "ls:1-2", parse_policy("dv:2", num_layers=4)]),
    "generation_config": (
        GenerationConfig(no_repeat_ngram_size=2),
        [GenerationConfig(no_repeat_ngram_size=2), None, GenerationConfig(suppress_tokens=[3])],
    ),
    "logits_processor": (biased(5), [biased(5), None, biased(9)]),
    "stopping_criteria": (StoppingCriteriaList([StopAt(9)]), [StoppingCriteriaList([StopAt(9)]), None, None]),
    "trace": (True, [True, False, True]),
}


def test_what_to_copy_from_for_all_and_for_each() -> None:
    """A list of texts, as text or token ids, is one value for all; a store, None, or a list of texts is one text's own."""
    generator = SelfSpecGenerator(generator_of("plain").model, tiny_tokenizer(), "copy:2")
    texts = [[5, 1, 7, 2, 9], [9, 9, 3, 4]]
    stores = [generator.copy_store([text]) for text in texts]
    given: list[tuple[Any, list[Any]]] = [
        (texts, [texts, texts]),
        (stores[0], [stores[0]] * 2),
        (stores, stores),
        ([None, stores[1]], [None, stores[1]]),
        ([[texts[0]], ["cabba"]], [[texts[0]], ["cabba"]]),
    ]
    for value, values in given:
        calls = check_all(generator.check, [[5, 1, 7], [2, 9]], {"copy_from": value, "max_new_tokens": 4})
        alone = [generator.check([2, 9], copy_from=one, max_new_tokens=4) for one in values]
        stored = [[one.request.copy_from for one in checked] for checked in (calls, alone)]
        assert len({tuple(None if one is None else len(one) for one in side) for side in stored}) == 1


@pytest.mark.parametrize("name", PER_TEXT)
def test_an_option_for_all_and_one_for_each(name: str, llama64: LlamaForCausalLM) -> None:
    """Of options that are lists themselves, a list of lists has one for each text; one list is for all."""
    generator = SelfSpecGenerator(from_transformers(llama64, layout="plain"), tiny_tokenizer())
    prompts = [[5, 1, 7], [2], [9, 9, 3]]
    common: dict[str, Any] = {"max_new_tokens": 15, "policy": "ls:2-3"}
    if name in ("temperature", "top_k", "do_sample"):
        common |= {"do_sample": True, "seed": 6}
    for_all, for_each = PER_TEXT[name]
    found = []
    for value_given, values in ((for_all, [for_all] * 3), (for_each, for_each)):
        together = generator.generate_batch(prompts, **{**common, name: value_given})
        alone = [generator.generate(prompt, **{**common, name: value}) for prompt, value in zip(prompts, values)]
        facts = [
            [(one.new_tokens, one.stop_reason, one.policy, one.trace is None) for one in results]
            for results in (together, alone)
        ]
        assert facts[0] == facts[1]
        found.append(facts[0])
    assert found[0] != found[1]


def test_seeds_and_generators() -> None:
    """A seed is each text's own; a generator that is given for all is used by all, in the order in which they draw."""
    generator = generator_of("plain")
    options = {"max_new_tokens": 15, "policy": "ls:2-3", "do_sample": True}
    same = generator.generate_batch([[5, 1, 7]] * 3, seed=4, **options)
    assert texts(same)[0] == texts(same)[1] == texts(same)[2]
    seeds = generator.generate_batch([[5, 1, 7]] * 3, seed=[4, 5, 4], **options)
    assert texts(seeds)[0] == texts(seeds)[2] == texts(same)[0] != texts(seeds)[1]
    own = [torch.Generator().manual_seed(seed) for seed in (4, 5, 4)]
    assert texts(generator.generate_batch([[5, 1, 7]] * 3, generator=own, **options)) == texts(seeds)
    sources = [torch.Generator().manual_seed(4) for _ in range(2)]
    one, again = (texts(generator.generate_batch([[5, 1, 7]] * 3, generator=source, **options)) for source in sources)
    assert one == again
    assert len({tuple(text) for text in one}) > 1


def test_prompts_of_every_kind() -> None:
    generator = generator_of("plain")
    prompts: list[Any] = ["a bed", [5, 1, 7], torch.tensor([2, 9]), torch.tensor([[2, 9]])]
    found = generator.generate_batch(prompts, **FEW)
    assert texts(found) == [generator.generate(prompt, **FEW).new_tokens for prompt in prompts]
    assert texts(generator.generate_batch(["a bed"], **FEW)) == texts(found)[:1]
    assert texts(generator.generate_batch(tuple(prompts[:2]), **FEW)) == texts(found)[:2]
    assert generator.generate_batch([], **FEW) == []


@pytest.mark.parametrize(
    ("prompts", "options", "error", "message"),
    [
        ("a bed", {}, TypeError, "takes a list of prompts"),
        (torch.tensor([[1, 2], [3, 4]]), {}, TypeError, "takes a list of prompts"),
        (PROMPTS[:3], {"seed": [1, 2]}, ValueError, "seed has 2 values for 3 prompts"),
        (PROMPTS[:3], {"policy": []}, ValueError, "policy has 0 values for 3 prompts"),
        (PROMPTS[:3], {"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ([[5], [], [3]], {}, ValueError, "text 1: "),
        ([[5], [3], [99]], {}, ValueError, "text 2: "),
        ([[5], 7.5], {}, (ValueError, TypeError), "text 1: "),
        ([[5], [3] * 80], {}, ValueError, "text 1: "),
        ([[5], [3]], {"max_new_tokens": [4, 0]}, ValueError, "text 1: .*max_new_tokens"),
        ([[5], [3]], {"max_new_tokn": 4}, TypeError, "no argument 'max_new_tokn': did you mean max_new_tokens?"),
        ([[5], [3]], {"streamer": None}, TypeError, "no argument 'streamer'(?!: did you mean streamer)"),
    ],
    ids=str,
)
def test_what_cannot_be_is_said_before_anything_runs(
    prompts: Any, options: dict[str, Any], error: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = SelfSpecGenerator(generator_of("plain").model, tiny_tokenizer(), "ls:2-3")
    monkeypatch.setattr(type(generator.model), "run_layers", lambda *_: pytest.fail("ran"))
    with pytest.raises(error, match=message):
        generator.generate_batch(prompts, **options)


def test_a_text_that_cannot_be_completed_leaves_the_others() -> None:
    """The error holds their results, and why there is none; callers hear of those that are complete."""
    generator = generator_of("plain")
    expected = generator.generate_batch(PROMPTS, **FEW)
    broken: list[Any] = [None] * 6
    broken[1], broken[4] = (LogitsProcessorList([Spoiling(length)]) for length in (1, 6))
    came: list[int] = []
    options: dict[str, Any] = {**FEW, "batch_size": 2, "on_result": lambda index, _: came.append(index)}
    with pytest.raises(BatchError, match=r"2 of 6 texts .* completed; text 1: a fault of a processor") as caught:
        generator.generate_batch(PROMPTS, logits_processor=broken, **options)
    error = caught.value
    assert [*error.errors] == [1, 4]
    assert all(isinstance(one, ZeroDivisionError) for one in error.errors.values())
    assert [result is None for result in error.results] == [False, True, False, False, True, False]
    assert sorted(came) == [0, 2, 3, 5]
    assert texts([error.results[index] for index in came]) == texts([expected[index] for index in came])
    with pytest.raises(BatchError, match="1 of 1 texts"):
        generator.generate_batch([[1, 2]], logits_processor=LogitsProcessorList([Spoiling(1)]), **FEW)
    policy = parse_policy("fs:2-3", num_layers=4)
    policy.stopping.lock = threading.Lock()  # type: ignore[union-attr]  # of which the second text cannot have a copy
    with pytest.raises(BatchError, match=r"1 of 3 texts.*text 1: policy 'fs:2-3' is in use") as caught:
        generator.generate_batch([[5], [6], [7]], max_new_tokens=9, policy=[policy, policy, "ar"])
    assert [result is None for result in caught.value.results] == [False, True, False]


def test_a_text_s_time_begins_when_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its time limit nor its seconds count how long it waited for others."""
    clock, ended, joined = [1000.0], [], []
    monkeypatch.setattr("time.time", lambda: clock[0])
    join = Engine.join

    def watched(engine: Engine, checked: BoundRequest, following: int = 0) -> int:
        joined.append(checked.started + checked.calibration_seconds)
        return join(engine, checked, following)

    def on_result(index: int, result: GenerationResult) -> None:
        clock[0] += 100
        ended.append(perf_counter())

    monkeypatch.setattr(Engine, "join", watched)
    limited = GenerationConfig(max_time=50, max_new_tokens=6)
    options: dict[str, Any] = {"batch_size": 1, "policy": "ar", "generation_config": limited, "on_result": on_result}
    results = generator_of("plain").generate_batch([[5, 1], [5, 2], [5, 3]], **options)
    assert [result.stop_reason for result in results] == ["length"] * 3
    assert all(start > end for start, end in zip(joined[1:], ended))
