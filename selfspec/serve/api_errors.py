"""Errors in the form in which OpenAI's API reports them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

CLIENT_LEFT = 499
"""A status for the log and the metrics; no client receives it."""


class ApiError(Exception):
    """A request that cannot be answered. param: the wrong field. code: a short name of the reason."""

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
        return error_body(self.message, self.status, self.param, self.code)

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    message = message.encode("utf-8", "replace").decode()  # a field of the request may hold half a character
    param = None if param is None else param.encode("utf-8", "replace").decode()
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def install(app: FastAPI) -> None:
    """Make the app report every error in this form."""

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
    shown = []
    for route in app.routes:
        path, methods = getattr(route, "path", ""), getattr(route, "methods", None)
        if methods and path:
            shown.append(f"{'/'.join(sorted(methods - {'HEAD'}))} {path.replace(':path', '')}")
    return ", ".join(sorted(shown, key=lambda one: one.split()[::-1]))
