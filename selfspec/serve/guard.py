"""Checks before a request reaches the app: the host name, the API key, and limits on a body's size and time."""

from __future__ import annotations

import asyncio
import logging
import secrets

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from selfspec.serve.api_errors import ApiError, request_failed, shutting_down
from selfspec.serve.server_metrics import ServerMetrics
from selfspec.serve.server_settings import ServerSettings

log = logging.getLogger("selfspec.serve")
OPEN_PATHS = ("/health", "/")
"""Served without a key: the health check, and a page that asks for the key."""
BODY_SECONDS = 60.0
"""Time within which a body must be complete."""
MAX_UNFINISHED = 16
"""Limit on the bytes of all incomplete bodies together, in bodies of the largest size."""


class Guard:
    """ASGI middleware; it also counts requests, and answers HEAD like GET without the body, which FastAPI's routes do not."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: ServerMetrics, routes: frozenset[str]) -> None:
        self._app, self._metrics, self._routes = app, metrics, routes
        # Headers are bytes, and clients differ in how they encode a key with accents.
        key = settings.api_key
        self._keys = None if key is None else (key.encode(), key.encode("latin-1", "replace"))
        self.max_bytes, self._hosts = settings.max_body_bytes, settings.allowed_hosts
        self.unfinished_bytes = 0  # of all bodies together

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._routes else "other"
        begun, wants_body = False, scope["method"] != "HEAD"

        async def counted(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                self._metrics.requests.labels(path, str(message["status"])).inc()
            elif not wants_body:
                message = {**message, "body": b""}
            await send(message)

        headers = Headers(scope=scope)
        refused = self._refused(scope["path"], headers)
        if refused is not None:
            await refused.response()(scope, receive, counted)
            return
        body = _Body(receive, self)
        try:
            await self._app(scope if wants_body else {**scope, "method": "GET"}, body.receive, counted)
        except asyncio.CancelledError:  # the grace time is over
            if begun:  # the connection is closed
                return
            await shutting_down().response()(scope, receive, counted)
        except Exception:
            if begun:
                raise
            log.exception("a request failed")
            await request_failed().response()(scope, receive, counted)
        finally:
            body.end()

    def _refused(self, path: str, headers: Headers) -> ApiError | None:
        host = headers.get("host", "")
        if self._hosts is not None and host and _name(host) not in self._hosts:
            return ApiError(
                f"this server is not called {_name(host)[:100]!r}: the operator may allow it with --allow-host",
                status=403,
                code="host_not_allowed",
            )
        if self._keys is not None and path not in OPEN_PATHS:
            scheme, _, given = headers.get("authorization", "").encode("latin-1").partition(b" ")
            same = [secrets.compare_digest(given.strip(), key) for key in self._keys]
            if scheme.lower() != b"bearer" or not any(same):
                return ApiError(
                    "a valid API key is needed: send it as 'Authorization: Bearer KEY'",
                    status=401,
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self.max_bytes:
            return ApiError(self.too_large, status=413, code="body_too_large")
        return None

    @property
    def too_large(self) -> str:
        return f"the body is larger than {self.max_bytes} bytes"


class _Body:
    """Counts the bytes of a body, whose length need not be declared, and the seconds until it is complete."""

    def __init__(self, receive: Receive, guard: Guard) -> None:
        self._receive, self._guard = receive, guard
        self._held, self._complete = 0, False
        self._deadline = asyncio.get_running_loop().time() + BODY_SECONDS

    async def receive(self) -> Message:
        """Receive the next part. Raises HTTPException for a body too large or too slow, and if there are too many."""
        if self._complete:
            return await self._receive()
        left = self._deadline - asyncio.get_running_loop().time()
        try:
            message = await asyncio.wait_for(self._receive(), max(0.0, left))
        except asyncio.TimeoutError:
            raise HTTPException(
                408, f"the body did not come within {BODY_SECONDS:g} s", {"Connection": "close"}
            ) from None
        guard, more = self._guard, len(message.get("body", b""))
        if self._held + more > guard.max_bytes:
            raise HTTPException(413, guard.too_large)
        if guard.unfinished_bytes + more > MAX_UNFINISHED * guard.max_bytes:
            headers = {"Retry-After": "1", "Connection": "close"}
            raise HTTPException(429, "too many bodies are on their way: try again in a second", headers)
        guard.unfinished_bytes += more
        self._held += more
        if message["type"] != "http.request" or not message.get("more_body", False):
            self.end()
        return message

    def end(self) -> None:
        """End the body, which is complete or was given up."""
        self._complete = True
        self._guard.unfinished_bytes -= self._held
        self._held = 0


def _name(host: str) -> str:
    """Return a Host header without its port: "[::1]:8000" gives "::1"."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].rstrip(".")
