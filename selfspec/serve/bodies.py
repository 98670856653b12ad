"""From a request's bytes to a checked body, with bounds. Long bodies are never parsed on the event loop."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, TypeVar

from fastapi import Request
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError
from starlette.requests import ClientDisconnect

from selfspec.serve.api_errors import CLIENT_LEFT, ApiError
from selfspec.serve.lanes import WorkerQueues

MAX_KEYS = 5_000
"""Most keys of one JSON object. Every unknown key would be an error of its own."""

_LONGEST_NAME = 256  # of an unknown field, in messages
_TRIED = ("str", "bool", "dict")
_FORMATS = (["text"], ["json_object"], ["json_schema"])
UNSUPPORTED, WRONG = "unsupported_field", "wrong_field"
"""Types of validation errors that name the field themselves: it is not supported, or it does not fit the other fields."""


def wrong_field(name: str, message: str) -> PydanticCustomError:
    """Make an error for a model's validator: which field is wrong, and why."""
    return PydanticCustomError(WRONG, "{message}", {"name": name, "message": message})


def _integer(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_integer)]
"""An integer as JSON Schema counts it: 4.0 is one."""


class Strict(BaseModel):
    """Refuses unknown fields, and values of the wrong type.

    A field that is null or asks for nothing counts as left out. A field that does not change the answer is ignored, and a
    header of the answer names it. Any other unknown field is refused by name. All this holds at every depth of the body.
    _harmless: fields that do not change the answer. _neutral: unsupported fields, with the values that ask for the default
    behaviour. _reasons: messages for fields that are refused. _kept_empty: fields for which "" is a value.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    _harmless: ClassVar[frozenset[str]] = frozenset()
    _neutral: ClassVar[dict[str, tuple[object, ...]]] = {}
    _reasons: ClassVar[dict[str, str]] = {}
    _kept_empty: ClassVar[frozenset[str]] = frozenset()
    _ignored: tuple[str, ...] = PrivateAttr(default=())

    @model_validator(mode="wrap")
    @classmethod
    def _known(cls, fields: Any, handler: ModelWrapValidatorHandler[Strict]) -> Strict:
        if not isinstance(fields, dict):
            return handler(fields)
        kept: dict[str, Any] = {}
        ignored: list[str] = []
        for name, value in fields.items():
            field = cls._field(name)
            may_be_empty = name in cls._kept_empty or (field is not None and field.is_required())
            if value is None or (not may_be_empty and _is_empty(value)):
                continue
            if field is not None:
                kept[name] = value
            elif name in cls._harmless:
                ignored.append(name)
            elif _among(value, cls._neutral.get(name, ())):
                continue
            elif name in cls._reasons:
                raise PydanticCustomError(UNSUPPORTED, "{message}", {"name": name, "message": cls._reasons[name]})
            else:
                kept[name] = value
        made = handler(kept)
        made._ignored = tuple(ignored)
        return made

    @classmethod
    def _field(cls, name: str) -> FieldInfo | None:
        field = cls.model_fields.get(name) or cls.model_fields.get(f"{name}_")
        return None if field is None or field.alias not in (None, name) else field

    def ignore(self, name: str) -> None:
        """Note that a field that was given has no effect here."""
        self._ignored = (*self._ignored, name)

    @property
    def ignored_fields_header(self) -> dict[str, str]:
        """The header of the answer that names the ignored fields, if there are any."""
        names = sorted(set(_ignored_in(self)))
        return {"x-selfspec-ignored": ", ".join(names)} if names else {}


def _is_empty(value: object) -> bool:
    """Whether it is "", [] or {}, or a dict of such values."""
    if isinstance(value, dict):
        return all(one is None or one in ("", [], {}) for one in value.values())
    return value in ("", [])


def _among(value: object, neutral: tuple[object, ...]) -> bool:
    return any(type(value) is type(one) and value == one for one in neutral)


def _ignored_in(value: object) -> Iterator[str]:
    if isinstance(value, Strict):
        yield from value._ignored
        for name in type(value).model_fields:
            yield from _ignored_in(getattr(value, name))
    elif isinstance(value, list) and value and isinstance(value[0], Strict):
        for item in value:
            yield from _ignored_in(item)


B = TypeVar("B", bound=BaseModel)


async def read_body(request: Request, kind: type[B], lanes: WorkerQueues) -> tuple[B, int]:
    """Read the body as an object, and its size in bytes. Raises ApiError for a wrong body."""
    content = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content != "application/json" and not content.endswith("+json"):
        # A browser sends other types for any page without asking, but this one only to the page's own origin.
        raise ApiError("the body is not read as JSON: send the header 'Content-Type: application/json'")
    try:
        raw = await request.body()
    except ClientDisconnect:
        raise ApiError("the client has left", status=CLIENT_LEFT) from None
    return await lanes.bodies.run_by_size(len(raw), partial(parse, raw, kind)), len(raw)


def parse(raw: bytes, kind: type[B]) -> B:
    """Parse and check a body. Raises ApiError that names the wrong field."""
    if not raw:
        raise ApiError("the body is empty: send a JSON object")
    try:
        fields = json.loads(raw, object_pairs_hook=_bounded)
    except ApiError:
        raise
    except RecursionError:
        raise ApiError("the body is no valid JSON: it is nested too deeply") from None
    except ValueError as error:  # no JSON, no UTF-8, or a number of thousands of digits
        raise ApiError(f"the body is no valid JSON: {str(error)[:200]}") from None
    if not isinstance(fields, dict):
        raise ApiError("the body must be a JSON object")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _from_validation(error.errors(include_url=False, include_input=False)) from None


def _bounded(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise ApiError(f"the body has an object with {len(pairs)} keys, at most {MAX_KEYS} are possible")
    return dict(pairs)


def _from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Make the error for a body, naming the field. If several types were tried, the one that got furthest counts."""
    error = max(errors, key=lambda one: len(one["loc"]))
    # After the name, pydantic says which of several types it tried.
    path = [str(part) for part in error["loc"]]
    if path[:1] == ["response_format"] and path[1:2] in _FORMATS:
        del path[1]
    param = ".".join(part for part in path if re.fullmatch(r"\w+", part) and part not in _TRIED) or None
    if error["type"] in (UNSUPPORTED, WRONG):  # the field's name is not in the path
        param = ".".join(part for part in (param, error["ctx"]["name"]) if part)
        code = "unsupported_parameter" if error["type"] == UNSUPPORTED else None
        return ApiError(error["msg"], param=param, code=code)
    if error["type"] == "extra_forbidden":
        param = ".".join([*path[:-1], path[-1][:_LONGEST_NAME]])  # the last is the field, whatever characters it has
        return ApiError(f"{param} is not supported", param=param, code="unsupported_parameter")
    if error["type"] == "missing" and param is None:
        return ApiError("the body is empty: send a JSON object")
    message = error["msg"].removeprefix("Value error, ")
    return ApiError(f"{param}: {message}" if param else message, param=param)
