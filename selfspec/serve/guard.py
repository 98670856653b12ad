"""What every request passes before the app sees it: the API key, and the limit of a body's size."""

from __future__ import annotations

import secrets

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from selfspec.serve.api_errors import ApiError
from selfspec.serve.server_metrics import ServerMetrics
from selfspec.serve.server_settings import ServerSettings

OPEN_PATHS = ("/health", "/")
"""Served without a key: whether the server is up, and a page that asks for the key."""


class Guard:
    """ASGI middleware; it also counts requests."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: ServerMetrics, routes: frozenset[str]) -> None:
        self._app, self._metrics, self._routes = app, metrics, routes
        self._key = None if settings.api_key is None else f"Bearer {settings.api_key}".encode()
        self._most = settings.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._routes else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        headers = Headers(scope=scope)
        refused = self._refused(scope["path"], headers)
        if refused is not None:
            await refused.response()(scope, receive, counted)
            return
        await self._app(scope, self._limited(receive), counted)

    def _refused(self, path: str, headers: Headers) -> ApiError | None:
        if self._key is not None and path not in OPEN_PATHS:
            given = headers.get("authorization", "").encode()
            if not secrets.compare_digest(given, self._key):
                return ApiError(
                    "a valid API key is needed: send it as 'Authorization: Bearer KEY'",
                    status=401,
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._most:
            return self._too_large()
        return None

    def _limited(self, receive: Receive) -> Receive:
        """Counts what comes: a body need not say how long it is."""
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._most:
                raise HTTPException(413, self._too_large().message)
            return message

        return limited

    def _too_large(self) -> ApiError:
        return ApiError(f"the body is larger than {self._most} bytes", status=413, code="body_too_large")
