"""What others' measuring clients read of an answer: log-likelihoods, llama.cpp's timings, vLLM's counters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from layerskip_models import DEMO_PATH
from layerskip_models.checkpoints.loading import load_transformers
from running_server import RunningServer, ask, running_server
from selfspec import SelfSpecGenerator

CONTEXTS = ["Tom has 3 apples", "def f(x):\n", "The sky is", "Tom has 3 apples and buys 4.\n" * 30, "a"]
CONTINUATIONS = [" and buys 4", "    return x + 1", " blue.", "Tom has", "\u00e9!"]


@pytest.fixture(scope="module")
def offline() -> SelfSpecGenerator:
    return SelfSpecGenerator.from_pretrained(DEMO_PATH)


@pytest.fixture(scope="module")
def server(offline: SelfSpecGenerator) -> Iterator[RunningServer]:
    with running_server(offline) as running:
        yield running


@dataclass(frozen=True)
class Scored:
    """A continuation of a context, its log-likelihood by transformers' model, and whether that decodes it greedily."""

    context: list[int]
    continuation: list[int]
    score: float
    is_greedy: bool


@pytest.fixture(scope="module")
def scored(offline: SelfSpecGenerator) -> list[Scored]:
    assert offline.tokenizer is not None
    reference = load_transformers(DEMO_PATH, dtype="float32", device="cpu")
    contexts = [offline.tokenizer(text)["input_ids"] for text in CONTEXTS]
    continuations = [offline.tokenizer(text)["input_ids"] for text in CONTINUATIONS]
    continuations[1] = offline.generate(torch.tensor(contexts[1]), max_new_tokens=4, eos_token_id=[]).new_tokens
    return [Scored(*pair, *directly(reference, *pair)) for pair in zip(contexts, continuations)]


def answered(server: RunningServer, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    status, raw, _ = ask(server, "POST", path, body)
    assert status == 200, raw
    found: dict[str, Any] = json.loads(raw)
    return found


def as_lm_eval_reads(choice: dict[str, Any], num_context: int) -> tuple[float, bool]:
    """The score of a continuation, and whether it is the greedy one: without the token that was generated."""
    found = choice["logprobs"]
    tokens, top = found["tokens"][num_context:-1], found["top_logprobs"][num_context:-1]
    return sum(found["token_logprobs"][num_context:-1]), all(
        token == max(likely, key=likely.get) for token, likely in zip(tokens, top)
    )


def directly(model: PreTrainedModel, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
    with torch.no_grad():
        logprobs = model(torch.tensor([[*context, *continuation]])).logits[0].log_softmax(dim=-1)
    rows, wanted = logprobs[len(context) - 1 : -1], torch.tensor(continuation)
    return rows.gather(1, wanted[:, None]).sum().item(), bool((rows.argmax(dim=1) == wanted).all())


@pytest.mark.parametrize("extra", [{}, {"cache_salt": "one"}, {"policy": "ls:3-4"}], ids=["", "cached", "exit"])
@pytest.mark.parametrize("together", [1, 5])
def test_log_likelihoods_are_the_models_own(
    server: RunningServer, scored: list[Scored], together: int, extra: dict[str, Any]
) -> None:
    """As lm-eval's `local-completions` asks for them, alone and in batches; also where a prompt was read before."""
    prompts = [one.context + one.continuation for one in scored]
    greedy = []
    for first in range(0, len(prompts), together):
        asked = {
            "prompt": prompts[first : first + together],
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
        }
        answer = answered(server, {"model": "demo", "echo": True, **asked, **extra})
        for choice in answer["choices"]:
            expected = scored[first + choice["index"]]
            score, is_greedy = as_lm_eval_reads(choice, len(expected.context))
            assert score == pytest.approx(expected.score, abs=1e-4)
            assert is_greedy == expected.is_greedy
            greedy.append(is_greedy)
    assert greedy == [False, True, False, False, False]


def test_timings_as_llama_cpp_names_them(server: RunningServer) -> None:
    chat = {"messages": [{"role": "user", "content": "Tom has 3 apples."}], "max_tokens": 24, "temperature": 0}
    for extra in ({}, {"cache_salt": "t"}, {"cache_salt": "t"}):
        answer = answered(server, {**chat, **extra}, "/v1/chat/completions")
        used, found = answer["usage"], answer["timings"]
        assert found["cache_n"] == used["prompt_tokens_details"]["cached_tokens"]
        assert found["prompt_n"] + found["cache_n"] == used["prompt_tokens"]
        assert found["predicted_n"] == used["completion_tokens"] == 24
        assert (found["draft_n"], found["draft_n_accepted"]) == (used["drafted"], used["accepted"])
        assert 0 < found["draft_n_accepted"] <= found["draft_n"]
        assert found["prompt_per_second"] == pytest.approx(1000 * found["prompt_n"] / found["prompt_ms"])
        assert found["predicted_per_second"] == pytest.approx(1000 * 24 / found["predicted_ms"])
    assert found["cache_n"] > 0
    streamed = {**chat, "stream": True, "stream_options": {"include_usage": True}}
    _, raw, _ = ask(server, "POST", "/v1/chat/completions", streamed)
    chunks = [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: {")]
    assert [chunk for chunk in chunks if "timings" in chunk] == chunks[-1:]
    assert chunks[-1]["timings"]["predicted_n"] == 24
    assert "timings" not in answered(server, {**chat, "n": 2}, "/v1/chat/completions")


def test_what_was_drafted_by_vllms_names(server: RunningServer) -> None:
    """As `vllm bench serve` and aiperf read it: the change of each counter, and 1 + accepted / drafts for the length."""

    def counted() -> dict[str, float]:
        _, raw, _ = ask(server, "GET", "/metrics")
        lines = re.findall(r"^vllm:spec_decode_(\w+)_total(?:\{(.*)\})? (\S+)$", raw.decode(), re.MULTILINE)
        return {name + labels: float(value) for name, labels, value in lines}

    before = counted()
    body = {"prompt": "def add(a, b):\n", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "policy": "ls:3-4"}
    used = answered(server, body)["usage"]
    grown = {name: value - before.get(name, 0.0) for name, value in counted().items()}
    assert grown["num_draft_tokens"] == used["drafted"] > 0
    assert grown["num_accepted_tokens"] == used["accepted"] > 0
    assert 0 < grown["num_drafts"] <= used["rounds"]
    places = [grown[f'num_accepted_tokens_per_posposition="{place}"'] for place in range(4)]
    assert sum(places) == used["accepted"] and places == sorted(places, reverse=True)
    assert 1 + used["accepted"] / grown["num_drafts"] <= 5
