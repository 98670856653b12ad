"""What requests have in common with the answers they follow: messages, the calls in them, and tools; OpenAI's names."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field, field_validator, model_validator

from selfspec.serve.bodies import Strict, refusals, refuse

MAX_TOOLS = 128  # most tools of a request, as in OpenAI's API
TEXT_ONLY = "only text is supported: leave out {}"


class FunctionTool(Strict, harmless="strict"):
    """parameters: a JSON schema of the arguments; None for a function without any. strict: see docs/serving.md."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Strict):
    type: Literal["function"]
    function: FunctionTool

    @property
    def described(self) -> dict[str, Any]:
        """As chat templates take it: OpenAI's form, always with a description and parameters, which some ask for."""
        given = self.function.model_dump(exclude_none=True)
        name, description = given.pop("name"), given.pop("description", "")
        function = {"name": name, "description": description, "parameters": self.schema_, **given}
        return {"type": "function", "function": function}

    @property
    def schema_(self) -> dict[str, Any]:
        """The schema of its arguments, without further properties unless it says so. Raises ValueError for no object."""
        given = self.function.parameters
        if given is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        if given.get("type", "object") != "object":
            raise ValueError(f"the parameters of {self.function.name!r} must be an object")
        closed = {"additionalProperties": False} if "properties" in given else {}
        return {"type": "object", **closed, **given}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """mode: "none", "auto" or "required". name: of the one function that must be called. allowed: those that may be."""

    mode: str = "auto"
    name: str | None = None
    allowed: tuple[str, ...] | None = None

    @property
    def forces(self) -> bool:
        return self.mode == "required"


def _choice(value: Any) -> Any:
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return ToolChoice(value)
    try:
        if value["type"] == "allowed_tools":
            given = value["allowed_tools"]
            names = tuple(tool["function"]["name"] for tool in given["tools"])
            if given["mode"] in ("auto", "required") and {type(name) for name in names} == {str}:
                return ToolChoice(given["mode"], None, names)
        elif value["type"] == "function" and isinstance(value["function"]["name"], str):
            return ToolChoice("required", value["function"]["name"])
    except (TypeError, KeyError):
        pass
    raise ValueError(
        'give "none", "auto", "required", {"type": "function", "function": {"name": ...}}, or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}'
    )


Choice = Annotated[Any, BeforeValidator(_choice, json_schema_input_type=str | dict[str, Any])]


class CalledFunction(Strict, harmless="parsed_arguments", kept_empty="arguments"):
    """arguments: JSON, as text."""

    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _is_object(cls, value: str) -> str:
        try:
            found = json.loads(value or "{}")
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ValueError("the arguments of a call must be a JSON object, as text")
        return value


class PastCall(Strict, harmless="index"):
    """A call in an earlier message of the assistant."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def described(self) -> dict[str, Any]:
        """As chat templates take it: with the arguments as an object."""
        function = {"name": self.function.name, "arguments": json.loads(self.function.arguments or "{}")}
        call: dict[str, Any] = {"type": "function", "function": function}
        return call if self.id is None else {"id": self.id, **call}


class TextPart(Strict, harmless="annotations cache_control citations logprobs"):
    type: Literal["text", "input_text", "output_text"]
    text: str


def _content(value: Any) -> Any:
    """Make a list of parts. A part that is a refusal is what the assistant said."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise ValueError("give a text, or a list of parts of type 'text'")
    said = [part.get("refusal") if isinstance(part, dict) and part.get("type") == "refusal" else None for part in value]
    return [part if text is None else {"type": "text", "text": text} for part, text in zip(value, said)]


Content = Annotated[list[TextPart], FailFast(), BeforeValidator(_content, json_schema_input_type=str | list[TextPart])]


class Message(
    Strict,
    harmless="annotations cache_control id metadata parsed phase prefix provider_specific_fields reasoning"
    " reasoning_details status thinking_blocks timestamp",
    neutral={"type": ("message",)},
    reasons={
        "function_call": "function_call is not supported: give tool_calls",
        **refusals(TEXT_ONLY, "audio"),
        "refusal": "a refusal is not read by the model: give it as content, or leave the message out",
    },
    kept_empty="content",
):
    """One message of a conversation. tool_calls are an assistant's, and tool_call_id says which of them a tool answers."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = Field(default_factory=list)
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[PastCall] | None, Field(max_length=MAX_TOOLS)] = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _fits_the_role(self) -> Message:
        """Clients send back an assistant's message without content, and a tool may have nothing to say."""
        has_calls, is_result = self.tool_calls is not None, self.tool_call_id is not None
        is_silent = "content" not in self.model_fields_set and self.role not in ("assistant", "tool")
        refuse(
            ("content", is_silent, "content: Field required"),
            ("tool_calls", has_calls and self.role != "assistant", "tool_calls go with the role 'assistant'"),
            ("tool_call_id", is_result and self.role != "tool", "tool_call_id goes with the role 'tool'"),
        )
        return self

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)

    @property
    def described(self) -> dict[str, Any]:
        """As chat templates take it."""
        calls = {} if self.tool_calls is None else {"tool_calls": [call.described for call in self.tool_calls]}
        return {**self.model_dump(exclude_none=True, exclude={"tool_calls"}), "content": self.text, **calls}
