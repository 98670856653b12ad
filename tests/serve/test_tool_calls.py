"""Tool calls over the whole path: OpenAI's client, a server, and a model whose logits spell given answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import BadRequestError, OpenAI

from running_server import RunningServer, ask, refusal, running_server
from scripted_model import END, scripted_generator, scripted_tokenizer
from selfspec.messages import OWN_TEMPLATE, PLAIN_TEMPLATE, ChatTemplate, encode_messages
from selfspec.serve.structured_output import Vocabulary
from selfspec.serve.tools import call_readers
from selfspec.serve.tools.call_readers import BareReader, CallReader, TagReader, Written
from selfspec.serve.tools.tool_formats import BEGIN, NoToolsError, ToolFormat, format_of
from selfspec.serve.tools.tool_grammar import call_grammar
from selfspec.serve.tools.tool_requests import Tool
from tool_templates import BARE, HIDDEN, OTHER, REVERSED, TAGS, tagged

BODIES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("tool_bodies.json").read_text(encoding="utf-8"))
WEATHER = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
ADD = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/digit"}, "b": {"$ref": "#/$defs/digit"}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"digit": {"enum": [1, 2]}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "add", "parameters": ADD, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
SCRIPTS = {
    "key: plain": "It is a fine day, and nothing is called.",
    "key: one": tagged("weather", city="Oslo"),
    "key: two": f"I look.\n{tagged('weather', city='Rome')}\n{tagged('add', a=1, b=2)}\n",
    "key: text behind": f"{tagged('now')}\nThat was it.",
    "key: broken": '<tool_call>\n{"name": "weather", "arguments": {"city": Oslo}}\n</tool_call> was broken.',
    "key: unknown": tagged("sing", song="la"),
    "key: unclosed": '<tool_call>\n{"name": "weather", "arg',
    "key: end inside": tagged("weather", city="a </tool_call> b"),
    "key: bare": '{"name": "weather", "parameters": {"city": "Rome"}}',
    "key: bare two": '{"name": "now", "parameters": {}}; {"name": "add", "parameters": {"a": 2, "b": 1}}',
    "key: bare broken": '{"name": "weather", "parameters": {"city": ',
    "key: bare json": '{"colour": "blue"}',
    "key: half": 'Let me see. <tool_call>{"name": "weather", "arguments": {"city": "x\\ud83dy"}}</tool_call>',
    "key: endless": '<tool_call>{"name": "weather", "arguments": {"city": 1e999}}</tool_call>',
    "key: open": tagged("weather", city="Bergen").removesuffix("\n</tool_call>"),
    "key: no arguments": '<tool_call>{"name": "now"}</tool_call>',
    "key: null": '<tool_call>{"name": "now", "arguments": null}</tool_call>',
    "key: think": f"<think>A <tool_call> is due.</think>\n\n{tagged('weather', city='Roma')}",
    "key: coder": '{"name": "weather", "arguments": {"city": "Lima"}}',
    "key: an object": '{"colours": "blue", "name": "now", "arguments": {}}',
    "key: names": '{"name": "now"}',
    "key: json": '{"r":1}',
    "key: told": "It rains in Oslo.",
}
GOLDEN: dict[str, tuple[str | None, list[tuple[str, dict[str, Any]]]]] = {
    "key: plain": (SCRIPTS["key: plain"], []),
    "key: one": (None, [("weather", {"city": "Oslo"})]),
    "key: two": ("I look.", [("weather", {"city": "Rome"}), ("add", {"a": 1, "b": 2})]),
    "key: text behind": ("That was it.", [("now", {})]),
    "key: broken": (SCRIPTS["key: broken"], []),
    "key: unknown": (SCRIPTS["key: unknown"], []),
    "key: unclosed": (SCRIPTS["key: unclosed"], []),
    "key: end inside": (None, [("weather", {"city": "a </tool_call> b"})]),
    "key: half": ("Let me see.", [("weather", {"city": "x\N{REPLACEMENT CHARACTER}y"})]),
    "key: endless": (SCRIPTS["key: endless"], []),
    "key: open": (None, [("weather", {"city": "Bergen"})]),
    "key: no arguments": (None, [("now", {})]),
    "key: null": (None, [("now", {})]),
    "key: think": ("<think>A <tool_call> is due.</think>", [("weather", {"city": "Roma"})]),
    "key: coder": (None, [("weather", {"city": "Lima"})]),
    "key: an object": (SCRIPTS["key: an object"], []),
    "key: names": (SCRIPTS["key: names"], []),
}
GOLDEN_BARE: dict[str, tuple[str | None, list[tuple[str, dict[str, Any]]]]] = {
    "key: plain": (SCRIPTS["key: plain"], []),
    "key: bare": (None, [("weather", {"city": "Rome"})]),
    "key: bare two": (None, [("now", {}), ("add", {"a": 2, "b": 1})]),
    "key: bare broken": (SCRIPTS["key: bare broken"], []),
    "key: bare json": (SCRIPTS["key: bare json"], []),
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """With tags that are one token each, as in Qwen's vocabulary."""
    generator = scripted_generator(SCRIPTS, TAGS, [BEGIN, "</tool_call>"])
    with running_server(generator, chat_template=None) as running:
        yield running


@pytest.fixture(scope="module")
def bare() -> Iterator[RunningServer]:
    with running_server(scripted_generator(SCRIPTS, BARE), chat_template=None) as running:
        yield running


def asked(key: str) -> list[Any]:
    return [{"role": "user", "content": key}]


def answered(client: OpenAI, key: str, **options: Any) -> tuple[str | None, list[tuple[str, dict[str, Any]]], str]:
    """Content, calls and reason, after a check that a stream has the same."""
    options = {"model": "demo", "messages": asked(key), "tools": TOOLS, "temperature": 0, "max_tokens": 200, **options}
    (choice,) = client.chat.completions.create(**options).choices
    calls = choice.message.tool_calls or []
    content, found, reason = "", dict[int, list[str]](), None
    for chunk in client.chat.completions.create(**options, stream=True):
        (part,) = chunk.choices
        content += part.delta.content or ""
        for call in part.delta.tool_calls or []:
            assert call.function is not None
            if call.index not in found:
                assert call.id and call.type == "function" and call.function.name
                found[call.index] = [call.function.name, ""]
            found[call.index][1] += call.function.arguments or ""
        reason = part.finish_reason or reason
    assert (content or None) == (choice.message.content or None)
    assert [*found] == [*range(len(calls))]
    assert [*found.values()] == [[call.function.name, call.function.arguments] for call in calls]
    assert reason == choice.finish_reason
    assert len({call.id for call in calls}) == len(calls)
    return choice.message.content, [(c.function.name, json.loads(c.function.arguments)) for c in calls], str(reason)


@pytest.mark.parametrize("key", GOLDEN)
def test_calls_are_found_and_the_rest_is_content(client: OpenAI, key: str) -> None:
    content, calls, reason = answered(client, key)
    assert (content, calls) == GOLDEN[key]
    assert reason == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize("key", GOLDEN_BARE)
def test_calls_that_are_bare_json(bare: RunningServer, key: str) -> None:
    with bare.client() as client:
        content, calls, reason = answered(client, key)
    assert (content, calls) == GOLDEN_BARE[key]
    assert reason == ("tool_calls" if calls else "stop")


def test_without_tools_a_call_is_text(client: OpenAI) -> None:
    for options in ({"tools": []}, {"tool_choice": "none"}):
        assert answered(client, "key: one", **options) == (SCRIPTS["key: one"], [], "stop")


def test_one_call_alone_if_asked(client: OpenAI) -> None:
    assert answered(client, "key: two", parallel_tool_calls=False)[1] == [("weather", {"city": "Rome"})]
    assert len(answered(client, "key: two", parallel_tool_calls=True)[1]) == 2


def test_one_call_alone_if_the_template_takes_no_more() -> None:
    """As Llama 3.1's: a second call would make the next turn fail."""
    single = BARE.replace(
        "<{{ message.role }}>", "{{ raise_exception('one') if message.tool_calls and message.tool_calls[1:] }}"
    )
    generator = scripted_generator({"key: bare two": SCRIPTS["key: bare two"]}, single)
    with running_server(generator, chat_template=None) as server, server.client() as client:
        assert answered(client, "key: bare two") == (None, [("now", {})], "tool_calls")


def test_an_answer_that_is_cut_is_content(client: OpenAI) -> None:
    content, calls, reason = answered(client, "key: one", max_tokens=3)
    assert calls == [] and reason == "length"
    assert content and SCRIPTS["key: one"].startswith(content)
    content, calls, reason = answered(client, "key: two", stop=["</tool_call>"])
    assert (calls, reason) == ([], "stop") and content == SCRIPTS["key: two"].partition("</tool_call>")[0]


def test_the_second_turn_reads_the_results(server: RunningServer, client: OpenAI) -> None:
    """The loop of every agent: the message as it came, one message for each call, and the answer."""
    options: dict[str, Any] = {"model": "demo", "tools": TOOLS, "temperature": 0}
    talk = asked("key: two")
    message = client.chat.completions.create(messages=talk, **options).choices[0].message
    talk.append(message.model_dump())
    for call in message.tool_calls or []:
        talk.append({"role": "tool", "tool_call_id": call.id, "content": f"result of {call.id}"})
    told = client.chat.completions.create(messages=talk, **options).choices[0]
    assert (told.message.content, told.message.tool_calls, told.finish_reason) == (SCRIPTS["key: told"], None, "stop")
    body = {"messages": talk, "tools": TOOLS}
    ids = json.loads(ask(server, "POST", "/tokenize", body)[1])["tokens"]
    read = json.loads(ask(server, "POST", "/detokenize", {"tokens": ids})[1])["prompt"]
    for call in message.tool_calls or []:
        assert f"result of {call.id}" in read
        assert f'{{"name": "{call.function.name}", "arguments": {call.function.arguments}}}' in read
    assert all(f'"name": "{tool["function"]["name"]}"' in read for tool in TOOLS)
    plain = json.loads(ask(server, "POST", "/tokenize", {"messages": talk})[1])["tokens"]
    assert len(plain) < len(ids)


FORCED = {"required": {"weather", "add", "now"}, "add": {"add"}, "weather": {"weather"}, "now": {"now"}}
WITH_ALL = ("required", "add")  # choices that each policy meets in every run; the others meet one


@pytest.mark.parametrize(
    ("policy", "choice"),
    [
        pytest.param(policy, choice, marks=() if policy == "ls:2-3" or choice in WITH_ALL else pytest.mark.slow)
        for policy in ("ls:2-3", "ar", "copy:4")
        for choice in FORCED
    ],
)
def test_a_forced_call_follows_its_schema(client: OpenAI, policy: str, choice: str) -> None:
    """Whatever the model would have said: it wants to talk of the weather."""
    wanted: Any = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    options = {"tool_choice": wanted, "extra_body": {"policy": policy}, "parallel_tool_calls": choice != "required"}
    content, calls, reason = answered(client, "key: plain", **options)
    assert (content, reason, len(calls)) == (None, "tool_calls", 1)
    ((name, arguments),) = calls
    assert name in FORCED[choice]
    if name == "add":
        assert set(arguments) == {"a", "b"} and {*arguments.values()} <= {1, 2}
    elif name == "weather":
        assert arguments["city"] in ("Oslo", "Rome")
    else:
        assert arguments == {}


def test_a_forced_call_of_a_model_that_writes_bare_json(bare: RunningServer) -> None:
    named: Any = {"type": "function", "function": {"name": "add"}}
    with bare.client() as client:
        assert answered(client, "key: plain", tool_choice=named)[1][0][0] == "add"
        assert len(answered(client, "key: bare two", tool_choice="required")[1]) == 1


@pytest.mark.parametrize("words", [(), (BEGIN, "</tool_call>"), (BEGIN,)])
@pytest.mark.parametrize("template", [TAGS, REVERSED, BARE])
def test_the_grammar_takes_calls_as_the_template_writes_them(template: str, words: tuple[str, ...]) -> None:
    """White space and order included, so that a model need not leave what it knows; with and without tokens for the tags."""
    tokenizer = scripted_tokenizer(template, words)
    vocabulary = Vocabulary(tokenizer, len(tokenizer), [int(tokenizer.convert_tokens_to_ids(END))])
    written, tools = format_of(tokenizer, OWN_TEMPLATE), [Tool.model_validate(tool) for tool in TOOLS]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    rendered = tokenizer.decode(
        encode_messages(
            [*asked("x"), {"role": "assistant", "content": "", "tool_calls": [call] * 2}, *asked("x")], tokenizer
        )
    )
    calls = rendered[rendered.index("{" if template is BARE else "<tool_call>") : rendered.index("<user>", 10)].strip()
    one = calls[: calls.index("}}") + 2] if template is BARE else calls[: len(calls) // 2]
    for text, several, fits in (
        (one, True, True),
        (one, False, True),
        (calls, True, template is not BARE),
        (calls, False, False),
    ):
        matcher = vocabulary.matcher(call_grammar(written, tools, several=several, special_id=vocabulary.special_id))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == fits, text
    for wrong in (one.replace("1", "3"), one.replace("add", "sing"), one.replace('"a"', '"c"'), f" {one}", one[:-3]):
        matcher = vocabulary.matcher(call_grammar(written, tools, several=True, special_id=vocabulary.special_id))
        ids = tokenizer(wrong, add_special_tokens=False)["input_ids"]
        assert not (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()), wrong


def test_a_call_or_an_answer_that_follows_a_schema(client: OpenAI, bare: RunningServer) -> None:
    schema = {"type": "object", "properties": {"r": {"enum": [1]}}, "required": ["r"], "additionalProperties": False}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "r", "schema": schema}}
    answer = json.dumps({"r": 1}, separators=(",", ":"))
    assert answered(client, "key: json", response_format=wanted) == (answer, [], "stop")
    tokenizer = scripted_tokenizer(TAGS, ())
    vocabulary = Vocabulary(tokenizer, len(tokenizer), [int(tokenizer.convert_tokens_to_ids(END))])
    grammar = call_grammar(
        format_of(tokenizer, OWN_TEMPLATE), [Tool.model_validate(TOOLS[2])], several=True, special_id=vocabulary.special_id,
        answer=schema,
    )  # fmt: skip
    for text, fits in (
        (answer, True),
        (tagged("now"), True),
        (tagged("now") * 2, True),
        (answer + tagged("now"), False),
        ("", False),
    ):
        ids, matcher = tokenizer(text, add_special_tokens=False)["input_ids"], vocabulary.matcher(grammar)
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == fits, text
    with bare.client() as other, pytest.raises(BadRequestError, match="no grammar"):
        answered(other, "key: bare", response_format=wanted)


def test_choices_of_one_request_have_their_own_calls(client: OpenAI) -> None:
    found = client.chat.completions.create(
        model="demo", messages=asked("key: two"), tools=TOOLS, n=3, temperature=0, logprobs=True
    )
    ids = set()
    for choice in found.choices:
        assert [call.function.name for call in choice.message.tool_calls or []] == ["weather", "add"]
        ids |= {call.id for call in choice.message.tool_calls or []}
        assert choice.logprobs is not None and choice.logprobs.content
    assert len(ids) == 6


@pytest.mark.parametrize("sent", BODIES, ids=lambda sent: sent["client"])
def test_what_agents_send_is_answered(server: RunningServer, sent: dict[str, Any]) -> None:
    """Recorded from agents of two libraries that ran their loops against this server: calls, results, answer.

    Those of Open WebUI were written after its source.
    """
    status, answer, headers = ask(server, "POST", "/v1/chat/completions", sent["body"])
    assert status == 200, answer
    assert (headers["x-selfspec-ignored"] or "strict") == "strict"
    if sent["body"].get("stream"):
        assert answer.endswith(b"data: [DONE]\n\n") and b'"error"' not in answer
    elif sent["body"]["messages"][-1]["role"] == "tool":
        assert json.loads(answer)["choices"][0]["message"]["content"] == SCRIPTS["key: told"]
    else:
        assert json.loads(answer)["choices"][0]["finish_reason"] in ("stop", "tool_calls")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another type": ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    "no name": ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
    "a name with a quote": ({"tools": [{"type": "function", "function": {"name": 'a"b'}}]}, "tools.0.function.name"),
    "twice": ({"tools": [TOOLS[2], TOOLS[2]]}, "tools"),
    "an unknown field": ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools.0.function.x"),
    "too many": ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
    "no object": ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools"),
    "a choice that is none": ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    "a choice of another kind": ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    "a choice of an unknown tool": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice",
    ),
    "a choice without tools": ({"tool_choice": "required"}, "tool_choice"),
    "no end": ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "tool_choice"),
    "a schema that cannot be used": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "?"}}}}}],
         "tool_choice": "required"}, "tools",
    ),
    "schemas that are too large together": (
        {"tools": [{"type": "function", "function": {"name": f"f{i}", "parameters": {"properties": {
            "a": {"enum": [f"{i} {j}" + "x" * 100 for j in range(400)]}}}}} for i in range(8)],
         "tool_choice": "required"}, "tools",
    ),
    "the old role": ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.role"),
    "calls of a user": (
        {"messages": [{"role": "user", "content": "x", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}]}, "messages.0.tool_calls",
    ),
    "a result of a user": ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages.0.tool_call_id"),
    "arguments that are none": (
        {"messages": [*asked("x"), {"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[1]"}}]}]},
        "messages.1.tool_calls.0.function.arguments",
    ),
    "calls without results": (
        {"messages": [*asked("x"), {"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}]}]}, "messages",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(server: RunningServer, case: str) -> None:
    fields, named = WRONG[case]
    error = refusal(server, "/v1/chat/completions", {"model": "demo", "messages": asked("key: one"), **fields})
    assert error["param"] == named, error


def test_a_model_without_tools_refuses_them_by_name() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "content": "x", "tool_call_id": "1"}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tools": TOOLS}, "tools"),
        ({"messages": [*asked("x"), {"role": "assistant", "tool_calls": [call]}, result]}, "messages.1.tool_calls"),
        ({"messages": [*asked("x"), result]}, "messages.1.role"),
    ]
    with running_server(scripted_generator({"key: x": "hello"}, TAGS)) as plain:  # with the plain template
        for fields, named in cases:
            error = refusal(plain, "/v1/chat/completions", {"model": "demo", "messages": asked("x"), **fields})
            assert (error["param"], error["code"]) == (named, "unsupported_parameter")
            assert "knows no tools" in error["message"] and named in error["message"]
        assert json.loads(ask(plain, "GET", "/v1/models")[1])["data"][0]["selfspec"]["tools"] is False
        body = {"model": "demo", "messages": asked("x"), "tools": TOOLS, "tool_choice": "none", "max_tokens": 2}
        assert ask(plain, "POST", "/v1/chat/completions", body)[0] == 200
        error = refusal(plain, "/v1/completions", {"model": "demo", "prompt": "x", "tools": TOOLS})
        assert error["param"] == "tools"


def test_a_template_that_hides_earlier_calls() -> None:
    """SmolLM3's is one: it tells of tools and of how to call them, but not what was called."""
    generator = scripted_generator({"key: one": SCRIPTS["key: one"]}, HIDDEN)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    with running_server(generator, chat_template=None) as server, server.client() as client:
        assert answered(client, "key: one")[:2] == GOLDEN["key: one"]
        talk = [*asked("x"), {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "x"}]
        error = refusal(server, "/v1/chat/completions", {"model": "demo", "messages": talk, "tools": TOOLS})
        assert error["param"] == "messages.1.tool_calls" and "leaves out calls" in error["message"]


def test_the_tokenizers_end_token_ends_an_answer() -> None:
    """Also where the generation configuration names another, as fine-tunes of base models have it."""
    generator = scripted_generator({"key: plain": SCRIPTS["key: plain"]}, TAGS)
    assert generator.tokenizer is not None
    end, other = (int(generator.tokenizer.convert_tokens_to_ids(one)) for one in (END, "a"))
    generator.model.generation_config.eos_token_id = other
    talk: dict[str, Any] = {"messages": asked("key: plain"), "temperature": 0, "max_tokens": 60}
    with running_server(generator, chat_template=None) as server:
        for more in ({}, {"ignore_eos": True, "stop": [END]}, {"ignore_eos": True, "stop_token_ids": [end]}):
            choice = json.loads(ask(server, "POST", "/v1/chat/completions", {**talk, **more})[1])["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == (SCRIPTS["key: plain"], "stop"), more


def test_templates_by_name() -> None:
    """As Hermes 2 Pro has them: "default" shows neither tools nor calls, "tool_use" both."""
    generator = scripted_generator({"key: one": SCRIPTS["key: one"], "key: told": SCRIPTS["key: told"]}, TAGS)
    assert generator.tokenizer is not None
    plain = _PLAIN.replace("{{ message.content }}", "{{ message.content or '' }}")
    generator.tokenizer.chat_template = {"default": plain, "tool_use": TAGS}  # type: ignore[assignment]
    with running_server(generator, chat_template=None) as server, server.client() as client:
        assert answered(client, "key: one")[:2] == GOLDEN["key: one"]
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        talk = [*asked("x"), {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "It rains."}]
        for tools in ({}, {"tools": TOOLS}):  # without them, too, a call and its result are shown
            ids = json.loads(ask(server, "POST", "/tokenize", {"messages": talk, **tools})[1])["tokens"]
            read = json.loads(ask(server, "POST", "/detokenize", {"tokens": ids})[1])["prompt"]
            assert '"arguments": {"a": 1}' in read and "It rains." in read
        info = json.loads(ask(server, "GET", "/tokenizer_info")[1])
        assert info["chat_template"] == plain


_PLAIN = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ messages[-1].content }}{% endif %}"
)


def test_transformers_own_parser_where_the_tokenizer_has_it() -> None:
    described: dict[str, Any] = {
        "start_anchor_pattern": "<assistant>key: [a-z]+",
        "defaults": {"role": "assistant"},
        "fields": {
            "content": {"content": "text", "close": "<|end|>"},
            "tool_calls": {
                "open": "CALL ", "close": "!", "repeats": True, "content": "json",
                "transform": {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.arguments}"}},
            },
        },
    }  # fmt: skip
    scripts = {
        "key: call": 'So. CALL {"name": "weather", "arguments": {"city": "Oslo"}}!',
        "key: bad": 'Well. CALL {"name": "weather", "argum!',
        "key: talk": "Nothing to call here.",
    }
    generator = scripted_generator(scripts, OTHER, response_template=described)
    with running_server(generator, chat_template=None) as server, server.client() as client:
        assert answered(client, "key: talk") == (scripts["key: talk"], [], "stop")
        content, calls, reason = answered(client, "key: call")
        assert (calls, reason) == ([("weather", {"city": "Oslo"})], "tool_calls")
        assert (content or "").strip() == "So."
        assert answered(client, "key: bad") == (scripts["key: bad"], [], "stop")
        with pytest.raises(BadRequestError, match="no grammar"):
            answered(client, "key: call", tool_choice="required")


class TestFormats:
    def test_the_template_says_how_calls_are_written(self) -> None:
        tokenizer = scripted_tokenizer(TAGS, ())

        def found(template: str) -> ToolFormat:
            tokenizer.chat_template = template
            return format_of(tokenizer, OWN_TEMPLATE)

        tags = ToolFormat(kind="tags", before="<tool_call>\n", after="\n</tool_call>", between="")
        assert found(TAGS) == tags
        assert found(REVERSED) == ToolFormat(
            kind="tags", keys=("arguments", "name"), before="<tool_call>\n", after="\n</tool_call>", between=""
        )
        assert found(BARE) == ToolFormat(kind="bare", keys=("name", "parameters"))
        assert found(HIDDEN) == ToolFormat(
            kind="tags", before="<tool_call>\n", after="\n</tool_call>", between="\n", shows_calls=False
        )
        with pytest.raises(NoToolsError, match="in a form that is not read"):
            found(OTHER)
        for template in (PLAIN_TEMPLATE, ChatTemplate("{{ raise_exception('no') }}")):
            with pytest.raises(NoToolsError, match="knows no tools"):
                format_of(tokenizer, template)
        tokenizer.chat_template = {"default": PLAIN_TEMPLATE.source, "tool_use": TAGS}  # type: ignore[assignment]
        assert format_of(tokenizer, OWN_TEMPLATE) == tags
        tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>"]})
        with pytest.raises(NoToolsError, match="special tokens"):
            found(TAGS)


NAMES = ["weather", "add", "now"]
PARTS = st.lists(
    st.sampled_from([
        "a", " ", "\n", "<", "<tool_", "call>", "</tool_call>", "<tool_call>", "{", '"', '{"name": "now", "arguments": {}}',
        tagged("now"), tagged("weather", city="x</tool_call>"), tagged("sing"), "; ",
        '{"name": "add", "parameters": {"a": 1}}',
        "<tool_call>[1]</tool_call>", "<tool_call></tool_call>", '<tool_call>{"name": "now", "arguments": NaN}</tool_call>',
    ]),
    max_size=8,
).map("".join)  # fmt: skip


@pytest.mark.parametrize(
    ("around", "content"),
    [("hi {} bye", "hi bye"), (" {} bye ", "bye"), ("hi\n{}\n", "hi"), ("a {} {} b", "a b"), ("{}x", "x")],
)
def test_words_around_a_call_stay_apart(around: str, content: str) -> None:
    call = call_readers.BEGIN + '{"name": "f", "arguments": {}}' + call_readers.END
    reader, text = TagReader(["f"]), around.replace("{}", call)
    written = reader.push(text)
    written.add(reader.finish())
    assert (written.content, len(written.calls)) == (content, around.count("{}"))


def test_an_end_inside_a_string_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a long call that repeats it takes a time that grows with the square of its length, on the event loop."""
    parsed, looks = call_readers._parsed, list[str]()
    monkeypatch.setattr(call_readers, "_parsed", lambda text: looks.append(text) or parsed(text))
    reader, written = TagReader(["f"]), Written()
    arguments = {"a": call_readers.END * 30}
    for character in BEGIN + json.dumps({"name": "f", "arguments": arguments}) + call_readers.END:
        written.add(reader.push(character))
    written.add(reader.finish())
    assert [json.loads(call.arguments) for call in written.calls] == [arguments]
    assert len(looks) == 31


@given(text=PARTS, cuts=st.lists(st.integers(0, 200), max_size=12), kind=st.sampled_from([TagReader, BareReader]))
def test_calls_do_not_depend_on_where_the_text_is_cut(text: str, cuts: list[int], kind: type[CallReader]) -> None:
    def read(pieces: list[str]) -> Written:
        reader, written = kind(NAMES), Written()
        for piece in pieces:
            written.add(reader.push(piece, ()))
        written.add(reader.finish())
        assert [call.index for call in written.calls] == [*range(reader.num_calls)]
        return written

    whole = read([text])
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    apart = read([text[start:end] for start, end in pairwise(places)])
    assert apart.content == whole.content
    assert [(c.name, c.arguments) for c in apart.calls] == [(c.name, c.arguments) for c in whole.calls]
    if not whole.calls:
        assert whole.content == text
    for call in whole.calls:
        assert call.name in NAMES and isinstance(json.loads(call.arguments), dict)
