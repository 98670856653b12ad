"""Running the app: one process, one event loop, and an orderly end."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from selfspec.serve.patience import PatientProtocol


def open_socket(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 takes a free one. Raises OSError if taken, ValueError for an empty address."""
    if not host.strip():  # the system takes it for all addresses
        raise ValueError("the address to listen on is empty: give --host 127.0.0.1, or 0.0.0.0 for all addresses")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)


def run(app: FastAPI, listening: socket.socket, *, grace_seconds: int, on_start: Callable[[], object]) -> None:
    """Serve until SIGTERM or Ctrl-C. Then no new requests are accepted, and running ones have the grace time to finish."""
    make_server(app, grace_seconds=grace_seconds, on_start=on_start).run(sockets=[listening])


def make_server(app: FastAPI, *, grace_seconds: int, on_start: Callable[[], object] = lambda: None) -> uvicorn.Server:
    """on_start: called once when the server accepts requests."""
    config = uvicorn.Config(
        app,
        http=PatientProtocol,
        ws="none",
        log_level="warning",
        timeout_graceful_shutdown=grace_seconds,
        server_header=False,
    )
    return _Server(config, on_start)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_start: Callable[[], object]) -> None:
        super().__init__(config)
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_start()
