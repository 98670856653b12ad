"""The thread that owns the engine: waiting texts join it, its rounds run, and what they bring is handed out."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter

from layerskip_models.parallel.ranks import RankError
from selfspec.engine.engine import BoundRequest, Engine, GenerationResult, Progress
from selfspec.serve.server_metrics import ServerMetrics
from selfspec.serve.token_logprobs import LogprobRecorder, TokenLogprob

log = logging.getLogger("selfspec.serve")
IDLE_SECONDS = 10.0
"""Without any text, until memory is given back that the next text would use."""
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

    checked: BoundRequest
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


class TooManyError(ValueError):
    """More texts at once than the server ever takes."""

    def __init__(self, texts: int, most: int) -> None:
        super().__init__(f"{texts} texts in one request, this server takes at most {most} at a time: ask for fewer")


class ClosedError(RuntimeError):
    """The server takes no more texts. code: a short name of the reason."""

    def __init__(self, reason: str = "the server is shutting down", code: str = "shutting_down") -> None:
        super().__init__(reason)
        self.code = code


class Scheduler:
    """Runs texts, `batch_size` at a time, first come first served. All methods may be called from any thread.

    explain: says more about the loss of another process, if it can. kept_bytes: says how much memory idle caches take.
    on_idle: called once in the scheduler's thread when there has been no text for `IDLE_SECONDS`.
    """

    def __init__(
        self,
        metrics: ServerMetrics,
        *,
        batch_size: int,
        max_waiting: int,
        make_engine: Callable[[], Engine] = Engine,
        explain: Callable[[RankError], RankError] | None = None,
        kept_bytes: Callable[[], int] = lambda: 0,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self._metrics, self._make_engine, self._explain = metrics, make_engine, explain
        self._kept_bytes, self._on_idle = kept_bytes, on_idle
        self._batch_size, self._max_waiting = batch_size, max_waiting
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._left: set[Job] = set()  # cancelled, and perhaps in the engine
        self._closing = False
        self._failure: RankError | None = None
        self._jobs: dict[int, Job] = {}  # in the engine, by ticket; of the thread alone
        self._job_seconds = 1.0  # of late, from joining to the end
        self._thread = threading.Thread(target=self._run, name="selfspec-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether new texts are taken."""
        return self._thread.is_alive() and not self._closing

    @property
    def failure(self) -> RankError | None:
        """Why the server must end by itself, if it must: another process of its model was lost."""
        return self._failure

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def decoding(self) -> int:
        return len(self._jobs)

    def submit(self, jobs: Iterable[Job]) -> None:
        """Let texts wait for a place, all of them or none. Raises QueueFullError, TooManyError or ClosedError."""
        jobs = [*jobs]
        if len(jobs) > self._batch_size + self._max_waiting:
            raise TooManyError(len(jobs), self._batch_size + self._max_waiting)
        with self._changed:
            if self._closing:
                raise self._closed()
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
        """Cancel what is left, and end the thread. After a failure it is left alone: it may wait for a lost process."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._failure is None:
            self._thread.join()

    def fail(self, failure: RankError) -> None:
        """Let all texts end with an error, now and from now on. The engine's thread may be held up in a round."""
        with self._changed:
            if self._failure is not None:
                return
            failure = failure if self._explain is None else self._explain(failure)
            self._failure, self._closing = failure, True
            self._changed.notify()
            jobs = [*self._jobs.values(), *self._waiting]
            self._waiting.clear()
        self._refuse(jobs, self._closed())

    def _closed(self) -> ClosedError:
        return ClosedError() if self._failure is None else ClosedError(str(self._failure), code="rank_lost")

    def _run(self) -> None:
        patience: float | None = IDLE_SECONDS
        while True:
            with self._changed:
                has_work = self._changed.wait_for(lambda: self._waiting or self._left or self._closing, patience)
            if not has_work:
                self._rest()
                patience = None
                continue
            patience = IDLE_SECONDS
            with self._changed:
                if self._closing:
                    self._refuse([*self._waiting], self._closed())
                    self._waiting.clear()
                    return
                self._drop_waiting()
            try:
                self._run_until_idle()
            except RankError as error:
                self.fail(error)
            except Exception as error:  # the engine as a whole cannot go on: no memory, say
                log.exception("the engine failed")
                self._refuse([*self._jobs.values()], error)
            self._jobs.clear()
            self._metrics.decoding.set(0)
            self._metrics.cache_bytes.set(0)
            self._metrics.kept_bytes.set(self._kept_bytes())

    def _rest(self) -> None:
        try:
            self._on_idle()
        except Exception:  # it may need memory to give back more of it
            log.exception("idle memory could not be given back")
        self._metrics.kept_bytes.set(self._kept_bytes())

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
                self._refuse([job], self._closed())
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
            except RankError as error:
                self.fail(error)
                self._refuse([job], self._closed())
                raise
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
        """Returns an event if it is worth waiting for. Raises the error of a text that concerns all of them."""
        if isinstance(progress.error, RankError):
            raise progress.error
        job = self._jobs[progress.ticket]
        logprobs = None
        if job.recorder is not None and progress.tokens:
            logprobs = job.recorder.committed(progress.tokens)
        now = perf_counter()
        sending = job.deliver(Update(progress=progress, logprobs=logprobs, seconds=now - job.submitted))
        first = job.last_token is None
        self._metrics.progressed(progress, now - (job.last_token or job.submitted), first=first)
        job.last_token = now
        if progress.ended:
            del self._jobs[progress.ticket]
            self._job_seconds += 0.2 * (now - job.joined - self._job_seconds)
            self._metrics.kept_bytes.set(self._kept_bytes())
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
