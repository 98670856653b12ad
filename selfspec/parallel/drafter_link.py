"""The second stage's end of the connection, and the process that drafts behind it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Literal

from selfspec.parallel.drafting_stage import run_drafting_stage
from selfspec.parallel.stage_messages import OVER, DraftedRow, DrafterError, End, Failed
from selfspec.parallel.stage_plan import StageLayers

_PINGS = 21
_WAIT_SECONDS = 120.0  # for a single row; a prompt may take longer
_ENDED = "the process that drafts has ended: open the stages again"

StartMethod = Literal["spawn", "fork"]


class DrafterLink:
    """Starts the process that drafts, and ends it with `close`."""

    def __init__(self, stage: StageLayers, cores: Sequence[int] | None, start: StartMethod) -> None:
        context = multiprocessing.get_context(start)
        self._connection, theirs = context.Pipe()
        self.process = context.Process(  # type: ignore[attr-defined]
            target=run_drafting_stage, args=(theirs, stage, cores), daemon=True
        )
        self.process.start()
        theirs.close()
        self._ready = False
        self._broken = False  # a message may have been cut, so nobody knows what comes next

    def wait_until_loaded(self) -> None:
        """Raises what the drafter's loading raised."""
        self.receive(None)
        self._ready = True

    def send(self, said: object) -> None:
        """Raises DrafterError if the drafter has ended, and what pickling raises."""
        if self._broken:
            raise DrafterError(_ENDED)
        with self._uncut():
            self._connection.send(said)

    def has_message(self) -> bool:
        with self._uncut():
            return self._connection.poll()

    def receive(self, seconds: float | None = _WAIT_SECONDS) -> object:
        """What comes next, within so long, None for ever. Raises what the drafter raised; DrafterError if it has ended."""
        found = self._next(seconds)
        if isinstance(found, Failed):
            raise found.error
        return found

    def finish(self) -> int:
        """End the text at hand, if there is one. Returns how many drafts have come that nobody looked at.

        If the drafter has ended, the next text says so.
        """
        unseen = 0
        with suppress(DrafterError):
            self.send(End())
            while (found := self._next()) != OVER:
                unseen += isinstance(found, DraftedRow)
        return unseen

    def handover_seconds(self) -> float:
        """Of a message, one way, measured between two texts."""
        times = []
        for _ in range(_PINGS):
            started = perf_counter()
            self.finish()
            times.append(perf_counter() - started)
        return sorted(times)[_PINGS // 2] / 2

    def close(self) -> None:
        """End the process."""
        if self._ready and not self._broken:
            with suppress(OSError):
                self._connection.send(None)
        else:
            self.process.kill()
        self._connection.close()
        self.process.join(timeout=5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def _next(self, seconds: float | None = _WAIT_SECONDS) -> object:
        with self._uncut():
            if self._connection.poll(seconds):
                return self._connection.recv()
        self._broken = True
        raise DrafterError(f"the process that drafts has not answered for {seconds} seconds: open the stages again")

    @contextmanager
    def _uncut(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            self._broken = True
            raise DrafterError(_ENDED) from error
        except KeyboardInterrupt:
            self._broken = True
            raise
