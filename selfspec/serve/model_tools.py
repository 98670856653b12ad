"""How a model is told of tools and writes calls, and what that means for a request: a check, a grammar, a reader.

The model's own chat template is asked to render a call. What it writes is what the model was trained to write:

| kind | the model writes | |
|---|---|---|
| tags | `<tool_call>` JSON `</tool_call>`, several in a row | Hermes, Qwen 2.5 and 3, SmolLM3 |
| bare | JSON and nothing else | Llama 3.1 and 3.2 |
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from selfspec.messages import ChatTemplate, encode_messages, has_template
from selfspec.serve.api_errors import ApiError
from selfspec.serve.api_messages import Message, Tool
from selfspec.serve.api_requests import ChatRequest, GenerationRequest
from selfspec.serve.schema_check import COMPACT, Grammar, as_compiled
from selfspec.serve.structured_output import Vocabulary
from selfspec.serve.tool_calls import BEGIN, END, BareReader, CallReader, TagReader

_NAME, _KEY, _VALUE, _RESULT = "probe_of_tools", "probe_of_arguments", "value_of_the_probe", "result_of_the_probe"
_PROPERTIES = {_KEY: {"type": "string", "description": "An argument."}}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": [_KEY]}
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "A tool.", "parameters": _PARAMETERS}}
_CALL = {"id": "probe0000", "type": "function", "function": {"name": _NAME, "arguments": {_KEY: _VALUE}}}
_ASKED = {"role": "user", "content": "A question."}
_TOLD = {"role": "tool", "content": _RESULT, "tool_call_id": "probe0000", "name": _NAME}
_SAID = "said_instead_of_the_call"
_SPACED = {**COMPACT, "item_separator": ", ", "key_separator": ": "}
"""White space as json.dumps writes it, which is how templates write calls."""


class NoToolsError(ValueError):
    """This model's calls cannot be made or read."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """several: whether one answer may have several calls; Llama's may not. shows_calls: whether earlier ones are shown."""

    kind: Literal["tags", "bare"]
    several: bool = True
    shows_calls: bool = True


def format_of(tokenizer: PreTrainedTokenizerBase, template: ChatTemplate) -> ToolFormat:
    """Find a model's format. Raises NoToolsError if its template knows no tools, or writes calls in another form."""
    template = tool_template(tokenizer, template)

    def rendered(answer: Mapping[str, Any] | None, *after: Mapping[str, Any], tools: Any = None) -> str:
        talk = [_ASKED, *(() if answer is None else ({"role": "assistant", **answer},)), *after]
        try:
            return str(tokenizer.decode(encode_messages(talk, tokenizer, template, tools, ask=True)))
        except ValueError:  # the template refuses it
            return ""

    told = rendered(None, tools=[_TOOL])
    if _NAME not in told:
        raise NoToolsError("this model's chat template knows no tools")
    if {BEGIN, END} & set(tokenizer.all_special_tokens):
        raise NoToolsError("this model writes tool calls with special tokens, which its text does not show")
    called = rendered({"content": "", "tool_calls": [_CALL]}, _TOLD)
    twice = rendered({"content": "", "tool_calls": [_CALL, _CALL]}, _TOLD)
    before, said, _ = rendered({"content": _SAID}, _ASKED).partition(_SAID)
    several, shows_calls = bool(twice), _VALUE in called and _RESULT in called
    if any(_is_call(part.lstrip()) and END in part for part in called.split(BEGIN)[1:]):
        return ToolFormat("tags", several, shows_calls)
    if said and called.startswith(before) and _is_call(called[len(before) :]):
        return ToolFormat("bare", several, shows_calls)
    if _VALUE not in called and BEGIN in told:
        return ToolFormat("tags", shows_calls=shows_calls)
    raise NoToolsError("this model's chat template writes tool calls in a form that is not read here")


def _is_call(text: str) -> bool:
    """Say whether the text begins with the JSON of the call that was asked for."""
    try:
        call, _ = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return False
    return isinstance(call, dict) and call.get("name") == _NAME and {_KEY: _VALUE} in call.values()


def tool_template(tokenizer: PreTrainedTokenizerBase, template: ChatTemplate) -> ChatTemplate:
    """Choose the template of conversations with tools: of named ones, which some tokenizers have, that for tools."""
    named = getattr(tokenizer, "chat_template", None)
    if template.source is not None or not isinstance(named, dict) or "tool_use" not in named:
        return template
    return ChatTemplate(named["tool_use"], template.stops)


class ModelTools:
    """The tools of requests to one model. Threads may share one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._format: ToolFormat | None = None
        self._why = "this model has no chat template"
        if has_template(tokenizer, template):
            try:
                self._format = format_of(tokenizer, template)
            except NoToolsError as error:
                self._why = str(error)
        self.known = self._format is not None  # whether it can be told of tools, and its calls can be read

    def check(self, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
        """Raise ApiError that names the first field about tools, if the template does not know them."""
        shown = self._format is not None and self._format.shows_calls
        used = {"tools": self.known} if tools else {}
        for place, message in enumerate(messages):
            if message.role == "tool":
                used[f"messages.{place}.role"] = shown
            elif message.tool_calls is not None:
                used[f"messages.{place}.tool_calls"] = shown
        for param, is_known in used.items():
            if not is_known:
                why = "this model's chat template leaves out calls and their results" if self.known else self._why
                raise ApiError(f"{why}: leave out {param}", param=param, code="unsupported_parameter")
        if messages and messages[-1].tool_calls is not None:
            why = "the last message has tool_calls: add their results, as messages of the role 'tool'"
            raise ApiError(why, param="messages")

    def grammar(self, body: GenerationRequest) -> Grammar | None:
        """Say what the text must follow; None if any text will do. Raises ValueError for what does not go together."""
        field, answer = body.form
        if not isinstance(body, ChatRequest) or not body.callable_tools:
            return answer
        if answer is None and not body.tool_choice.forces:
            return None
        assert self._format is not None
        several = body.parallel_tool_calls is not False and body.tool_choice.name is None
        answer = None if body.tool_choice.forces else answer
        if isinstance(answer, str):
            raise ValueError(f"{field} goes with tools only if it is a JSON schema")
        return call_grammar(self._format, body.callable_tools, self._vocabulary, several=several, answer=answer)

    def reader(self, body: GenerationRequest) -> CallReader | None:
        """Make what finds the calls in an answer; None if there may be none."""
        if not isinstance(body, ChatRequest) or not body.callable_tools or self._format is None:
            return None
        alone = body.parallel_tool_calls is False or body.tool_choice.name is not None or not self._format.several
        names = [tool.function.name for tool in body.callable_tools]
        return (TagReader if self._format.kind == "tags" else BareReader)(names, 1 if alone else None)


def call_grammar(
    written: ToolFormat,
    tools: Sequence[Tool],
    vocabulary: Vocabulary,
    *,
    several: bool,
    answer: dict[str, Any] | bool | None = None,
) -> str:
    """Write the grammar, in llguidance's form of Lark, of an answer that consists of calls that follow the tools' schemas.

    several: more than one call is possible, if they have tags. answer: a schema that the answer may follow instead.
    Raises ValueError for schemas, or an answer, for which there is no such grammar.
    """
    has_tags = written.kind == "tags"
    if not has_tags and answer is not None:
        raise ValueError("this model's form of tool calls has no grammar that goes with this request")
    calls = r'call ("\n"? call)*' if several and has_tags else "call"
    rules = [f"start: {calls}" if answer is None else f"start: answer | {calls}"]
    if answer is not None:
        # As `Vocabulary.matcher` makes it of the schema alone.
        rules.append(f"answer: %json {_with_spaces(answer, COMPACT)}")
    names = " | ".join(f"call_{number}" for number in range(len(tools)))
    tags = (vocabulary.special_id(tag) for tag in (BEGIN, END))
    before, after = (json.dumps(tag) if token is None else f"<[{token}]>" for tag, token in zip((BEGIN, END), tags))
    rules.append(rf'call: {before} "\n" ( {names} ) "\n" {after}' if has_tags else f"call: {names}")
    for number, tool in enumerate(tools):
        key = "arguments" if has_tags else "parameters"
        head = f'{{"name": {json.dumps(tool.function.name)}, "{key}": '
        rules.append(f'call_{number}: {json.dumps(head)} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: %json {_with_spaces(tool.schema_, _SPACED)}")
    return "\n".join(rules) + "\n"


def _with_spaces(schema: dict[str, Any] | bool, spaces: dict[str, Any]) -> str:
    return json.dumps({"x-guidance": spaces, **as_compiled(schema)})
