"""Errors in the form in which OpenAI's API reports them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from selfspec.serve.api_fields import UNSUPPORTED, WRONG

CLIENT_LEFT = 499
"""A status that nobody reads; the log and the metrics do."""


class ApiError(Exception):
    """A request cannot be answered. param: the field that is wrong; code: a short name of the reason."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """What the client gets."""
        return error_body(self.message, self.status, self.param, self.code)

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


_TRIED = ("str", "bool", "dict")
_FORMATS = (["text"], ["json_object"], ["json_schema"])
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    message = message.encode("utf-8", "replace").decode()  # a field of the request may hold half a character
    param = None if param is None else param.encode("utf-8", "replace").decode()
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def install(app: FastAPI) -> None:
    """Let the app report every error in this form."""

    async def own(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error.response()

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        headers = dict(error.headers or {})
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"there is no {request.method} {request.url.path[:100]}; this server has {_routes(app)}"
        return JSONResponse(error_body(message, error.status_code), error.status_code, headers)

    app.add_exception_handler(ApiError, own)
    app.add_exception_handler(HTTPException, http)


def _routes(app: FastAPI) -> str:
    """All of them, each with its methods."""
    shown = []
    for route in app.routes:
        path, methods = getattr(route, "path", ""), getattr(route, "methods", None)
        if methods and path:
            shown.append(f"{'/'.join(sorted(methods - {'HEAD'}))} {path.replace(':path', '')}")
    return ", ".join(sorted(shown, key=lambda one: one.split()[::-1]))


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """What is wrong with a request's body, naming the field. Of several types, the one that got furthest counts."""
    error = max(errors, key=lambda one: len(one["loc"]))
    # Behind the name pydantic says which of several types it tried.
    path = [str(part) for part in error["loc"]]
    if path[:1] == ["response_format"] and path[1:2] in _FORMATS:
        del path[1]
    param = ".".join(part for part in path if re.fullmatch(r"\w+", part) and part not in _TRIED) or None
    if error["type"] in (UNSUPPORTED, WRONG):  # the field's name is not in the path
        param = ".".join(part for part in (param, error["ctx"]["name"]) if part)
        code = "unsupported_parameter" if error["type"] == UNSUPPORTED else None
        return ApiError(error["msg"], param=param, code=code)
    if error["type"] == "extra_forbidden":
        return ApiError(f"{param} is not supported", param=param, code="unsupported_parameter")
    if error["type"] == "missing" and param is None:
        return ApiError("the body is empty: send a JSON object")
    message = error["msg"].removeprefix("Value error, ")
    return ApiError(f"{param}: {message}" if param else message, param=param)
