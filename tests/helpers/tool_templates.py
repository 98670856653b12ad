"""Chat templates that write tool calls in different ways, what a model says by key, and the calls and content in that."""

from __future__ import annotations

import json
from typing import Any

from openai import OpenAI

_HEAD = (
    "{% if tools %}<tools>\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>\n{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
)
_TAIL = (
    "\n{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{{ 'key: told' if messages[-1].role == 'tool' else messages[-1].content }}{% endif %}"
)
TAGS = (
    _HEAD + "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    + _TAIL
)
BARE = (
    _HEAD + "{% for call in message.tool_calls or [] %}"
    '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}{% endfor %}' + _TAIL
)
SINGLE = BARE.replace("<{{ message.role }}>", "{{ 1 / 0 if message.tool_calls and message.tool_calls[1:] }}")
HIDDEN = _HEAD + "{% if tools %}<tool_call> begins a call{% endif %}" + _TAIL
OTHER = _HEAD + "{% for call in message.tool_calls or [] %}CALL {{ call.function | tojson }}!{% endfor %}" + _TAIL


def tagged(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


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
Answer = tuple[str | None, list[tuple[str, dict[str, Any]]]]
GOLDEN: dict[str, Answer] = {
    "key: one": (None, [("weather", {"city": "Oslo"})]),
    "key: two": ("I look.", [("weather", {"city": "Rome"}), ("add", {"a": 1, "b": 2})]),
    "key: text behind": ("That was it.", [("now", {})]),
    "key: end inside": (None, [("weather", {"city": "a </tool_call> b"})]),
    "key: half": ("Let me see.", [("weather", {"city": "x\N{REPLACEMENT CHARACTER}y"})]),
    "key: open": (None, [("weather", {"city": "Bergen"})]),
    "key: no arguments": (None, [("now", {})]),
    "key: null": (None, [("now", {})]),
    "key: think": ("<think>A <tool_call> is due.</think>", [("weather", {"city": "Roma"})]),
    "key: coder": (None, [("weather", {"city": "Lima"})]),
}
NO_CALLS = ("plain", "broken", "unknown", "unclosed", "endless", "an object", "names")
GOLDEN_BARE: dict[str, Answer] = {
    "key: bare": (None, [("weather", {"city": "Rome"})]),
    "key: bare two": (None, [("now", {}), ("add", {"a": 2, "b": 1})]),
}
for golden, names in ((GOLDEN, NO_CALLS), (GOLDEN_BARE, ("plain", "bare broken", "bare json"))):
    golden |= {key: (SCRIPTS[key], []) for key in (f"key: {name}" for name in names)}


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


def asked(key: str) -> list[Any]:
    return [{"role": "user", "content": key}]


def answered(client: OpenAI, key: str, **options: Any) -> tuple[str | None, list[tuple[str, dict[str, Any]]], str]:
    """Content, calls and reason, after a check that a stream has the same."""
    options = {"model": "demo", "messages": asked(key), "tools": TOOLS, "temperature": 0, "max_tokens": 200, **options}
    (choice,) = client.chat.completions.create(**options).choices
    calls = choice.message.tool_calls or []
    content, found, reason, roles = "", dict[int, list[str]](), None, list[Any]()
    for chunk in client.chat.completions.create(**options, stream=True):
        (part,) = chunk.choices
        content += part.delta.content or ""
        roles.append(part.delta.role)
        for call in part.delta.tool_calls or []:
            assert call.function is not None
            if call.index not in found:
                assert call.id and call.type == "function" and call.function.name
                found[call.index] = [call.function.name, ""]
            found[call.index][1] += call.function.arguments or ""
        reason = part.finish_reason or reason
    assert (content or None) == (choice.message.content or None)
    assert roles == ["assistant"] + [None] * (len(roles) - 1)
    assert [*found] == [*range(len(calls))]
    assert [*found.values()] == [[call.function.name, call.function.arguments] for call in calls]
    assert reason == choice.finish_reason
    assert len({call.id for call in calls}) == len(calls)
    return choice.message.content, [(c.function.name, json.loads(c.function.arguments)) for c in calls], str(reason)
