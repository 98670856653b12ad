"""Threads for work whose length a client chooses, so that it neither blocks the event loop nor takes all the time."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

from selfspec.serve.api_errors import queue_full

T = TypeVar("T")
Kind = Literal["large requests", "schemas"]
SMALL_BODY = 1 << 14  # bytes of a request that can be parsed or tokenised within a few milliseconds
LARGE_BODY = 1 << 17  # above this many bytes, requests are parsed and tokenised one at a time
MAX_WAITING = 32  # while so many requests of a kind wait, further ones get status 429


class WorkerQueue:
    """Two threads, first come first served. Requests of one kind take turns, so that none holds both threads."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="selfspec-worker")
        self._turns: dict[Kind, asyncio.Lock] = {"large requests": asyncio.Lock(), "schemas": asyncio.Lock()}
        self._waiting: Counter[Kind] = Counter()
        self._rested = 0.0

    async def run(self, work: Callable[[], T], *, kind: Kind = "large requests", rests: float = 0.0) -> T:
        """Run `work` in a thread and return its result. Raises ApiError (status 429) if too many are waiting.

        rests: pause before the next work, as a multiple of the processor time of this one. Parsing holds Python's lock, which
        the decoding thread needs, so without pauses a series of large bodies would slow down everybody.
        """
        if self._waiting[kind] >= MAX_WAITING:
            raise queue_full(f"{self._waiting[kind]} {kind} are waiting already")

        def timed() -> T:
            started = time.thread_time()
            try:
                return work()
            finally:
                self._rested = max(self._rested, time.monotonic() + rests * (time.thread_time() - started))

        self._waiting[kind] += 1
        try:
            async with self._turns[kind]:
                if rests:
                    await asyncio.sleep(self._rested - time.monotonic())
                return await asyncio.get_running_loop().run_in_executor(self._pool, timed)
        finally:
            self._waiting[kind] -= 1

    async def run_by_size(self, size: int, work: Callable[[], T], *, rests: float = 0.0) -> T:
        """Run `work` on a body of `size` bytes: at once if it is small, in any thread, or as `run`."""
        if size <= SMALL_BODY:
            return work()
        return await (asyncio.to_thread(work) if size <= LARGE_BODY else self.run(work, rests=rests))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
