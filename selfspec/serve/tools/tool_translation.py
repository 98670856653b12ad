"""What a request says of tools, to what the engine and its answer need: a check, a grammar, a reader of calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from selfspec.messages import ChatTemplate, has_template
from selfspec.serve.api_errors import ApiError
from selfspec.serve.api_requests import ChatRequest, GenerationRequest, JsonSchemaFormat, Message
from selfspec.serve.structured_output import Grammar, Vocabulary
from selfspec.serve.tools.call_readers import BareReader, CallReader, OwnReader, TagReader
from selfspec.serve.tools.tool_formats import NoToolsError, ToolFormat, format_of
from selfspec.serve.tools.tool_grammar import call_grammar
from selfspec.serve.tools.tool_requests import Tool


class ToolTranslator:
    """For one model. Threads may share one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate, vocabulary: Vocabulary) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._format: ToolFormat | None = None
        self._why = "this model has no chat template"
        if has_template(tokenizer, template):
            try:
                self._format = format_of(tokenizer, template)
            except NoToolsError as error:
                self._why = str(error)

    @property
    def known(self) -> bool:
        """Whether the model can be told of tools, and its calls can be read."""
        return self._format is not None

    def check(self, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
        """Raise ApiError that names the first field about tools, if the template does not know them."""
        known = self.known
        shown = self._format is not None and self._format.shows_calls
        used = {"tools": known} if tools else {}
        for place, message in enumerate(messages):
            if message.role == "tool":
                used[f"messages.{place}.role"] = shown
            elif message.tool_calls is not None:
                used[f"messages.{place}.tool_calls"] = shown
        for param, is_known in used.items():
            if not is_known:
                why = "this model's chat template leaves out calls and their results" if known else self._why
                raise ApiError(f"{why}: leave out {param}", param=param, code="unsupported_parameter")
        if messages and messages[-1].tool_calls is not None:
            raise ApiError(
                "the last message has tool_calls: add their results, as messages of the role 'tool'", param="messages"
            )

    def grammar(self, body: GenerationRequest) -> Grammar | None:
        """Say what the text must follow; None if any text will do. Raises ValueError for what does not go together."""
        if not isinstance(body, ChatRequest) or (body.schema_ is None and not body.tool_choice.forces):
            return body.schema_
        tools = body.callable_tools
        if not tools:
            return body.schema_
        assert self._format is not None
        answer = None if body.tool_choice.forces else body.schema_
        several = body.parallel_tool_calls is not False and body.tool_choice.name is None
        return call_grammar(self._format, tools, several=several, special_id=self._vocabulary.special_id, answer=answer)

    def reader(self, body: GenerationRequest, ids: list[int]) -> CallReader | None:
        """Make what finds the calls in an answer; None if there may be none."""
        if not isinstance(body, ChatRequest) or not body.callable_tools or self._format is None:
            return None
        alone = body.parallel_tool_calls is False or body.tool_choice.name is not None or not self._format.several
        most = 1 if alone else None
        names = [tool.function.name for tool in body.callable_tools]
        if self._format.kind == "own":
            tools = [tool.described for tool in body.callable_tools]
            return OwnReader(names, most, self._tokenizer, ids, tools, body.stop)
        return (TagReader if self._format.kind == "tags" else BareReader)(names, most)


def named_results(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With the function's name in messages of the role "tool": some templates show it, and OpenAI's API has only the id."""
    names: dict[str, str] = {}
    named = []
    for message in conversation:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ()) if "id" in call}
        name = names.get(message.get("tool_call_id", ""))
        if message["role"] == "tool" and name is not None:
            message = {"name": name, **message}
        named.append(message)
    return named


def schemas_of(body: GenerationRequest) -> list[tuple[str, dict[str, Any] | bool]]:
    """List the schemas of clients that the text must follow, each with its field. Raises ValueError for parameters of a tool
    that are no object."""
    found: list[tuple[str, dict[str, Any] | bool]] = []
    if isinstance(body.response_format, JsonSchemaFormat):
        found.append(("response_format", body.response_format.json_schema.schema_))
    if isinstance(body, ChatRequest) and (body.tool_choice.forces or body.schema_ is not None):
        found += [("tools", tool.schema_) for tool in body.callable_tools]
    return found
