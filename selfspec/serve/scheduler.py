"""The thread that owns the engine: waiting texts join it, its rounds run, and what they bring is handed out."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter

from selfspec.engine import Checked, Engine, GenerationResult, Progress
from selfspec.serve.server_metrics import ServerMetrics
from selfspec.serve.token_logprobs import LogprobRecorder, TokenLogprob

log = logging.getLogger("selfspec.serve")
_SEND_SECONDS = 0.003
"""The longest wait between two rounds for tokens to be sent, which takes less than a millisecond."""


@dataclass(slots=True, kw_only=True, eq=False)
class Update:
    """What came for a text: tokens with their log-probabilities if asked for, and the end: a result, or why there is none.

    seconds: since the text was submitted.
    """

    progress: Progress
    logprobs: list[TokenLogprob] | None = None
    seconds: float = 0.0

    @property
    def result(self) -> GenerationResult | None:
        return self.progress.result


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A text on its way.

    deliver: called from the scheduler's thread with every update; it must not block. It returns an event if somebody is now
    at work to send what came, which is set when that is done.
    """

    checked: Checked
    deliver: Callable[[Update], threading.Event | None]
    recorder: LogprobRecorder | None = None
    submitted: float = field(default_factory=perf_counter)
    joined: float = 0.0
    last_token: float | None = None


class QueueFullError(RuntimeError):
    """Too many texts are waiting. retry_seconds: when there may be room."""

    def __init__(self, waiting: int, retry_seconds: int) -> None:
        super().__init__(f"{waiting} texts are waiting already: try again in {retry_seconds} seconds")
        self.retry_seconds = retry_seconds


class ClosedError(RuntimeError):
    """The server is shutting down."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


class Scheduler:
    """Runs texts, `batch_size` at a time, first come first served. All methods may be called from any thread."""

    def __init__(
        self, metrics: ServerMetrics, *, batch_size: int, max_waiting: int, make_engine: Callable[[], Engine] = Engine
    ) -> None:
        self._metrics, self._make_engine = metrics, make_engine
        self._batch_size, self._max_waiting = batch_size, max_waiting
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._left: set[Job] = set()  # cancelled, and perhaps in the engine
        self._closing = False
        self._jobs: dict[int, Job] = {}  # in the engine, by ticket; of the thread alone
        self._job_seconds = 1.0  # of late, from joining to the end
        self._thread = threading.Thread(target=self._run, name="selfspec-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether new texts are taken."""
        return self._thread.is_alive() and not self._closing

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def decoding(self) -> int:
        return len(self._jobs)

    def submit(self, jobs: Iterable[Job]) -> None:
        """Let texts wait for a place, all of them or none. Raises QueueFullError or ClosedError."""
        jobs = [*jobs]
        with self._changed:
            if self._closing:
                raise ClosedError
            free = max(0, self._batch_size - len(self._jobs))
            if len(self._waiting) + len(jobs) > self._max_waiting + free:
                rounds = (len(self._waiting) + len(jobs)) / self._batch_size
                raise QueueFullError(len(self._waiting), max(1, round(rounds * self._job_seconds)))
            self._waiting += jobs
            self._metrics.waiting.set(len(self._waiting))
            self._changed.notify()

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Let texts go, waiting or decoding; a round that runs is finished first. Complete ones are left alone."""
        with self._changed:
            self._left.update(jobs)
            self._changed.notify()

    def close(self) -> None:
        """Cancel what is left, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._left or self._closing):
                    self._changed.wait()
                if self._closing:
                    self._refuse([*self._waiting], ClosedError())
                    self._waiting.clear()
                    return
                self._drop_waiting()
            try:
                self._run_until_idle()
            except Exception as error:  # the engine as a whole cannot go on: no memory, say
                log.exception("the engine failed")
                self._refuse([*self._jobs.values()], error)
            self._jobs.clear()
            self._metrics.decoding.set(0)
            self._metrics.cache_bytes.set(0)

    def _run_until_idle(self) -> None:
        """One engine, until nobody is left: all that it holds is then given back."""
        with self._make_engine() as engine:
            while self._admit(engine):
                self._metrics.round_texts.observe(len(self._jobs))
                self._metrics.cache_bytes.set(engine.cache_bytes)
                sending = [event for progress in engine.step() if (event := self._deliver(progress))]
                _let_send(sending)

    def _admit(self, engine: Engine) -> bool:
        """Between rounds: cancelled texts go, waiting ones join. Returns whether there is anything to do."""
        with self._changed:
            gone = [ticket for ticket, job in self._jobs.items() if job in self._left]
            self._drop_waiting()
            closing = self._closing
        for ticket in [*self._jobs] if closing else gone:
            engine.cancel(ticket)
            job = self._jobs.pop(ticket)
            self._metrics.cancelled.inc()
            if closing:
                self._refuse([job], ClosedError())
        while not closing and len(self._jobs) < self._batch_size:
            with self._changed:
                if not self._waiting:
                    break
                job = self._waiting.popleft()
                following = min(len(self._waiting), self._batch_size - len(self._jobs) - 1)
                self._metrics.waiting.set(len(self._waiting))
            try:
                job.joined = perf_counter()
                self._jobs[engine.join(job.checked, following)] = job
            except Exception as error:
                log.exception("a text could not join")
                self._refuse([job], error)
        self._metrics.decoding.set(len(self._jobs))
        return bool(self._jobs)

    def _drop_waiting(self) -> None:
        """Forget cancelled texts that wait. Called with the lock."""
        if self._left:
            kept = [job for job in self._waiting if job not in self._left]
            self._metrics.cancelled.inc(len(self._waiting) - len(kept))
            self._waiting = deque(kept)
            self._left.clear()
            self._metrics.waiting.set(len(kept))

    def _deliver(self, progress: Progress) -> threading.Event | None:
        """Returns an event if it is worth waiting for."""
        job = self._jobs[progress.ticket]
        logprobs = None
        if job.recorder is not None and progress.tokens:
            logprobs = job.recorder.committed(progress.tokens)
        now = perf_counter()
        sending = job.deliver(Update(progress=progress, logprobs=logprobs, seconds=now - job.submitted))
        first = job.last_token is None
        self._metrics.progressed(progress, now - (job.last_token or job.submitted), first=first)
        job.last_token = now
        if progress.result is not None or progress.error is not None:
            del self._jobs[progress.ticket]
            self._job_seconds += 0.2 * (now - job.joined - self._job_seconds)
            return None
        return sending

    def _refuse(self, jobs: Iterable[Job], error: Exception) -> None:
        for job in jobs:
            job.deliver(Update(progress=Progress(ticket=0, tokens=[], error=error)))


def _let_send(sending: Iterable[threading.Event]) -> None:
    """Leave the processor to the thread that sends, until it is done with these.

    The next round takes all cores. A thread that wakes up meanwhile would wait for one, and then the round for the core.
    """
    end = perf_counter() + _SEND_SECONDS
    for event in sending:
        event.wait(max(0.0, end - perf_counter()))
