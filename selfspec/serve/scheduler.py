"""The thread that owns the engine: it lets waiting texts join, runs rounds, and delivers what they bring."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter

from selfspec import SelfSpecGenerator
from selfspec.engine.engine import BoundRequest, Engine
from selfspec.engine.results import StepOutput
from selfspec.serve.api_errors import ApiError, queue_full, shutting_down
from selfspec.serve.processors import LogprobRecorder, PromptLogprobs, TrimmedText
from selfspec.serve.serve_options import ServeOptions
from selfspec.serve.server_metrics import ServerMetrics
from selfspec.serve.tool_calls import CallReader

log = logging.getLogger("selfspec.serve")
IDLE_SECONDS = 10.0  # after this time without a text, memory that the next text would reuse is given back
_SEND_SECONDS = 0.003
"""Longest wait between two rounds for tokens to be sent. Sending usually takes less than a millisecond."""


@dataclass(slots=True, kw_only=True, eq=False)
class ServedSequence:
    """One text on its way through the server: what to generate, and how to build its answer.

    text: makes text of its tokens. echo: text put in front of it. recorder: keeps log-probabilities. scored: those of the
    prompt's tokens, if the client wants them. silent: the client wants the prompt only; the one token that is generated is
    not shown.
    reader: finds tool calls in its text, if it may have any.
    deliver: called from the scheduler's thread with every step of the text; it must not block. It may return an event that
    is set once somebody has sent what came.
    """

    call: BoundRequest
    text: TrimmedText
    echo: str = ""
    recorder: LogprobRecorder | None = None
    scored: PromptLogprobs | None = None
    silent: bool = False
    reader: CallReader | None = None
    deliver: Callable[[StepOutput], threading.Event | None] = field(init=False)
    submitted: float = field(init=False, default=0.0)
    joined: float = field(init=False, default=0.0)
    last_token: float | None = field(init=False, default=None)


class Scheduler:
    """Runs texts, `batch_size` at a time, first come first served; frees memory when idle. Threads may share it."""

    def __init__(self, generator: SelfSpecGenerator, options: ServeOptions, metrics: ServerMetrics) -> None:
        self._generator, self._metrics = generator, metrics
        self._batch_size, self._max_waiting = options.batch_size, options.max_waiting
        self._changed = threading.Condition()
        self._waiting: deque[ServedSequence] = deque()
        self._left: set[ServedSequence] = set()  # cancelled, perhaps in the engine
        self._closing = False
        self._joined: dict[int, ServedSequence] = {}  # those in the engine, by ticket; used by the thread only
        self._text_seconds = 1.0  # moving average from joining to the end
        self._thread = threading.Thread(target=self._run, name="selfspec-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closing

    def check_room(self, count: int) -> None:
        """Raise ApiError (status 400, 429 or 503) without room for so many texts. To be asked before any work is done."""
        most = self._batch_size + self._max_waiting
        if count > most:
            message = f"{count} texts in one request, this server takes at most {most} at a time: ask for fewer"
            raise ApiError(message, param="n")
        with self._changed:
            if self._closing:
                raise shutting_down()
            free = max(0, self._batch_size - len(self._joined))
            if len(self._waiting) + count > self._max_waiting + free:
                rounds = (len(self._waiting) + count) / self._batch_size
                seconds = max(1, round(rounds * self._text_seconds))
                raise queue_full(f"{len(self._waiting)} texts are waiting already", seconds)

    def submit(self, texts: list[ServedSequence]) -> None:
        """Queue texts, all of them or none. Raises as `check_room`."""
        with self._changed:
            self.check_room(len(texts))
            for text in texts:
                text.submitted = perf_counter()
            self._waiting += texts
            self._metrics.waiting.set(len(self._waiting))
            self._changed.notify()

    def cancel(self, texts: Iterable[ServedSequence]) -> None:
        """Drop texts, waiting or decoding, after the current round. Complete ones are left alone."""
        with self._changed:
            self._left.update(texts)
            self._changed.notify()

    def close(self) -> None:
        """Cancel what is left and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        patience: float | None = IDLE_SECONDS
        while True:
            with self._changed:
                has_work = self._changed.wait_for(lambda: self._waiting or self._left or self._closing, patience)
                if self._closing:
                    _refuse(self._waiting, shutting_down())
                    self._waiting.clear()
                    return
                self._drop_waiting()
            patience = IDLE_SECONDS if has_work else None
            try:
                if has_work:
                    self._run_until_idle()
                else:
                    self._generator.free_idle_memory()  # which may itself need memory
            except Exception as error:  # the engine as a whole failed, for example without memory
                log.exception("the engine failed")
                _refuse(self._joined.values(), error)
            self._joined.clear()
            self._metrics.decoding.set(0)
            self._metrics.cache_bytes.set(0)
            self._show_kept()

    def _run_until_idle(self) -> None:
        """Run one engine until no text is left, then free everything that it holds."""
        with Engine() as engine:
            while self._admit(engine):
                self._metrics.round_texts.observe(len(self._joined))
                self._metrics.cache_bytes.set(engine.cache_bytes)
                sending = [event for output in engine.step() if (event := self._deliver(output))]
                # The next round uses all cores. A thread that wakes up during it to send would wait for a core, and the round
                # then for that core.
                end = perf_counter() + _SEND_SECONDS
                for event in sending:
                    event.wait(max(0.0, end - perf_counter()))

    def _admit(self, engine: Engine) -> bool:
        """Between rounds, drop cancelled texts and let waiting ones join. Returns whether any text is left."""
        with self._changed:
            gone = [ticket for ticket, text in self._joined.items() if text in self._left]
            self._drop_waiting()
            closing = self._closing
        for ticket in [*self._joined] if closing else gone:
            engine.cancel(ticket)
            text = self._joined.pop(ticket)
            self._metrics.cancelled.inc()
            if closing:
                _refuse([text], shutting_down())
        while not closing and len(self._joined) < self._batch_size:
            with self._changed:
                if not self._waiting:
                    break
                text = self._waiting.popleft()
                following = min(len(self._waiting), self._batch_size - len(self._joined) - 1)
                self._metrics.waiting.set(len(self._waiting))
            try:
                text.joined = perf_counter()
                self._joined[engine.join(text.call, following)] = text
            except Exception as error:
                log.exception("a text could not join")
                _refuse([text], error)
        self._metrics.decoding.set(len(self._joined))
        return bool(self._joined)

    def _drop_waiting(self) -> None:
        """Forget cancelled texts that wait. Call with the lock held."""
        if self._left:
            kept = [text for text in self._waiting if text not in self._left]
            self._metrics.cancelled.inc(len(self._waiting) - len(kept))
            self._waiting = deque(kept)
            self._left.clear()
            self._metrics.waiting.set(len(kept))

    def _deliver(self, output: StepOutput) -> threading.Event | None:
        """Deliver an output, and return an event if it is worth waiting for."""
        text = self._joined[output.ticket]
        now = perf_counter()
        first = text.last_token is None  # counted first: who has an answer finds it in the metrics
        self._metrics.progressed(output, now - (text.last_token or text.submitted), first=first)
        sending = text.deliver(output)
        text.last_token = now
        if not output.ended:
            return sending
        del self._joined[output.ticket]
        self._text_seconds += 0.2 * (now - text.joined - self._text_seconds)
        self._show_kept()
        return None

    def _show_kept(self) -> None:
        self._metrics.kept_bytes.set(self._generator.kept_texts.num_bytes)


def _refuse(texts: Iterable[ServedSequence], error: Exception) -> None:
    for text in texts:
        text.deliver(StepOutput(tokens=[], error=error))
