"""`--answer-store`: later requests copy from earlier answers of the same store, key and user, and from nobody else's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from layerskip_models import DEMO_PATH
from running_server import RunningServer, ask, running_server
from selfspec import SelfSpecGenerator
from selfspec.cli.main import app
from selfspec.serve.serve_options import ServeOptions

CODE = "def fibonacci(n):\n"


@pytest.fixture(scope="module")
def demo() -> SelfSpecGenerator:
    return SelfSpecGenerator.from_pretrained(DEMO_PATH)


@pytest.fixture()
def server(demo: SelfSpecGenerator) -> Iterator[RunningServer]:
    with running_server(demo, answer_bytes=1 << 20, policy="copy:8") as running:
        yield running


def counts(server: RunningServer, key: str = "none", tokens: int = 40, **fields: Any) -> tuple[str, int]:
    """The text, and how many of its tokens were copied."""
    with server.client(key) as client:
        answer = client.completions.create(
            **{"model": "demo", "prompt": CODE, "max_tokens": tokens, "temperature": 0}, extra_body=fields
        )
    assert answer.usage is not None
    return answer.choices[0].text, (answer.usage.model_extra or {})["copied"]


def test_only_requests_of_the_same_store_key_and_user_copy(server: RunningServer, demo: SelfSpecGenerator) -> None:
    text, alone = counts(server)
    assert text == demo.generate(CODE, max_new_tokens=40, policy="ar").text
    assert counts(server, store="a") == (text, alone)  # the first of its store
    again, copied = counts(server, store="a")
    assert again == text and copied > alone + 5
    strangers: list[dict[str, Any]] = [
        {}, {"store": "b"}, {"store": "a", "user": "me"}, {"store": "a", "key": "other"}, {"store": True},
        {"user": "a"}, {"cache_salt": "a"}, {"store": "a "}, {"key": "a"},
    ]  # fmt: skip
    for stranger in strangers:
        assert counts(server, **stranger) == (text, alone), stranger
    assert counts(server, store="a") == (text, copied)  # what the others have said is not among its candidates either
    assert server.metric("answer_store_answers") == 3 + 4
    assert 0 < server.metric("answer_store_bytes") <= 1 << 20


def test_a_seed_repeats_a_text_whatever_was_answered_before(server: RunningServer) -> None:
    fields = {"seed": 3, "temperature": 1, "store": "a"}
    ask: dict[str, Any] = {"model": "demo", "prompt": CODE, "max_tokens": 40}
    with server.client() as client:
        first = client.completions.create(**ask, extra_body=fields)
        for _ in range(2):
            again = client.completions.create(**ask, extra_body=fields)
            assert again.choices[0].text == first.choices[0].text
            assert again.usage == first.usage


def test_the_bound_holds_and_the_oldest_go_first(demo: SelfSpecGenerator) -> None:
    most = 150_000  # two answers or three
    with running_server(demo, answer_bytes=most, policy="copy:8") as server:
        alone = counts(server, store="first")
        for name in "abcd":
            counts(server, store=name)
            assert server.metric("answer_store_bytes") <= most
        assert server.metric("answer_store_dropped_answers_total") == 5 - server.metric("answer_store_answers") > 0
        assert counts(server, store="d")[1] > alone[1]
        assert counts(server, store="first") == alone


def test_one_users_server_needs_no_name(demo: SelfSpecGenerator) -> None:
    with running_server(demo, answer_bytes=1 << 20, share_prefixes=True, policy="copy:8") as server:
        text, alone = counts(server)
        assert counts(server)[1] > alone
        assert counts(server, key="other") == (text, alone)


def test_chats_streams_and_policies_that_copy_nothing(server: RunningServer) -> None:
    """What a policy without copies answers is kept, too."""
    talk: list[Any] = [{"role": "user", "content": "Tom has 3 apples and buys 4."}]
    options: dict[str, Any] = {"model": "demo", "messages": talk, "max_tokens": 30, "temperature": 0}
    with server.client() as client:
        plain = client.chat.completions.create(**options, extra_body={"store": "c", "policy": "ar"})
        parts = client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}, extra_body={"store": "c"}
        )
        *texts, last = parts
    assert "".join(part.choices[0].delta.content or "" for part in texts) == plain.choices[0].message.content
    assert last.usage is not None and plain.usage is not None
    assert (last.usage.model_extra or {})["copied"] > 10
    assert (plain.usage.model_extra or {})["copied"] == 0


def test_what_has_no_effect_is_told_and_what_is_wrong_is_refused(
    server: RunningServer, demo: SelfSpecGenerator
) -> None:
    body = {"model": "demo", "prompt": CODE, "max_tokens": 2}
    for store, ignored in ((True, "store"), (False, "store"), ("a", None), ("", None), (None, None)):
        status, _, headers = ask(server, "POST", "/v1/completions", {**body, "store": store})
        assert (status, headers["x-selfspec-ignored"]) == (200, ignored)
    for wrong in (3, ["a"], "a" * 257):
        status, answer, _ = ask(server, "POST", "/v1/completions", {**body, "store": wrong})
        assert status == 400 and b'"param":"store"' in answer
    with running_server(demo) as plain:
        assert ask(plain, "POST", "/v1/completions", {**body, "store": "a"})[2]["x-selfspec-ignored"] == "store"


def test_the_option_is_a_size() -> None:
    assert ServeOptions(answer_store="64MB").settings(None, "127.0.0.1").answer_bytes == 64_000_000
    assert ServeOptions().settings(None, "127.0.0.1").answer_bytes is None
    with pytest.raises(ValueError, match="answer_store must be a number of bytes"):
        ServeOptions(answer_store="much").settings(None, "127.0.0.1")
    with pytest.raises(ValueError, match="answer_bytes must be at least 1"):
        ServeOptions(answer_store="0").settings(None, "127.0.0.1")


def test_a_chat_copies_from_conversations_before() -> None:
    arguments = ["chat", "--max-new-tokens", "16", "--policy", "copy:8"]
    typed = "Tom has 3 apples.\n/clear\nTom has 3 apples.\n/stats\n"
    result = CliRunner().invoke(app, [*arguments, "--answer-store", "1MB"], input=typed)
    plain = CliRunner().invoke(app, arguments, input=typed)
    assert (result.exit_code, result.stdout) == (0, plain.stdout)
    copied = [
        int(line.split("copied from earlier text: ")[1].split()[0].strip(",;"))
        if (line := next((line for line in one.stderr.splitlines() if "copied from earlier text" in line), ""))
        else 0
        for one in (result, plain)
    ]
    assert copied[0] > copied[1]
    wrong = CliRunner().invoke(app, [*arguments, "--answer-store", "x"], input=typed)
    assert wrong.exit_code == 2 and "answer_store must be" in wrong.stderr
