"""Limits on how long a connection may keep the server waiting: for a request's head, and for the client to read."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as Protocol
else:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol as Protocol

HEAD_SECONDS = 20.0
"""Longest time from a connection, or the end of its last answer, to the end of a request's head."""
TAKEN_SECONDS = 60.0
"""Time within which a client must read some of an answer that waits for it."""
MAX_HEAD_BYTES = 1 << 16
"""Limit on a request's line and headers."""
MAX_REST_BYTES = 64 << 20
"""Limit on the rest of a body that was refused before it was complete."""
MAX_WAITED_FOR = 512
"""Limit on connections that still have to send (the rest of) a request. Beyond it, the one waited for longest is closed."""
_LOOK_SECONDS = 2.0


class PatientProtocol(Protocol):
    """uvicorn's protocol, closing connections that keep it waiting. uvicorn itself waits forever for half a request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since = self._taken_at = self._waited_since = self.loop.time()
        self._unread = self._unsent = 0
        self._next_look = self.loop.call_later(_LOOK_SECONDS, self._look)
        if len(self.connections) > MAX_WAITED_FOR:
            waited_for = [one for one in self.connections if isinstance(one, PatientProtocol) and one._is_waited_for]
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
        """Whether it is the client's turn to send: a request, or the rest of its body."""
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
