"""How a model writes a tool call, found out from its own chat template.

The template is asked to render a conversation with a call in it. What it writes there is what the model was trained to write:

| format | the model writes | |
|---|---|---|
| tags | `<tool_call>` JSON `</tool_call>`, several in a row | Hermes, Qwen 2.5 and 3, SmolLM3 |
| bare | JSON and nothing else | Llama 3.1 and 3.2 |
| own | what the tokenizer's `response_template` describes | transformers' own parser |
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from selfspec.messages import ChatTemplate, conversation_ids

BEGIN, END = "<tool_call>", "</tool_call>"
_NAME, _KEY, _VALUE, _RESULT = "probe_of_tools", "probe_of_arguments", "value_of_the_probe", "result_of_the_probe"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {_KEY: {"type": "string", "description": "An argument."}},
            "required": [_KEY],
        },
    },
}
_CALL = {"id": "probe0000", "type": "function", "function": {"name": _NAME, "arguments": {_KEY: _VALUE}}}
_ASKED = {"role": "user", "content": "A question."}
_TOLD = {"role": "tool", "content": _RESULT, "tool_call_id": "probe0000", "name": _NAME}
_TALK = (_ASKED, {"role": "assistant", "content": "", "tool_calls": [_CALL]}, _TOLD)
_TWICE = (_ASKED, {"role": "assistant", "content": "", "tool_calls": [_CALL, _CALL]}, _TOLD)
_SAID = "said_instead_of_the_call"
_PLAIN = (_ASKED, {"role": "assistant", "content": _SAID}, _ASKED)
_TAGGED = re.compile(rf"{BEGIN}(\s*)(\{{.*?\}})(\s*){END}", re.DOTALL)
_BARE = re.compile(r"\{[^{}]*\{[^{}]*\}[^{}]*\}")  # an object with one object in it


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How one model writes calls.

    keys: of a call's JSON, in the template's order, such as ("name", "arguments"). before, after: text around the JSON.
    between: text between two calls; None if they are not written one after the other. several: whether the template takes
    several calls of one answer; Llama's does not, and an answer with two would end the conversation.
    shows_calls: whether the template shows the model its earlier calls and their results.
    """

    kind: Literal["tags", "bare", "own"]
    keys: tuple[str, ...] = ("name", "arguments")
    before: str = ""
    after: str = ""
    between: str | None = None
    several: bool = True
    shows_calls: bool = True


class NoToolsError(ValueError):
    """This model's calls cannot be made or read."""


def format_of(tokenizer: PreTrainedTokenizerBase, template: ChatTemplate) -> ToolFormat:
    """Find a model's format. Raises NoToolsError if its template knows no tools, or writes calls in another form."""
    own = template.source is None
    template = tool_template(tokenizer, template)
    told = _rendered(tokenizer, template, [_ASKED], [_TOOL])
    if _NAME not in told:
        raise NoToolsError("this model's chat template knows no tools")
    whole, twice = (_rendered(tokenizer, template, talk, None) for talk in (_TALK, _TWICE))
    shows = _VALUE in whole and _RESULT in whole
    if getattr(tokenizer, "response_template", None) is not None and own:
        return ToolFormat(kind="own", several=bool(twice), shows_calls=shows)
    if {BEGIN, END} & set(tokenizer.all_special_tokens):
        raise NoToolsError("this model writes tool calls with special tokens, which its text does not show")
    for found in _TAGGED.finditer(whole):
        if (keys := _keys(found[2])) is not None:
            parted = re.search(rf"{END}(\s*){BEGIN}", twice)
            return ToolFormat(
                kind="tags",
                keys=keys,
                before=BEGIN + found[1],
                after=found[3] + END,
                between=None if parted is None else parted[1],
                several=bool(twice),
                shows_calls=shows,
            )
    if (keys := _bare_keys(whole, _rendered(tokenizer, template, _PLAIN, None))) is not None:
        return ToolFormat(kind="bare", keys=keys, several=bool(twice), shows_calls=shows)
    if _VALUE not in whole and BEGIN in told:
        return ToolFormat(kind="tags", before=f"{BEGIN}\n", after=f"\n{END}", between="\n", shows_calls=shows)
    raise NoToolsError("this model's chat template writes tool calls in a form that is not read here")


def tool_template(tokenizer: PreTrainedTokenizerBase, template: ChatTemplate) -> ChatTemplate:
    """Choose the template of conversations with tools: of named ones, which some tokenizers have, that for tools."""
    named = getattr(tokenizer, "chat_template", None)
    if template.source is not None or not isinstance(named, dict) or "tool_use" not in named:
        return template
    return ChatTemplate(named["tool_use"], template.stops)


def _bare_keys(whole: str, plain: str) -> tuple[str, ...] | None:
    """Read the keys of a call where an answer without calls would begin. plain: the same talk with such an answer."""
    before, said, _ = plain.partition(_SAID)
    found = _BARE.match(whole, len(before)) if said and whole.startswith(before) else None
    return None if found is None else _keys(found[0])


def _keys(text: str) -> tuple[str, ...] | None:
    """Read the keys of a call; None if it is not the call that was asked for."""
    try:
        call = json.loads(text)
    except ValueError:
        return None
    if not isinstance(call, dict) or call.get("name") != _NAME:
        return None
    known = {"name": _NAME, "arguments": {_KEY: _VALUE}, "parameters": {_KEY: _VALUE}}
    keys = tuple(key for key in call if call[key] == known.get(key))
    return keys if len(keys) == 2 else None


def _rendered(
    tokenizer: PreTrainedTokenizerBase,
    template: ChatTemplate,
    talk: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
) -> str:
    """Return what the template makes of a conversation; "" if it refuses it."""
    try:
        return str(tokenizer.decode(conversation_ids(talk, tokenizer, template, ask=True, tools=tools)))
    except ValueError:
        return ""
