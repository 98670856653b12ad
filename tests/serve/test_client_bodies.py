"""What well-known clients send, read and measure: each body is answered, or refused in one line that names the field.

`client_bodies.json` was recorded from the clients themselves. Only the bodies of Open WebUI, of vLLM's benchmarks, of aiperf,
of our own page, of what `parse()` returned, and of clients without a version were written by hand, after their sources.
refused: the field that is named. ignored: what the header of the answer names.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from layerskip_models import DEMO_PATH, load_tokenizer
from layerskip_models.checkpoints.loading import load_transformers
from running_server import RunningServer, ask, post, refusal
from selfspec import SelfSpecGenerator
from selfspec.detokenize import before_stop
from selfspec.serve.api_messages import Message, TextPart
from selfspec.serve.api_requests import ChatRequest, CompletionRequest, StreamOptions
from selfspec.serve.bodies import Strict

CONTEXTS = ["Tom has 3 apples", "def f(x):\n", "The sky is", "Tom has 3 apples and buys 4.\n" * 30, "a"]
CONTINUATIONS = [" and buys 4", "    return x + 1", " blue.", "Tom has", "\u00e9!"]


Scored = tuple[list[int], list[int], float, bool]
"""A context, its continuation, the log-likelihood by transformers' model, and whether that decodes it greedily."""


@pytest.fixture(scope="module")
def scored(offline: SelfSpecGenerator) -> list[Scored]:
    assert offline.tokenizer is not None
    reference = load_transformers(DEMO_PATH, dtype="float32", device="cpu")
    contexts = [offline.tokenizer(text)["input_ids"] for text in CONTEXTS]
    continuations = [offline.tokenizer(text)["input_ids"] for text in CONTINUATIONS]
    continuations[1] = offline.generate(torch.tensor(contexts[1]), max_new_tokens=4, eos_token_id=[]).new_tokens
    found = []
    for context, continuation in zip(contexts, continuations):
        with torch.no_grad():
            logprobs = reference(torch.tensor([context + continuation])).logits[0].log_softmax(dim=-1)
        rows, wanted = logprobs[len(context) - 1 : -1], torch.tensor(continuation)
        score = rows.gather(1, wanted[:, None]).sum().item()
        found.append((context, continuation, score, bool((rows.argmax(dim=1) == wanted).all())))
    return found


def answered(server: RunningServer, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    status, found = post(server, path, body)
    assert status == 200, found
    return found


@pytest.mark.parametrize("extra", [{}, {"cache_salt": "one"}, {"policy": "ls:3-4"}], ids=["", "cached", "exit"])
@pytest.mark.parametrize("together", [1, 5])
def test_log_likelihoods_are_the_models_own(
    server: RunningServer, scored: list[Scored], together: int, extra: dict[str, Any]
) -> None:
    """As lm-eval's `local-completions` asks for them, alone and in batches; also where a prompt was read before."""
    asked = {"model": "demo", "echo": True, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, **extra}
    for first in range(0, len(scored), together):
        part = scored[first : first + together]
        prompts = [context + continuation for context, continuation, _, _ in part]
        for (context, _, score, is_greedy), choice in zip(
            part, answered(server, {**asked, "prompt": prompts})["choices"]
        ):
            found, behind = choice["logprobs"], slice(len(context), -1)  # as lm-eval reads it: without the new token
            assert sum(found["token_logprobs"][behind]) == pytest.approx(score, abs=1e-4)
            pairs = zip(found["tokens"][behind], found["top_logprobs"][behind])
            assert all(token == max(likely, key=likely.get) for token, likely in pairs) == is_greedy
    assert [is_greedy for _, _, _, is_greedy in scored] == [False, True, False, False, False]


def test_timings_as_llama_cpp_names_them(server: RunningServer) -> None:
    chat = {"messages": [{"role": "user", "content": "Tom has 3 apples."}], "max_tokens": 24, "temperature": 0}
    chat["policy"] = "auto:cost=layers"  # which drafts on a busy machine as well
    for extra in ({}, {"cache_salt": "t"}, {"cache_salt": "t"}):
        answer = answered(server, {**chat, **extra}, "/v1/chat/completions")
        used, found = answer["usage"], answer["timings"]
        assert found["cache_n"] == used["prompt_tokens_details"]["cached_tokens"]
        assert found["prompt_n"] + found["cache_n"] == used["prompt_tokens"]
        assert found["predicted_n"] == used["completion_tokens"] == 24
        assert (found["draft_n"], found["draft_n_accepted"]) == (used["drafted"], used["accepted"])
        assert 0 < found["draft_n_accepted"] <= found["draft_n"]
        spec = answer["metrics"]["speculative_decoding"]  # as vLLM's documentation has it
        assert sum(spec["acceptance_histogram"]) == spec["num_spec_steps"] <= used["rounds"]
        accepted = sum(count * length for length, count in enumerate(spec["acceptance_histogram"]))
        assert accepted == spec["num_accepted_draft_tokens"] == used["accepted"]
        assert len(spec["acceptance_histogram"]) == spec["num_spec_tokens"] + 1
        assert spec["draft_acceptance_rate"] == accepted / used["drafted"] == accepted / spec["num_draft_tokens"]
        assert spec["mean_acceptance_length"] == 1 + accepted / spec["num_spec_steps"]
        assert found["prompt_per_second"] == pytest.approx(1000 * found["prompt_n"] / found["prompt_ms"])
        assert found["predicted_per_second"] == pytest.approx(1000 * 24 / found["predicted_ms"])
    assert found["cache_n"] > 0
    streamed = {**chat, "stream": True, "stream_options": {"include_usage": True}}
    _, raw, _ = ask(server, "POST", "/v1/chat/completions", streamed)
    chunks = [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: {")]
    assert [chunk for chunk in chunks if "timings" in chunk] == chunks[-1:]
    assert chunks[-1]["timings"]["predicted_n"] == 24 and "metrics" in chunks[-1]
    assert not {"timings", "metrics"} & answered(server, {**chat, "n": 2}, "/v1/chat/completions").keys()


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


BODIES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("client_bodies.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("sent", BODIES, ids=lambda sent: sent["client"])
def test_it_is_answered_or_refused_by_name(server: RunningServer, sent: dict[str, Any]) -> None:
    if "refused" in sent:
        error = refusal(server, sent["path"], sent["body"])
        assert error["param"] == sent["refused"]
        assert sent["refused"].split(".")[-1] in error["message"]
        return
    status, answer, headers = ask(server, "POST", sent["path"], sent["body"])
    assert status == 200, answer
    assert (headers["x-selfspec-ignored"] or "").split(", ") == sent.get("ignored", [""])
    if sent["body"].get("stream"):
        assert headers["content-type"].startswith("text/event-stream")
        assert answer.endswith(b"data: [DONE]\n\n")
        assert b'"error"' not in answer
    else:
        assert json.loads(answer)


REFUSED: list[dict[str, Any]] = json.loads(Path(__file__).with_name("refused_bodies.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("sent", REFUSED, ids=lambda sent: f"{sent['path']} {sent['refused']}")
def test_what_is_wrong_is_named(server: RunningServer, sent: dict[str, Any]) -> None:
    """In the client's own words. Also half a character, numbers that JSON does not have, and fields that no client knows."""
    error = refusal(server, sent["path"], sent["body"])
    assert (error["type"], error["param"]) == ("invalid_request_error", sent["refused"])
    assert sent.get("says", "") in error["message"]
    assert "new_tokens" not in error["message"] or sent["refused"] == "max_new_tokens"


def test_integers_and_limits_as_clients_write_them(server: RunningServer) -> None:
    body = {"prompt": "def f", "max_tokens": 4.0, "n": 2.0, "seed": 1.0, "top_k": 3.0, "top_p": 0, "temperature": 1}
    answer = answered(server, body)
    greedy = answered(server, {"prompt": "def f", "max_tokens": 4, "temperature": 0})
    assert [choice["text"] for choice in answer["choices"]] == 2 * [greedy["choices"][0]["text"]]
    assert refusal(server, "/v1/completions", {**body, "max_tokens": 4.5})["param"] == "max_tokens"
    unlimited = answered(server, {"prompt": [5] * 2000, "max_tokens": -1, "ignore_eos": True, "temperature": 0})
    assert unlimited["usage"]["total_tokens"] == 2048


def test_a_repetition_penalty_is_transformers_own(server: RunningServer, offline: SelfSpecGenerator) -> None:
    """By its own name, which lm-eval sends, and by llama.cpp's. It counts the prompt."""
    body = {"model": "demo", "prompt": [[774, 281]], "stop": ["\n\n"], "max_tokens": 12, "temperature": 0, "seed": 1234}
    options: Any = {"max_new_tokens": 12, "do_sample": False, "stop_strings": ["\n\n"]}
    for name in ("repetition_penalty", "repeat_penalty"):
        texts = []
        for penalty in (None, 1.8):
            texts.append(answered(server, {**body, name: penalty})["choices"][0]["text"])
            expected = offline.generate([774, 281], repetition_penalty=penalty, **options).text or ""
            assert texts[-1] == before_stop(expected, ["\n\n"])
        assert texts[0] != texts[1]


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, Message, StreamOptions, TextPart])
def test_the_page_tells_of_every_field(kind: type[Strict]) -> None:
    page = Path(__file__).parents[2].joinpath("docs", "serving.md").read_text(encoding="utf-8")
    fields = page[page.index("## Fields of a request") : page.index("## Tokens without a text")]
    known = {*kind.model_fields, *kind._harmless, *kind._neutral, *kind._reasons}
    missing = {name for name in known if f"`{name}`" not in fields and f"`{name}:" not in fields}
    assert missing <= {"model", "role", "content", "text", "type", "prompt", "name"}


ASKED: dict[str, Any] = {"role": "user", "content": "How many?"}
ANSWERED: list[Any] = [ASKED, {"role": "assistant", "content": "7"}]
POSTED = ("POST /v1/chat/completions", "POST /v1/completions", "POST /tokenize", "POST /detokenize")


def tokenize(server: RunningServer, **body: Any) -> dict[str, Any]:
    found = answered(server, body, "/tokenize")
    assert found["count"] == len(found["tokens"])
    return found


def detokenize(server: RunningServer, tokens: list[int]) -> str:
    return str(answered(server, {"tokens": tokens}, "/detokenize")["prompt"])


def test_a_text_and_back(server: RunningServer) -> None:
    tokenizer = load_tokenizer(DEMO_PATH)
    text = "Tom has 3 apples,\n\u00e4nd more \u2603"
    found = tokenize(server, prompt=text, model="demo", add_special_tokens=False, return_token_strs=True)
    assert found["tokens"] == tokenizer(text)["input_ids"]
    assert found["token_strs"] == tokenizer.convert_ids_to_tokens(found["tokens"])
    assert found["max_model_len"] == 2048
    assert detokenize(server, found["tokens"]) == text
    assert tokenize(server, prompt="") == {"count": 0, "max_model_len": 2048, "tokens": []}
    assert detokenize(server, []) == ""
    end = json.loads(ask(server, "GET", "/tokenizer_info")[1])["eos_token"]
    (token,) = tokenize(server, prompt=end)["tokens"]
    assert detokenize(server, [token]) == end


def test_messages_are_what_a_chat_reads(server: RunningServer) -> None:
    """With the fields that vLLM has, the parts of the template are there or not."""
    texts = {
        "Question: How many?\nAnswer:": {"messages": [ASKED]},
        "Question: How many?\n": {"messages": [ASKED], "add_generation_prompt": False},
        "Question: How many?\nAnswer: 7": {"messages": ANSWERED},
        "Question: How many?\nAnswer: 7\n\nAnswer:": {"messages": ANSWERED, "add_generation_prompt": True},
        "Question: How many?\nAnswer: 7\n\n": {"messages": ANSWERED, "add_generation_prompt": False},
    }
    for text, body in texts.items():
        assert tokenize(server, **body)["tokens"] == tokenize(server, prompt=text)["tokens"], body
    continued = {"messages": ANSWERED, "add_generation_prompt": False, "continue_final_message": True}
    assert tokenize(server, **continued) == tokenize(server, messages=ANSWERED)
    chat = {"model": "demo", "messages": [ASKED], "max_tokens": 1}
    used = answered(server, chat, "/v1/chat/completions")["usage"]
    assert used["prompt_tokens"] == tokenize(server, messages=[ASKED])["count"]


def test_tokens_that_are_none(server: RunningServer) -> None:
    assert refusal(server, "/detokenize", {"tokens": [1] * 4097})["param"] == "tokens"
    for field, long in (("prompt", "x " * 9000), ("messages", [{"role": "user", "content": "x " * 9000}])):
        error = refusal(server, "/tokenize", {field: long})
        assert (error["param"], error["code"]) == (field, "context_length_exceeded")
        assert "the prompt has more than 4096" in error["message"]
    error = refusal(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 3000}]})
    assert error["param"] == "messages" and "and the prompt has 3005: shorten it" in error["message"]
    assert refusal(server, "/detokenize", {"tokens": [1], "model": "other"}, 404)["param"] == "model"
    assert refusal(server, "/tokenize", {"prompt": "a", "model": "other"}, 404)["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/v1/responses/resp_1", "/v1/embeddings", "/chat/completions", "/v1/nothing"])
def test_other_routes_say_which_there_are(server: RunningServer, path: str) -> None:
    error = refusal(server, path, {}, 404)
    assert error["message"].startswith(f"there is no POST {path}; this server has ")
    assert error["type"] == "not_found_error"
    for route in (*POSTED, "GET /v1/models/{name}", "GET /tokenizer_info", "GET /health"):
        assert route in error["message"]


def test_other_methods(server: RunningServer) -> None:
    """HEAD is GET without the body; OPTIONS lets no other page in."""
    for path in ("/", "/v1/models", "/v1/models/demo", "/health", "/metrics", "/tokenizer_info", "/openapi.json"):
        status, body, headers = ask(server, "HEAD", path)
        assert (status, body) == (200, b""), path
        assert headers["content-type"] == ask(server, "GET", path)[2]["content-type"]
    assert ask(server, "HEAD", "/v1/models/other")[:2] == (404, b"")
    assert ask(server, "HEAD", "/v1/chat/completions")[:2] == (405, b"")
    for method in ("OPTIONS", "PUT", "DELETE", "GET"):
        status, body, headers = ask(server, method, "/v1/chat/completions", Origin="https://other.example")
        assert (status, headers["allow"]) == (405, "POST")
        assert f"there is no {method} /v1/chat/completions" in json.loads(body)["error"]["message"]
        assert not [name for name in headers if name.lower().startswith("access-control")]
