"""Errors in the form in which OpenAI's API reports them, or Anthropic's."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"  # Anthropic's API
CLIENT_LEFT = 499  # A status for the log and the metrics; no client receives it


_FIELDS = {name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code")}
_BODY = {"type": "object", "properties": {"error": {"type": "object", "properties": _FIELDS}}}
DESCRIBED: dict[int | str, dict[str, Any]] = {
    status: {"description": HTTPStatus(status).phrase, "content": {"application/json": {"schema": _BODY}}}
    for status in (400, 401, 403, 404, 405, 408, 413, 429, 500, 503)
}
"""The errors of every route, for /openapi.json."""


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
        # Half a character, which a field of the request may hold, cannot be sent.
        self.message, self.param = (text and text.encode("utf-8", "replace").decode() for text in (message, param))
        self.status, self.code, self.headers = status, code, dict(headers or {})

    def body(self, path: str = "") -> dict[str, Any]:
        """Make the body in the form of the API that this path belongs to."""
        if path.startswith(MESSAGES):
            kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            return {"type": "error", "error": {"type": kind, "message": self.message, "param": self.param}}
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, path: str = "") -> JSONResponse:
        return JSONResponse(self.body(path), self.status, self.headers)


def queue_full(what: str, seconds: int = 1) -> ApiError:
    """seconds: an estimate of when there is room."""
    when = "a second" if seconds == 1 else f"{seconds} seconds"
    headers = {"Retry-After": str(seconds)}
    return ApiError(f"{what}: try again in {when}", status=429, code="queue_full", headers=headers)


def shutting_down() -> ApiError:
    return ApiError("the server is shutting down", status=503, code="shutting_down")


def request_failed() -> ApiError:
    """Make an error of the server's own. Call it where the exception is logged."""
    return ApiError("the server failed on this request; its log says why", status=500)


_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {**_TYPES, 403: "permission_error", 413: "request_too_large", 503: "overloaded_error"}


def install(app: FastAPI) -> None:
    """Make the app report every error in this form. Call it when all routes are there."""
    known = [route for route in app.routes if isinstance(route, APIRoute)]
    shown = sorted((route.path.replace(":path", ""), "/".join(sorted(route.methods or ()))) for route in known)
    routes = ", ".join(f"{methods} {path}" for path, methods in shown)

    @app.exception_handler(ApiError)
    async def own(request: Request, error: ApiError) -> JSONResponse:
        return error.response(request.url.path)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"there is no {request.method} {request.url.path[:100]}; this server has {routes}"
        return ApiError(message, status=error.status_code, headers=error.headers).response(request.url.path)
