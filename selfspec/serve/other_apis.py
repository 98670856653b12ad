"""Requests of APIs other than OpenAI's chats, each of which becomes the body of a chat."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from pydantic import ConfigDict, Field, PrivateAttr, ValidationInfo, model_validator
from typing_extensions import Self

from selfspec.serve.api_errors import ApiError
from selfspec.serve.api_messages import MAX_TOOLS
from selfspec.serve.api_requests import ChatRequest
from selfspec.serve.bodies import Strict, checked

Placed = tuple[str, dict[str, Any]]
"""A message or a tool as a chat has it, after its place in the request, such as "input.2"."""
_OF_TOOLS = ("allowed_callers", "cache_control", "defer_loading", "eager_input_streaming", "input_examples", "type")
_TOOL_NAMES = {"input_schema": "parameters"}


class OtherRequest(Strict):
    """Fields that are not here are a chat's, and are checked there: their names and meanings are the same.

    _own_names: what some fields of a chat are called here. _functions: types of tools that are the client's functions. Other
    tools, which would run elsewhere, are ignored.
    """

    model_config = ConfigDict(extra="allow")
    _own_names: ClassVar[Mapping[str, str]] = {}
    _functions: ClassVar[tuple[str | None, ...]] = ("function",)
    _chat: ChatRequest = PrivateAttr()
    _places: dict[str, str] = PrivateAttr(default_factory=dict)

    model: str | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list, max_length=MAX_TOOLS)

    @property
    def chat(self) -> ChatRequest:
        """Return the chat that asks for the same."""
        return self._chat

    @model_validator(mode="after")
    def _translate(self, info: ValidationInfo) -> Self:
        same = {name: getattr(self, name) for name in OtherRequest.model_fields} | (self.model_extra or {})
        for name in same.keys() & {*self._own_names, "n", "show_drafts"} - {*type(self).model_fields}:
            own = self._own_names.get(name)
            why = "only /v1/chat/completions takes it" if own is None else f"it is called {own} here"
            raise ApiError(f"{name} is not supported: {why}", param=name, code="unsupported_parameter")
        messages = _joined(self._messages())
        tools = {f"tools.{number}": tool for number, tool in enumerate(self.tools)}
        functions = [(place, _function(tool)) for place, tool in tools.items() if tool.get("type") in self._functions]
        for kind, placed in (("messages", messages), ("tools", functions)):
            self._places |= {f"{kind}.{number}": place for number, (place, _) in enumerate(placed)}
        lists = {"messages": [one for _, one in messages], "tools": [one for _, one in functions]}
        with self.own_words():
            self._chat = checked({**same, **self._chat_fields(), **lists}, ChatRequest, set())
        self._chat._ignored |= {*(info.context or ()), *(tools.keys() - {place for place, _ in functions})}
        return self

    @abstractmethod
    def _messages(self) -> Iterable[Placed]:
        """Translate the messages. Those of the assistant with nothing between them are joined afterwards."""

    @abstractmethod
    def _chat_fields(self) -> dict[str, Any]:
        """Translate the other fields."""

    @contextmanager
    def own_words(self) -> Iterator[None]:
        """Name the fields in an error as this API does."""

        def own(text: str) -> str:
            place = r"\b((?:messages|tools)\.\d+)(\.function)?"
            text = re.sub(place, lambda found: self._places.get(found[1], found[0]), text)
            for name, mine in self._own_names.items():
                start = r"\b" if "_" in name else "^"  # not a word in the middle of a sentence
                text = re.sub(rf"{start}{name}(\.json_schema)?\b", mine, text)
            return text

        try:
            yield
        except ApiError as error:
            error.message, error.param = own(error.message or ""), error.param and own(error.param)
            raise


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    """Make a chat's tool."""
    own = {_TOOL_NAMES.get(name, name): value for name, value in tool.items() if name not in _OF_TOOLS}
    return {"type": "function", "function": own}


def response_format(config: Mapping[str, Any]) -> Any:
    """Make a chat's form of `format` in it, which has a level more."""
    form = config.get("format")
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form
    schema = {name: value for name, value in form.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}


def _joined(messages: Iterable[Placed]) -> list[Placed]:
    """Join messages of the assistant, as a chat has a text and its calls in one, and those from the same place."""
    joined: list[Placed] = []
    for place, message in messages:
        role, (before_place, before) = message.get("role"), joined[-1] if joined else ("", {})
        if role == before.get("role") and (role == "assistant" or (role != "tool" and place == before_place)):
            for name in ("content", "tool_calls"):
                before[name] = _list(before.get(name))
                before[name] += _list(message.get(name))  # in place: a client may send many
        else:
            joined.append((place, {**message}))
    return joined


def _list(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    return value if isinstance(value, list) else [] if value is None else [value]
