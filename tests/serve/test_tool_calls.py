"""Tool calls over the whole path: OpenAI's client, a server, and a model whose logits spell given answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import BadRequestError, OpenAI
from transformers import PreTrainedTokenizerBase

from running_server import RunningServer, ask, refusal, running_server
from scripted_model import END, scripted_generator, scripted_tokenizer
from selfspec.messages import OWN_TEMPLATE, PLAIN_TEMPLATE, ChatTemplate, encode_messages
from selfspec.serve import tool_calls
from selfspec.serve.api_messages import Tool
from selfspec.serve.model_tools import NoToolsError, ToolFormat, call_grammar, format_of
from selfspec.serve.structured_output import Vocabulary
from selfspec.serve.tool_calls import BEGIN, BareReader, CallReader, TagReader
from tool_templates import (
    BARE,
    GOLDEN,
    GOLDEN_BARE,
    HIDDEN,
    OTHER,
    SCRIPTS,
    SINGLE,
    TAGS,
    TOOLS,
    answered,
    asked,
    tagged,
)

BODIES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("tool_bodies.json").read_text(encoding="utf-8"))


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


WANTED: list[tuple[str, dict[str, Any], tuple[Any, Any]]] = [
    *((key, {}, found) for key, found in GOLDEN.items()),
    ("key: one", {"tools": []}, (SCRIPTS["key: one"], [])),
    ("key: one", {"tool_choice": "none"}, (SCRIPTS["key: one"], [])),
    ("key: two", {"parallel_tool_calls": True}, GOLDEN["key: two"]),
    ("key: two", {"parallel_tool_calls": False}, ("I look.", [("weather", {"city": "Rome"})])),
    ("key: two", {"stop": ["</tool_call>"]}, (SCRIPTS["key: two"].partition("</tool_call>")[0], [])),
]


@pytest.mark.parametrize(("key", "options", "expected"), WANTED)
def test_calls_are_found_and_the_rest_is_content(
    client: OpenAI, key: str, options: dict[str, Any], expected: tuple[Any, Any]
) -> None:
    assert answered(client, key, **options) == (*expected, "tool_calls" if expected[1] else "stop")


def test_calls_that_are_bare_json(bare: RunningServer) -> None:
    """Found, and forced."""
    with bare.client() as client:
        for key, (content, calls) in GOLDEN_BARE.items():
            assert answered(client, key) == (content, calls, "tool_calls" if calls else "stop")
        named: Any = {"type": "function", "function": {"name": "add"}}
        assert answered(client, "key: plain", tool_choice=named)[1][0][0] == "add"
        assert len(answered(client, "key: bare two", tool_choice="required")[1]) == 1


def test_one_call_alone_if_the_template_takes_no_more() -> None:
    """As Llama 3.1's: a second call would make the next turn fail."""
    generator = scripted_generator({"key: bare two": SCRIPTS["key: bare two"]}, SINGLE)
    with running_server(generator, chat_template=None) as server, server.client() as client:
        assert answered(client, "key: bare two") == (None, [("now", {})], "tool_calls")


def test_an_answer_that_is_cut_is_content(client: OpenAI) -> None:
    content, calls, reason = answered(client, "key: one", max_tokens=3)
    assert calls == [] and reason == "length"
    assert content and SCRIPTS["key: one"].startswith(content)


FORCED = {"required": {"weather", "add", "now"}, "add": {"add"}, "weather": {"weather"}, "now": {"now"}}


@pytest.mark.parametrize("choice", [*FORCED, "weather now"])
@pytest.mark.parametrize("policy", ["ls:2-3", "ar", "copy:4"])
def test_a_forced_call_follows_its_schema(client: OpenAI, policy: str, choice: str) -> None:
    """Whatever the model would have said: it wants to talk of the weather."""
    named: list[Any] = [{"type": "function", "function": {"name": name}} for name in choice.split()]
    several = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named}}
    wanted: Any = choice if choice == "required" else named[0] if len(named) == 1 else several
    options = {"tool_choice": wanted, "extra_body": {"policy": policy}, "parallel_tool_calls": choice != "required"}
    content, calls, reason = answered(client, "key: plain", **options)
    assert (content, reason, len(calls)) == (None, "tool_calls", 1)
    ((name, arguments),) = calls
    assert name in FORCED.get(choice, {*choice.split()})
    if name == "add":
        assert set(arguments) == {"a", "b"} and {*arguments.values()} <= {1, 2}
    elif name == "weather":
        assert arguments["city"] in ("Oslo", "Rome")
    else:
        assert arguments == {}


@pytest.mark.parametrize(
    ("template", "words"), [(TAGS, ()), (TAGS, (BEGIN, "</tool_call>")), (TAGS, (BEGIN,)), (BARE, ())]
)
def test_the_grammar_takes_calls_as_the_template_writes_them(template: str, words: tuple[str, ...]) -> None:
    """White space and order included, so that a model need not leave what it knows; with and without tokens for the tags."""
    tokenizer = scripted_tokenizer(template, words)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    talk = [*asked("x"), {"role": "assistant", "content": "", "tool_calls": [call] * 2}, *asked("x")]
    rendered = str(tokenizer.decode(encode_messages(talk, tokenizer)))
    calls = rendered[rendered.index("{" if template is BARE else "<tool_call>") : rendered.index("<user>", 10)].strip()
    one = calls[: calls.index("}}") + 2] if template is BARE else calls[: len(calls) // 2]
    several, single = follows(tokenizer, TOOLS, several=True), follows(tokenizer, TOOLS, several=False)
    assert several(one) and single(one) and not single(calls)
    assert several(calls) is (template is not BARE)
    for wrong in (one.replace("1", "3"), one.replace("add", "sing"), one.replace('"a"', '"c"'), f" {one}", one[:-3]):
        assert not several(wrong), wrong


def follows(tokenizer: PreTrainedTokenizerBase, tools: list[Any], **options: Any) -> Callable[[str], bool]:
    """Whether a text follows the grammar of calls of these tools."""
    vocabulary = Vocabulary(tokenizer, len(tokenizer), [int(tokenizer.convert_tokens_to_ids(END))])
    known = [Tool.model_validate(tool) for tool in tools]
    grammar = call_grammar(format_of(tokenizer, OWN_TEMPLATE), known, vocabulary, **options)

    def fits(text: str) -> bool:
        ids, matcher = tokenizer(text, add_special_tokens=False)["input_ids"], vocabulary.matcher(grammar)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return fits


def test_a_call_or_an_answer_that_follows_a_schema(client: OpenAI, bare: RunningServer) -> None:
    schema = {"type": "object", "properties": {"r": {"enum": [1]}}, "required": ["r"], "additionalProperties": False}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "r", "schema": schema}}
    answer = json.dumps({"r": 1}, separators=(",", ":"))
    assert answered(client, "key: json", response_format=wanted) == (answer, [], "stop")
    fits = follows(scripted_tokenizer(TAGS, ()), TOOLS[2:], several=True, answer=schema)
    assert fits(answer) and fits(tagged("now")) and fits(tagged("now") * 2)
    assert not fits(answer + tagged("now")) and not fits("")
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

    Those of Open WebUI, and the call that `parse()` returned, were written by hand. refused: the field that is named.
    """
    if "refused" in sent:
        assert refusal(server, "/v1/chat/completions", sent["body"])["param"] == sent["refused"]
        return
    status, answer, headers = ask(server, "POST", "/v1/chat/completions", sent["body"])
    assert status == 200, answer
    assert (headers["x-selfspec-ignored"] or "strict") == sent.get("ignored", "strict")
    if sent["body"].get("stream"):
        assert answer.endswith(b"data: [DONE]\n\n") and b'"error"' not in answer
    elif sent["body"]["messages"][-1]["role"] == "tool":
        assert json.loads(answer)["choices"][0]["message"]["content"] == SCRIPTS["key: told"]
    else:
        assert json.loads(answer)["choices"][0]["finish_reason"] in ("stop", "tool_calls")


LONG_ENUMS = [{"enum": [f"{i} {j}" + "x" * 100 for j in range(400)]} for i in range(8)]


def test_variables_of_the_template() -> None:
    """Those that it reads are told to it, in a chat and to count its tokens; others are ignored, and named."""
    template = "{{ 'no thoughts' if enable_thinking is defined and not enable_thinking }}{{ style }}" + TAGS
    every = {"chat_template_kwargs": {"enable_thinking": False, "style": "!", "other": 1}}
    with running_server(scripted_generator(SCRIPTS, template), chat_template=None) as server:
        sizes = []
        for fields in ({}, {"enable_thinking": True}, {"enable_thinking": False}, every):
            body: dict[str, Any] = {"messages": asked("key: plain"), **fields}
            _, raw, headers = ask(server, "POST", "/v1/chat/completions", body)
            sizes.append(json.loads(raw)["usage"]["prompt_tokens"])
        assert sizes[0] == sizes[1] < sizes[2] < sizes[3]
        assert headers["x-selfspec-ignored"] == "chat_template_kwargs.other"
        assert json.loads(ask(server, "POST", "/tokenize", body)[1])["count"] == sizes[3]


def test_too_many_tools_or_schemas_are_refused(server: RunningServer) -> None:
    functions: list[list[dict[str, Any]]] = [
        [{"name": f"f{i}"} for i in range(129)],
        [{"name": f"f{i}", "parameters": {"properties": {"a": one}}} for i, one in enumerate(LONG_ENUMS)],
    ]
    for several in functions:
        tools = [{"type": "function", "function": one} for one in several]
        body = {"messages": asked("key: one"), "tools": tools, "tool_choice": "required"}
        assert refusal(server, "/v1/chat/completions", body)["param"] == "tools"


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
    plain = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content or '' }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{{ messages[-1].content }}{% endif %}"
    )
    generator.tokenizer.chat_template = {"default": plain, "tool_use": TAGS}  # type: ignore[assignment]
    with running_server(generator, chat_template=None) as server, server.client() as client:
        assert answered(client, "key: one")[:2] == GOLDEN["key: one"]
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        talk = [*asked("x"), {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "It rains."}]
        for tools in ({}, {"tools": TOOLS}):  # without them, too, a call and its result are shown
            ids = json.loads(ask(server, "POST", "/tokenize", {"messages": talk, **tools})[1])["tokens"]
            read = json.loads(ask(server, "POST", "/detokenize", {"tokens": ids})[1])["prompt"]
            assert '"arguments": {"a": 1}' in read and "It rains." in read
            assert ('"name": "weather"' in read) == bool(tools)
        info = json.loads(ask(server, "GET", "/tokenizer_info")[1])
        assert info["chat_template"] == plain


def test_the_template_says_how_calls_are_written() -> None:
    tokenizer = scripted_tokenizer(TAGS, ())
    mistral = OTHER.replace("CALL ", "[TOOL_CALLS] [")

    def found(template: str) -> ToolFormat:
        tokenizer.chat_template = template
        return format_of(tokenizer, OWN_TEMPLATE)

    assert (found(TAGS), found(BARE)) == (ToolFormat("tags"), ToolFormat("bare"))
    assert found(SINGLE).several is False
    assert found(HIDDEN) == ToolFormat("tags", shows_calls=False)
    for template in (OTHER, mistral, TAGS.replace('{"name"', "{name")):
        with pytest.raises(NoToolsError, match="in a form that is not read"):
            found(template)
    for other in (PLAIN_TEMPLATE, ChatTemplate("{{ raise_exception('no') }}")):
        with pytest.raises(NoToolsError, match="knows no tools"):
            format_of(tokenizer, other)
    tokenizer.chat_template = {"default": PLAIN_TEMPLATE.source, "tool_use": TAGS}  # type: ignore[assignment]
    assert format_of(tokenizer, OWN_TEMPLATE) == ToolFormat("tags")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>"]})
    with pytest.raises(NoToolsError, match="special tokens"):
        found(TAGS)


def read(reader: CallReader, pieces: Iterable[str]) -> tuple[str, list[tuple[str, str]]]:
    """All content and all calls of an answer that comes in pieces."""
    found = [*map(reader.push, pieces), reader.finish()]
    functions = [call["function"] for _, calls in found for call in calls]
    assert len(functions) == reader.num_calls
    return "".join(content for content, _ in found), [(one["name"], one["arguments"]) for one in functions]


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
    call = tool_calls.BEGIN + '{"name": "f", "arguments": {}}' + tool_calls.END
    found, calls = read(TagReader(["f"]), [around.replace("{}", call)])
    assert (found, len(calls)) == (content, around.count("{}"))


def test_an_end_inside_a_string_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a long call that repeats it takes a time that grows with the square of its length, on the event loop."""
    parsed, looks = tool_calls._parsed, list[str]()
    monkeypatch.setattr(tool_calls, "_parsed", lambda text: looks.append(text) or parsed(text))
    arguments = json.dumps({"a": tool_calls.END * 30})
    text = f'{BEGIN}{{"name": "f", "arguments": {arguments}}}{tool_calls.END}'
    assert read(TagReader(["f"]), text) == ("", [("f", arguments)])
    assert len(looks) == 31


@given(text=PARTS, cuts=st.lists(st.integers(0, 200), max_size=12), kind=st.sampled_from([TagReader, BareReader]))
def test_calls_do_not_depend_on_where_the_text_is_cut(text: str, cuts: list[int], kind: type[CallReader]) -> None:
    content, calls = read(kind(NAMES), [text])
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    assert read(kind(NAMES), [text[start:end] for start, end in pairwise(places)]) == (content, calls)
    assert calls or content == text
    for name, arguments in calls:
        assert name in NAMES and isinstance(json.loads(arguments), dict)
