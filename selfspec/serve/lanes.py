"""Threads for work whose length a client chooses, so that it neither blocks the event loop nor takes all the time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from selfspec.serve.api_errors import queue_full

T = TypeVar("T")
SMALL_BODY = 1 << 14
"""Bytes of a request that can be parsed or tokenised within a few milliseconds."""
LARGE_BODY = 1 << 17
"""Above this many bytes, requests are parsed and tokenised one at a time."""
_STACK_BYTES = 16 << 20


class WorkerQueue:
    """One thread, first come first served. While `max_waiting` requests are waiting, further ones get status 429.

    rests: pause before the next work, as a multiple of the time of the last. Parsing holds Python's lock, which the decoding
    thread needs, so without pauses a series of large bodies would slow down everybody.
    """

    def __init__(self, name: str, *, max_waiting: int, rests: float = 0.0) -> None:
        self._name, self._max_waiting, self._rests = name, max_waiting, rests
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"selfspec-{name}")
        self._waiting = 0
        self._rested = 0.0
        self._pool.submit(int)  # starts the thread now, with the stack size of now

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread and return its result. Raises ApiError (status 429) if too many are waiting."""
        if self._waiting >= self._max_waiting:
            raise queue_full(f"{self._waiting} {self._name} are waiting already")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._timed, work)
        finally:
            self._waiting -= 1

    async def run_by_size(self, size: int, work: Callable[[], T], *, is_quick: bool = True) -> T:
        """Run `work` on a body of `size` bytes: at once if it is small, in any thread, or in this one. Raises as `run`.

        is_quick: a small body is little work, which a thread would only delay.
        """
        if is_quick and size <= SMALL_BODY:
            return work()
        return await (asyncio.to_thread(work) if size <= LARGE_BODY else self.run(work))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _timed(self, work: Callable[[], T]) -> T:
        time.sleep(max(0.0, self._rested - time.monotonic()))
        started = time.thread_time()
        try:
            return work()
        finally:
            self._rested = time.monotonic() + self._rests * (time.thread_time() - started)


class WorkerQueues:
    """bodies: parsing large bodies. prompts: tokenising large prompts, and requests for many texts.

    schemas: requests with a new schema.
    """

    def __init__(self) -> None:
        before = threading.stack_size(_STACK_BYTES)  # a grammar's compiler is recursive
        try:
            self.bodies = WorkerQueue("large requests", max_waiting=32, rests=3.0)
            self.prompts = WorkerQueue("large prompts", max_waiting=32)
            self.schemas = WorkerQueue("schemas", max_waiting=16)
        finally:
            threading.stack_size(before)

    def close(self) -> None:
        for lane in (self.bodies, self.prompts, self.schemas):
            lane.close()
