"""`for piece in generator.stream(...)`: the same text in pieces, and an end whenever the reader wants one."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from layerskip_models import from_transformers
from selfspec import SelfSpecGenerator
from selfspec.engine.policy_store import lend
from tiny_llama import tiny_llama, tiny_tokenizer

PROMPT = [5, 1, 7]


@pytest.fixture
def engine() -> SelfSpecGenerator:
    return SelfSpecGenerator(from_transformers(tiny_llama(seed=3), layout="plain"), policy="ls:2-4")


@pytest.fixture
def speaking() -> SelfSpecGenerator:
    return SelfSpecGenerator(from_transformers(tiny_llama(seed=3), layout="plain"), tiny_tokenizer(), policy="ls:2-4")


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 3}, {"max_new_tokens": 1}, {"policy": "ar"}])
def test_pieces_add_up_to_what_generate_returns(
    options: dict[str, Any], engine: SelfSpecGenerator, speaking: SelfSpecGenerator
) -> None:
    options = {"max_new_tokens": 25, **options}
    expected = speaking.generate(PROMPT, **options)
    stream = engine.stream(PROMPT, **options)
    ids = list(stream)
    assert [token for piece in ids for token in piece] == expected.new_tokens
    texts = list(speaking.stream(PROMPT, **options))
    assert all(ids) and all(texts)
    assert "".join(map(str, texts)) == expected.text
    assert stream.result is not None
    assert stream.result.new_tokens == expected.new_tokens
    assert stream.result.stop_reason == "length"
    assert list(stream) == []


def test_arguments_are_checked_before_anything_is_read(engine: SelfSpecGenerator) -> None:
    with pytest.raises(ValueError, match="max_new_tokens"):
        engine.stream(PROMPT, max_new_tokens=0)
    with pytest.raises(TypeError, match="takes no streamer"):
        engine.stream(PROMPT, streamer=None)
    for name in ("max_tokens", "options", "prompts"):
        with pytest.raises(TypeError, match=f"no argument '{name}'"):
            engine.stream(PROMPT, **{name: None})


class Counting(StoppingCriteria):
    """Counts the committed tokens, and never stops."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        self.seen += 1
        return False


@pytest.mark.parametrize("way", ["break", "exception", "close", "with"])
def test_leaving_early_ends_the_generation(way: str, engine: SelfSpecGenerator) -> None:
    """Nothing runs behind what was read; the runner, and the policy itself, serve the next call."""
    full = engine.generate(PROMPT, max_new_tokens=50)
    counting = Counting()
    options: dict[str, Any] = {"max_new_tokens": 50, "stopping_criteria": StoppingCriteriaList([counting])}
    read: list[int] = []

    def reading(stream: Any) -> None:
        for piece in stream:
            read.extend(piece)
            if len(read) > 8:
                if way == "exception":
                    raise KeyError
                return

    if way == "exception":
        with pytest.raises(KeyError):
            reading(engine.stream(PROMPT, **options))
    elif way == "with":
        with engine.stream(PROMPT, **options) as stream:
            reading(stream)
    else:
        stream = engine.stream(PROMPT, **options)
        reading(stream)
        if way == "close":
            stream.close()
        assert stream.result is None
        del stream
    gc.collect()
    assert read == full.new_tokens[: len(read)]
    assert counting.seen == len(read) < 50
    (idle,) = engine._models.current.pool._idle
    assert engine.generate(PROMPT, max_new_tokens=50).new_tokens == full.new_tokens
    assert [*engine._models.current.pool._idle] == [idle]


def test_a_stream_that_is_kept_has_its_policy_until_it_is_closed(engine: SelfSpecGenerator) -> None:
    policy = engine.policy
    with engine.stream(PROMPT, max_new_tokens=50) as stream:
        for _ in stream:
            break
        with lend(policy) as loan:
            assert loan.policy is not policy
    for _ in stream:
        pytest.fail("a closed stream has no pieces")
    with lend(policy) as loan:
        assert loan.policy is policy


def test_what_is_between_pieces_runs_in_the_callers_mode(engine: SelfSpecGenerator) -> None:
    """A loop may train on what it reads, and make calls of its own."""
    expected = engine.generate(PROMPT, max_new_tokens=25).new_tokens
    found: list[int] = []
    for piece in engine.stream(PROMPT, max_new_tokens=25):
        found += piece
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        assert engine.generate(PROMPT, max_new_tokens=25).new_tokens == expected
    assert found == expected


def test_two_streams_take_turns(engine: SelfSpecGenerator) -> None:
    expected = [engine.generate(prompt, max_new_tokens=25).new_tokens for prompt in (PROMPT, [9, 2])]
    streams = [engine.stream(prompt, max_new_tokens=25) for prompt in (PROMPT, [9, 2])]
    found: list[list[int]] = [[], []]
    for _ in range(25):
        for text, stream in zip(found, streams):
            text += next(stream, [])
    assert found == expected


def test_an_error_in_a_round_ends_the_stream(engine: SelfSpecGenerator) -> None:
    class Failing(Counting):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
            if input_ids.shape[1] == 9:
                raise KeyError("a criterion's own fault")
            return False

    stream = engine.stream(PROMPT, max_new_tokens=25, stopping_criteria=StoppingCriteriaList([Failing()]))
    with pytest.raises(KeyError, match="own fault"):
        list(stream)
    assert list(stream) == []
    assert stream.result is None
