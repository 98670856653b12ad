"""Checks before a request reaches the app: the host name, the API key, and limits on a body's size and time. Its log line."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from urllib.parse import quote
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from selfspec.serve.api_errors import CLIENT_LEFT, ApiError, request_failed, shutting_down
from selfspec.serve.serve_options import ServeOptions
from selfspec.serve.server_metrics import ServerMetrics

log = logging.getLogger("selfspec.serve")
access_log = logging.getLogger("selfspec.access")
REQUEST_ID = "x-request-id"  # a client's own, or one of the server's; in the answer and in the log
OPEN_PATHS = ("/health", "/")  # served without a key: the health check, and a page that asks for the key
BODY_SECONDS = 60.0  # time within which a body must be complete
MAX_UNFINISHED = 16  # limit on the bytes of all incomplete bodies together, in bodies of the largest size


class RequestLimits:
    """ASGI middleware; it also counts and logs requests, and answers HEAD like GET without the body, as FastAPI does not."""

    def __init__(self, app: ASGIApp, options: ServeOptions, metrics: ServerMetrics, routes: frozenset[str]) -> None:
        self._app, self._metrics, self._routes = app, metrics, routes
        # Headers are bytes, and clients differ in how they encode a key with accents.
        key = options.api_key
        self._keys = None if key is None else (key.encode(), key.encode("latin-1", "replace"))
        self._max_bytes, self._hosts = options.max_body_bytes, options.hosts
        self._too_large = f"the body is larger than {self._max_bytes} bytes"
        self._unfinished_bytes = 0  # of all bodies together

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._routes else "other"
        begun, wants_body, status, headers = False, scope["method"] != "HEAD", CLIENT_LEFT, Headers(scope=scope)
        request_id = headers.get(REQUEST_ID, "")
        if not re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", request_id):
            request_id = uuid4().hex

        async def counted(message: Message) -> None:
            nonlocal begun, status
            if message["type"] == "http.response.start":
                begun, status = True, message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
                self._metrics.requests.labels(path, str(status)).inc()
            elif not wants_body:
                message = {**message, "body": b""}
            await send(message)

        held, is_complete, loop = 0, False, asyncio.get_running_loop()
        started = loop.time()
        deadline = started + BODY_SECONDS

        def end_body() -> None:
            nonlocal held, is_complete
            self._unfinished_bytes -= held
            held, is_complete = 0, True

        async def limited() -> Message:
            """Receive the next part of the body, whose length need not be declared."""
            nonlocal held
            if is_complete:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(0.0, deadline - loop.time()))
            except asyncio.TimeoutError:
                late = f"the body did not come within {BODY_SECONDS:g} s"
                raise HTTPException(408, late, {"Connection": "close"}) from None
            more = len(message.get("body", b""))
            if held + more > self._max_bytes:
                raise HTTPException(413, self._too_large)
            if self._unfinished_bytes + more > MAX_UNFINISHED * self._max_bytes:
                headers = {"Retry-After": "1", "Connection": "close"}
                raise HTTPException(429, "too many bodies are on their way: try again in a second", headers)
            self._unfinished_bytes += more
            held += more
            if message["type"] != "http.request" or not message.get("more_body", False):
                end_body()
            return message

        refused = self._refused(scope["path"], headers)
        try:
            if refused is not None:
                await refused.response(scope["path"])(scope, receive, counted)
                return
            await self._app(scope if wants_body else {**scope, "method": "GET"}, limited, counted)
        except asyncio.CancelledError:  # the grace time is over
            if begun:  # the connection is closed
                return
            await shutting_down().response(scope["path"])(scope, receive, counted)
        except Exception:
            if begun:
                raise
            log.exception("request %s failed", request_id)
            await request_failed().response(scope["path"])(scope, receive, counted)
        finally:
            end_body()
            state = scope.get("state", {})
            stream = state.pop("stream", None)  # an idle connection would keep it
            texts = [one.stats for one in stream.results] if stream else []
            read = sum(one.num_prompt_tokens for one in texts[:: state.get("n", 1)])
            tokens = f" {read} + {sum(one.num_new_tokens for one in texts)} tokens" if texts else ""
            head = f"{scope['method']} {quote(scope['path'])[:200]} {status}{tokens}"
            access_log.info("%s %.3f s %s", head, loop.time() - started, request_id)

    def _refused(self, path: str, headers: Headers) -> ApiError | None:
        host = headers.get("host", "")
        if self._hosts is not None and host and _name(host) not in self._hosts:
            message = f"this server is not called {_name(host)[:100]!r}: the operator may allow it with --allow-host"
            return ApiError(message, status=403, code="host_not_allowed")
        if self._keys is not None and path not in OPEN_PATHS:
            scheme, _, given = headers.get("authorization", "").encode("latin-1").partition(b" ")
            if scheme.lower() != b"bearer":  # Anthropic's clients
                given = headers.get("x-api-key", "").encode("latin-1")
            same = [secrets.compare_digest(given.strip(), key) for key in self._keys]
            if not any(same):
                message = "a valid API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
                wanted = {"WWW-Authenticate": "Bearer"}
                return ApiError(message, status=401, code="invalid_api_key", headers=wanted)
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._max_bytes:
            return ApiError(self._too_large, status=413, code="body_too_large")
        return None


def _name(host: str) -> str:
    """Return a Host header without its port: "[::1]:8000" gives "::1"."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].rstrip(".")
