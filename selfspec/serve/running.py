"""Running the app: one process and one event loop, connections that may not be kept waiting, memory, and an orderly end."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as Protocol
else:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol as Protocol

HEAD_SECONDS = 20.0  # longest time from a connection, or the end of its last answer, to the end of a request's head
TAKEN_SECONDS = 60.0  # time within which a client must read some of an answer that waits for it
MAX_HEAD_BYTES = 1 << 16  # limit on a request's line and headers
MAX_REST_BYTES = 64 << 20  # limit on the rest of a body that was refused before it was complete
MAX_WAITED_FOR = 512
"""Limit on connections that still have to send (the rest of) a request. Beyond it, the one waited for longest is closed."""
TRIM_SECONDS = 10.0  # pause between two trims, which take 10 to 30 ms of one core after a burst
_LOOK_SECONDS = 2.0


def open_socket(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 takes a free one. Raises ValueError for an address that cannot be used."""
    if not host.strip():  # the system takes it for all addresses
        raise ValueError("the address to listen on is empty: give --host 127.0.0.1, or 0.0.0.0 for all addresses")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        why = str(error.strerror).partition(" (")[0]
        where = f"{host}, port {port}: choose others with --host and --port (0 takes a free one)"
        raise ValueError(f"{why}: {where}") from None


def make_server(app: FastAPI, *, grace_seconds: int, on_start: Callable[[], object] = lambda: None) -> uvicorn.Server:
    """Make a server that runs until SIGTERM or Ctrl-C and then finishes its requests. on_start: called when it serves."""
    more: dict[str, Any] = {"ws": "none", "log_level": "warning", "server_header": False}
    config = uvicorn.Config(app, http=TimeoutProtocol, timeout_graceful_shutdown=grace_seconds, **more)

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                on_start()

    return Server(config)


class TimeoutProtocol(Protocol):
    """uvicorn's protocol, closing connections that keep it waiting. uvicorn itself waits forever for half a request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since = self._taken_at = self._waited_since = self.loop.time()
        self._unread = self._unsent = 0
        self._next_look = self.loop.call_later(_LOOK_SECONDS, self._look)
        if len(self.connections) > MAX_WAITED_FOR:
            waited_for = [one for one in self.connections if isinstance(one, TimeoutProtocol) and one._is_waited_for]
            if len(waited_for) > MAX_WAITED_FOR:
                min(waited_for, key=lambda one: one._waited_since).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._next_look.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._unread = 0 if self._is_answering else self._unread + len(data)
        cycle: Any = self.cycle
        # A client reads a refusal only after it has sent its body, so the rest of that is received and dropped.
        if self._unread > (MAX_REST_BYTES if cycle is not None and cycle.more_body else MAX_HEAD_BYTES):
            self.transport.abort()

    @property
    def _is_answering(self) -> bool:
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    @property
    def _is_waited_for(self) -> bool:
        """Return whether it is the client's turn to send: a request, or the rest of its body."""
        cycle: Any = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body

    def _look(self) -> None:
        now, unsent = self.loop.time(), self.transport.get_write_buffer_size()
        if self._is_answering:
            self._idle_since = now
        if not self._is_waited_for:
            self._waited_since = now
        if not unsent or unsent != self._unsent:
            self._taken_at = now
        self._unsent = unsent
        if now - self._idle_since > HEAD_SECONDS or now - self._taken_at > TAKEN_SECONDS:
            self.transport.abort()
        else:
            self._next_look = self.loop.call_later(_LOOK_SECONDS, self._look)


def find_trim() -> Callable[[int], object] | None:
    """glibc's malloc_trim; None if there is none (musl, macOS, Windows). It runs without Python's lock."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    trim: Callable[[int], object] | None = getattr(library, "malloc_trim", None)
    return trim


@asynccontextmanager
async def memory_returned() -> AsyncIterator[None]:
    """Within it, freed memory goes back to the system every few seconds.

    glibc keeps freed memory in several arenas, shared among the threads, and by itself gives back only the free end of an
    arena. Requests of many sizes leave live blocks behind everywhere, so resident memory creeps up to the worst moment of
    every arena. `malloc_trim` gives back free pages anywhere.
    """

    async def trim_again_and_again() -> None:
        while (trim := find_trim()) is not None:
            await asyncio.sleep(TRIM_SECONDS)
            await asyncio.to_thread(trim, 0)

    trimming = asyncio.ensure_future(trim_again_and_again())
    try:
        yield
    finally:
        trimming.cancel()


@asynccontextmanager
async def gc_frozen() -> AsyncIterator[None]:
    """Within it, Python's collector leaves alone what exists now: modules, the model, the app.

    A full collection looks at half a million of such objects while all threads wait (0.3 s), and comes only when a quarter as
    many new ones have survived. Without them it takes milliseconds and comes often.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
