"""/tokenize, /detokenize and /tokenizer_info, and what a server says of routes that it has not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from layerskip_models import DEMO_PATH, load_tokenizer
from running_server import RunningServer, ask, refusal, running_server
from selfspec import SelfSpecGenerator

ASKED: dict[str, Any] = {"role": "user", "content": "How many?"}
ANSWERED: list[Any] = [ASKED, {"role": "assistant", "content": "7"}]
POSTED = ("POST /v1/chat/completions", "POST /v1/completions", "POST /tokenize", "POST /detokenize")


@pytest.fixture(scope="module")
def generator() -> SelfSpecGenerator:
    return SelfSpecGenerator.from_pretrained(DEMO_PATH)


@pytest.fixture(scope="module")
def server(generator: SelfSpecGenerator) -> Iterator[RunningServer]:
    with running_server(generator) as running:
        yield running


def tokenize(server: RunningServer, **body: Any) -> dict[str, Any]:
    status, answer, _ = ask(server, "POST", "/tokenize", body)
    found: dict[str, Any] = json.loads(answer)
    assert status == 200, found
    assert found["count"] == len(found["tokens"])
    return found


def test_a_text_and_back(server: RunningServer) -> None:
    tokenizer = load_tokenizer(DEMO_PATH)
    text = "Tom has 3 apples,\n\u00e4nd more \u2603"
    found = tokenize(server, prompt=text, model="demo", add_special_tokens=False, return_token_strs=True)
    assert found["tokens"] == tokenizer(text)["input_ids"]
    assert found["token_strs"] == tokenizer.convert_ids_to_tokens(found["tokens"])
    assert found["max_model_len"] == 2048
    assert json.loads(ask(server, "POST", "/detokenize", {"tokens": found["tokens"]})[1]) == {"prompt": text}
    assert tokenize(server, prompt="") == {"count": 0, "max_model_len": 2048, "tokens": []}
    assert json.loads(ask(server, "POST", "/detokenize", {"tokens": []})[1]) == {"prompt": ""}
    end = json.loads(ask(server, "GET", "/tokenizer_info")[1])["eos_token"]
    (token,) = tokenize(server, prompt=end)["tokens"]
    assert json.loads(ask(server, "POST", "/detokenize", {"tokens": [token]})[1]) == {"prompt": end}


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
    used = json.loads(ask(server, "POST", "/v1/chat/completions", chat)[1])["usage"]
    assert used["prompt_tokens"] == tokenize(server, messages=[ASKED])["count"]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [ASKED]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": [ASKED], "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": [ASKED], "continue_final_message": True}, "continue_final_message"),
        (
            {"messages": ANSWERED, "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
        ),
        ({"messages": [ASKED], "chat_template": "{{ messages }}"}, "chat_template"),
        ({"messages": [ASKED], "tools": [{}]}, "tools.0.type"),
        ({"messages": [ASKED], "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),  # its template
        ({"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"prompt": "x " * 9000}, "prompt"),
        ({"messages": [{"role": "user", "content": "x " * 9000}]}, "messages"),
    ],
)
def test_what_cannot_be_tokenized(server: RunningServer, body: dict[str, Any], named: str) -> None:
    assert refusal(server, "/tokenize", body)["param"] == named


def test_tokens_that_are_none(server: RunningServer) -> None:
    wrong: list[Any] = [[4096], [-1], ["a"], "a", None, [1] * 4097, [True]]
    for tokens in wrong:
        param = refusal(server, "/detokenize", {"tokens": tokens})["param"]
        assert param.startswith("tokens"), tokens
    assert refusal(server, "/detokenize", {"tokens": [1], "model": "other"}, 404)["param"] == "model"
    assert refusal(server, "/tokenize", {"prompt": "a", "model": "other"}, 404)["code"] == "model_not_found"


def test_long_bodies_are_worked_on_in_another_thread(server: RunningServer) -> None:
    """A text of 16 kB and one of 130 kB take other ways than a short one, and may not."""
    for length in (20_000, 140_000):
        error = refusal(server, "/tokenize", {"prompt": "x " * (length // 2)})
        assert error["code"] == "context_length_exceeded"
        assert "more than 4096" in error["message"]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/embeddings", "/chat/completions", "/v1/nothing"])
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


def test_a_key_is_needed(generator: SelfSpecGenerator) -> None:
    with running_server(generator, api_key="secret") as server:
        for method, path in (("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/tokenizer_info")):
            assert ask(server, method, path, {})[0] == 401
        assert ask(server, "GET", "/tokenizer_info", Authorization="Bearer secret")[0] == 200


def test_a_template_that_fails_is_named(generator: SelfSpecGenerator) -> None:
    """A template is a program of a stranger: whatever ends it, the request gets status 400."""
    sources = {
        "ZeroDivisionError": "{{ 1 / 0 }}",
        "MemoryError": "{{ 'x' * 2 ** 62 }}",
    }
    for kind, source in sources.items():
        with running_server(generator, chat_template=source) as server:
            for path in ("/v1/chat/completions", "/tokenize"):
                error = refusal(server, path, {"model": "demo", "messages": [ASKED]})
                assert error["param"] == "messages"
                assert f"the chat template fails on these messages ({kind}" in error["message"]
