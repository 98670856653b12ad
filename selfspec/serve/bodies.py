"""From a request's bytes to a checked body, with bounds. What is long is never parsed on the event loop."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from selfspec.serve.api_errors import CLIENT_LEFT, ApiError, from_validation
from selfspec.serve.lanes import Lanes

MOST_KEYS = 5_000
"""Keys of one JSON object: each that is unknown would be an error of its own."""

B = TypeVar("B", bound=BaseModel)


async def read_body(request: Request, kind: type[B], lanes: Lanes) -> tuple[B, int]:
    """The body as an object, and its size in bytes. Raises ApiError for a body that is none."""
    content = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content != "application/json" and not content.endswith("+json"):
        # A browser sends other types for any page without asking, and this one only to where the page comes from.
        raise ApiError("the body is not read as JSON: send the header 'Content-Type: application/json'")
    try:
        raw = await request.body()
    except ClientDisconnect:
        raise ApiError("the client has left", status=CLIENT_LEFT) from None
    return await lanes.bodies.run_by_size(len(raw), partial(parse, raw, kind)), len(raw)


def parse(raw: bytes, kind: type[B]) -> B:
    """Raises ApiError that names the field that is wrong."""
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
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False, include_input=False)) from None


def _bounded(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MOST_KEYS:
        raise ApiError(f"the body has an object with {len(pairs)} keys, at most {MOST_KEYS} are possible")
    return dict(pairs)
