"""Exits that learn while the server has nothing else to do: a thread that takes time for it, and says what came of it."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, sleep

from selfspec.exits.learning import ExitLearner
from selfspec.serve.server_metrics import ServerMetrics

log = logging.getLogger("selfspec.serve")
IDLE_SECONDS = 1.0
"""Without a text for so long, the server is idle. Most clients that send one request after another pause less."""
_LOOK_SECONDS = 0.05  # between two looks at whether a busy server has become idle
_WAIT_SECONDS = 0.5  # between two looks for new rows
_LOWEST_PRIORITY = 19


class ExitLearning:
    """Runs a learner in a thread of its own, from construction to `close`.

    idle_seconds: for how long the server has had no text. share: of one core's time that learning may take while texts are
    decoded; 0 for none.
    """

    def __init__(
        self, learner: ExitLearner, metrics: ServerMetrics, idle_seconds: Callable[[], float], share: float = 0.0
    ) -> None:
        self._learner, self._metrics, self._idle_seconds, self._share = learner, metrics, idle_seconds, share
        self._ended = threading.Event()
        self._resumed = 0.0
        self._thread = threading.Thread(target=self._run, name="selfspec-exits", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """End the thread; a step at hand is dropped."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        if sys.platform == "linux":  # there a thread has a priority of its own, and decoding goes first
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        while not self._ended.wait(_WAIT_SECONDS):
            self._resumed = monotonic()
            try:
                report = self._learner.learn(go_on=self._go_on)
            except Exception:  # the disk is full, say: drafts are made as before, and texts do not suffer
                log.exception("exits could not learn, or not write what they have learned")
                report = self._learner.report
            self._metrics.exits_learned(report)

    def _go_on(self) -> bool:
        """Wait while others need the machine. Returns whether learning goes on."""
        worked = monotonic() - self._resumed
        rest = worked * (1 / self._share - 1) if self._share else float("inf")
        until = monotonic() + rest
        while not self._ended.is_set() and self._idle_seconds() < IDLE_SECONDS and monotonic() < until:
            sleep(min(_LOOK_SECONDS, max(until - monotonic(), 0.0)))
        self._resumed = monotonic()
        return not self._ended.is_set()
