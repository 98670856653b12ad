"""The parts of a request's body that are about tools, as in OpenAI's API."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator

from selfspec.serve.bodies import Strict

MAX_TOOLS = 128
"""Most tools of a request, as in OpenAI's API."""
_MODES = ("none", "auto", "required")


class FunctionTool(Strict):
    """parameters: a JSON schema of the arguments; None for a function without any. strict: see docs/serving.md."""

    _harmless: ClassVar[frozenset[str]] = frozenset({"strict"})

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


def _is_function(value: Any) -> Any:
    if value != "function":
        raise ValueError(f"only type 'function' is supported, got {str(value)[:40]!r}")
    return value


OfFunctions = Annotated[Literal["function"], BeforeValidator(_is_function)]


class Tool(Strict):
    type: OfFunctions
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
        """The schema of its arguments. Raises ValueError if they are not an object.

        Where it says nothing of further properties there are none: a function would not know what to do with them.
        """
        given = self.function.parameters
        if given is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        if given.get("type", "object") != "object":
            raise ValueError(f"the parameters of {self.function.name!r} must be an object")
        closed = {"additionalProperties": False} if "properties" in given else {}
        return {"type": "object", **closed, **given}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """mode: "none", "auto" or "required". name: of the one function that must be called."""

    mode: str = "auto"
    name: str | None = None

    @property
    def forces(self) -> bool:
        """Whether the answer must be a call."""
        return self.mode == "required"


def _choice(value: Any) -> Any:
    if isinstance(value, str) and value in _MODES:
        return ToolChoice(value)
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ValueError('give "none", "auto", "required", or {"type": "function", "function": {"name": ...}}')
    return ToolChoice("required", name)


ToolChoiceField = Annotated[Any, BeforeValidator(_choice)]


class CalledFunction(Strict):
    """arguments: JSON, as text."""

    _harmless: ClassVar[frozenset[str]] = frozenset({"parsed_arguments"})
    _kept_empty: ClassVar[frozenset[str]] = frozenset({"arguments"})

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


class PastCall(Strict):
    """A call in an earlier message of the assistant."""

    _harmless: ClassVar[frozenset[str]] = frozenset({"index"})

    id: str | None = None
    type: OfFunctions = "function"
    function: CalledFunction

    @property
    def described(self) -> dict[str, Any]:
        """As chat templates take it: with the arguments as an object."""
        function = {"name": self.function.name, "arguments": json.loads(self.function.arguments or "{}")}
        call: dict[str, Any] = {"type": "function", "function": function}
        return call if self.id is None else {"id": self.id, **call}
