"""From a request's bytes to a checked body, with bounds, and threads for work whose length a client chooses."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic
from fastapi import Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, PrivateAttr, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import ClientDisconnect

from selfspec.serve.api_errors import CLIENT_LEFT, ApiError, queue_full

T = TypeVar("T")
Kind = Literal["large requests", "schemas"]
SMALL_BODY = 1 << 14  # bytes of a request that can be parsed or tokenised within a few milliseconds
LARGE_BODY = 1 << 17  # above this many bytes, requests are parsed and tokenised one at a time
MAX_WAITING = 32  # while so many requests of a kind wait, further ones get status 429
MAX_KEYS = 5_000
"""Most keys of one JSON object. Every unknown key would be an error of its own."""

_LONGEST_NAME = 256  # of an unknown field, in messages
_TRIED = ("str", "bool", "dict")
IGNORED = "x-selfspec-ignored"  # the header that names ignored fields
UNSUPPORTED, WRONG = "unsupported_field", "wrong_field"
"""Types of validation errors that name the field themselves: it is not supported, or it does not fit the other fields."""


def refusals(message: str, *fields: str) -> dict[str, str]:
    """Write the message of each field. message: has {} in place of the field."""
    return {field: message.format(field) for field in fields}


def refuse(*cases: tuple[str, object, str]) -> None:
    """Raise the error of the first case that holds, in a model's validator. Each is a field, whether it is wrong, and why."""
    for name, is_wrong, message in cases:
        if is_wrong:
            raise PydanticCustomError(WRONG, "{message}", {"name": name, "message": message})


_whole = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
Integer = Annotated[int, _whole]
"""An integer as JSON Schema counts it: 4.0 is one."""


class Strict(BaseModel):
    """Refuses unknown fields, and values of the wrong type.

    A field that is null or asks for nothing counts as left out. A field that does not change the answer is ignored, and a
    header of the answer names it. Any other unknown field is refused by name. All this holds at every depth of the body.

    Arguments of a class: harmless: fields that do not change the answer. neutral: unsupported fields, with the values that
    ask for the default behaviour. reasons: messages for fields that are refused. kept_empty: fields for which "" is a value.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    _harmless: ClassVar[frozenset[str]] = frozenset()
    _neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    _reasons: ClassVar[Mapping[str, str]] = {}
    _kept_empty: ClassVar[frozenset[str]] = frozenset()
    _ignored: set[str] = PrivateAttr(default_factory=set)

    def __init_subclass__(cls, harmless: str = "", kept_empty: str = "", **others: Any) -> None:
        cls._harmless, cls._kept_empty = cls._harmless | {*harmless.split()}, cls._kept_empty | {*kept_empty.split()}
        cls._neutral = {**cls._neutral, **others.pop("neutral", {})}
        cls._reasons = {**cls._reasons, **others.pop("reasons", {})}
        super().__init_subclass__(**others)

    @model_validator(mode="wrap")
    @classmethod
    def _known(
        cls, fields: Any, handler: pydantic.ModelWrapValidatorHandler[Strict], info: pydantic.ValidationInfo
    ) -> Strict:
        if not isinstance(fields, dict):
            return handler(fields)
        kept: dict[str, Any] = {}
        for name, value in fields.items():
            field = cls.model_fields.get(name) or cls.model_fields.get(f"{name}_")
            if field is not None and field.alias in (None, name):
                if value is not None and (name in cls._kept_empty or field.is_required() or not _is_empty(value)):
                    kept[name] = value
            elif (
                value is None
                or _is_empty(value)
                or any(value == one and (value is one or type(value) is not bool) for one in cls._neutral.get(name, ()))
            ):
                continue
            elif name in cls._harmless:
                if info.context is not None:
                    info.context.add(name)
            elif name in cls._reasons:
                raise PydanticCustomError(UNSUPPORTED, "{message}", {"name": name, "message": cls._reasons[name]})
            else:
                kept[name] = value
        return handler(kept)

    def ignore(self, name: str) -> None:
        """Note that a field that was given has no effect here."""
        self._ignored.add(name)

    @property
    def ignored_fields_header(self) -> dict[str, str]:
        """The header of the answer that names the ignored fields, if there are any."""
        return {IGNORED: ", ".join(sorted(self._ignored))} if self._ignored else {}


def _is_empty(value: object) -> bool:
    """Say whether it is "", [] or {}, or a dict of such values."""
    if isinstance(value, dict):
        return all(one is None or one in ("", [], {}) for one in value.values())
    return value in ("", [])


class WorkerQueue:
    """Two threads for long work, first come first served. Requests of one kind take turns, so that none holds both."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="selfspec-worker")
        self._turns: dict[Kind, asyncio.Lock] = {"large requests": asyncio.Lock(), "schemas": asyncio.Lock()}
        self._waiting: Counter[Kind] = Counter()
        self._rested = 0.0

    async def run(self, work: Callable[[], T], *, kind: Kind = "large requests", rests: float = 0.0) -> T:
        """Run `work` in a thread and return its result. Raises ApiError (status 429) if too many are waiting.

        rests: pause before the next work, as a multiple of the processor time of this one. Parsing holds Python's lock, which
        the decoding thread needs, so without pauses a series of large bodies would slow down everybody.
        """
        if self._waiting[kind] >= MAX_WAITING:
            raise queue_full(f"{self._waiting[kind]} {kind} are waiting already")

        def timed() -> T:
            started = time.thread_time()
            try:
                return work()
            finally:
                self._rested = max(self._rested, time.monotonic() + rests * (time.thread_time() - started))

        self._waiting[kind] += 1
        try:
            async with self._turns[kind]:
                if rests:
                    await asyncio.sleep(self._rested - time.monotonic())
                return await asyncio.get_running_loop().run_in_executor(self._pool, timed)
        finally:
            self._waiting[kind] -= 1

    async def run_by_size(self, size: int, work: Callable[[], T], *, rests: float = 0.0) -> T:
        """Run `work` on a body of `size` bytes: at once if it is small, in any thread, or as `run`."""
        if size <= SMALL_BODY:
            return work()
        return await (asyncio.to_thread(work) if size <= LARGE_BODY else self.run(work, rests=rests))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def described(path: str, kind: type[Strict]) -> dict[str, Any]:
    """Describe the body of a route for /openapi.json, which cannot know what `read_body` will read."""
    here = f"#/paths/{path.replace('/', '~1')}/post/requestBody/content/application~1json/schema"
    schema = kind.model_json_schema(ref_template=f"{here}/$defs/{{model}}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


B = TypeVar("B", bound=Strict)


async def read_body(request: Request, kind: type[B], queue: WorkerQueue) -> tuple[B, int]:
    """Read the body as an object, and its size in bytes. Raises ApiError for a wrong body."""
    content = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content != "application/json" and not content.endswith("+json"):
        # A browser sends other types for any page without asking, but this one only to the page's own origin.
        raise ApiError("the body is not read as JSON: send the header 'Content-Type: application/json'")
    try:
        raw = await request.body()
    except ClientDisconnect:
        raise ApiError("the client has left", status=CLIENT_LEFT) from None
    return await queue.run_by_size(len(raw), partial(parse, raw, kind), rests=3.0), len(raw)


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
    return checked(fields, kind, set())


def checked(fields: dict[str, Any], kind: type[B], ignored: set[str]) -> B:
    """Make a body of parsed fields. ignored: gets the names of the fields that have no effect. Raises as `parse`."""
    try:
        body = kind.model_validate(fields, context=ignored)
    except ValidationError as error:
        raise _from_validation(error.errors(include_url=False, include_input=False), [*kind.model_fields]) from None
    body._ignored = ignored
    return body


def _bounded(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise ApiError(f"the body has an object with {len(pairs)} keys, at most {MAX_KEYS} are possible")
    return dict(pairs)


def _from_validation(errors: Sequence[Mapping[str, Any]], names: Sequence[str]) -> ApiError:
    """Make the error for a body. Of several types that were tried the one that got furthest counts. names: of its fields."""
    error = max(errors, key=lambda one: len(one["loc"]))
    path = [str(part) for part in error["loc"]]
    # After the name, pydantic says which of several types it tried.
    named = [part for part in path if re.fullmatch(r"\w+", part) and part not in _TRIED]
    message, code = error["msg"].removeprefix("Value error, "), None
    if error["type"] in (UNSUPPORTED, WRONG):  # the field's name is not in the path
        named.append(error["ctx"]["name"])
        code = "unsupported_parameter" if error["type"] == UNSUPPORTED else None
    elif error["type"] == "extra_forbidden":
        named = [*path[:-1], path[-1][:_LONGEST_NAME]]  # the last is the field, whatever characters it has
        close = get_close_matches(named[0], names, 1) if len(named) == 1 else []
        hint = f": did you mean {close[0]}?" if close else ""
        message, code = f"{'.'.join(named)} is not supported{hint}", "unsupported_parameter"
    elif error["type"] == "missing" and not named:
        message = "the body is empty: send a JSON object"
    elif named:
        message = f"{'.'.join(named)}: {message}"
    return ApiError(message, param=".".join(named) or None, code=code)
