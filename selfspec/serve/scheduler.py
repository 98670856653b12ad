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
from selfspec.serve.server_metrics import ServerMetrics
from selfspec.serve.server_settings import ServerSettings
from selfspec.serve.token_logprobs import LogprobRecorder, PromptLogprobs
from selfspec.serve.tools.call_readers import CallReader
from selfspec.serve.trimmed_text import TrimmedText

log = logging.getLogger("selfspec.serve")
IDLE_SECONDS = 10.0
"""After this time without a text, memory that the next text would reuse is given back."""
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

    checked: BoundRequest
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
    """Runs texts, `batch_size` at a time, first come first served. All methods may be called from any thread.

    When there was no text for `IDLE_SECONDS`, the generator frees memory.
    """

    def __init__(self, generator: SelfSpecGenerator, settings: ServerSettings, metrics: ServerMetrics) -> None:
        self._generator, self._metrics = generator, metrics
        self._batch_size, self._max_waiting = settings.batch_size, settings.max_waiting
        self._changed = threading.Condition()
        self._waiting: deque[ServedSequence] = deque()
        self._left: set[ServedSequence] = set()  # cancelled, perhaps in the engine
        self._closing = False
        self._joined: dict[int, ServedSequence] = {}  # those in the engine, by ticket; used by the thread only
        self._choice_seconds = 1.0  # moving average from joining to the end
        self._thread = threading.Thread(target=self._run, name="selfspec-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closing

    def check_room(self, texts: int) -> None:
        """Raise ApiError (status 400, 429 or 503) without room for so many texts. To be asked before any work is done."""
        most = self._batch_size + self._max_waiting
        if texts > most:
            message = f"{texts} texts in one request, this server takes at most {most} at a time: ask for fewer"
            raise ApiError(message, param="n")
        with self._changed:
            if self._closing:
                raise shutting_down()
            free = max(0, self._batch_size - len(self._joined))
            if len(self._waiting) + texts > self._max_waiting + free:
                rounds = (len(self._waiting) + texts) / self._batch_size
                seconds = max(1, round(rounds * self._choice_seconds))
                raise queue_full(f"{len(self._waiting)} texts are waiting already", seconds)

    def submit(self, choices: Iterable[ServedSequence]) -> None:
        """Queue texts, all of them or none. Raises as `check_room`."""
        choices = [*choices]
        with self._changed:
            self.check_room(len(choices))
            for choice in choices:
                choice.submitted = perf_counter()
            self._waiting += choices
            self._metrics.waiting.set(len(self._waiting))
            self._changed.notify()

    def cancel(self, choices: Iterable[ServedSequence]) -> None:
        """Drop texts, waiting or decoding, after the current round. Complete ones are left alone."""
        with self._changed:
            self._left.update(choices)
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
                    self._refuse([*self._waiting], shutting_down())
                    self._waiting.clear()
                    return
                self._drop_waiting()
            patience = IDLE_SECONDS if has_work else None
            if not has_work:
                self._rest()
                continue
            try:
                self._run_until_idle()
            except Exception as error:  # the engine as a whole failed, for example without memory
                log.exception("the engine failed")
                self._refuse([*self._joined.values()], error)
            self._joined.clear()
            self._metrics.decoding.set(0)
            self._metrics.cache_bytes.set(0)
            self._show_kept()

    def _rest(self) -> None:
        try:
            self._generator.free_idle_memory()
        except Exception:  # giving memory back may itself need memory
            log.exception("idle memory could not be given back")
        self._show_kept()

    def _show_kept(self) -> None:
        self._metrics.kept_bytes.set(self._generator.kept_texts.num_bytes)

    def _run_until_idle(self) -> None:
        """Run one engine until no text is left, then free everything that it holds."""
        with Engine() as engine:
            while self._admit(engine):
                self._metrics.round_texts.observe(len(self._joined))
                self._metrics.cache_bytes.set(engine.cache_bytes)
                sending = [event for progress in engine.step() if (event := self._deliver(progress))]
                _let_send(sending)

    def _admit(self, engine: Engine) -> bool:
        """Between rounds, drop cancelled texts and let waiting ones join. Returns whether any text is left."""
        with self._changed:
            gone = [ticket for ticket, choice in self._joined.items() if choice in self._left]
            self._drop_waiting()
            closing = self._closing
        for ticket in [*self._joined] if closing else gone:
            engine.cancel(ticket)
            choice = self._joined.pop(ticket)
            self._metrics.cancelled.inc()
            if closing:
                self._refuse([choice], shutting_down())
        while not closing and len(self._joined) < self._batch_size:
            with self._changed:
                if not self._waiting:
                    break
                choice = self._waiting.popleft()
                following = min(len(self._waiting), self._batch_size - len(self._joined) - 1)
                self._metrics.waiting.set(len(self._waiting))
            try:
                choice.joined = perf_counter()
                self._joined[engine.join(choice.checked, following)] = choice
            except Exception as error:
                log.exception("a text could not join")
                self._refuse([choice], error)
        self._metrics.decoding.set(len(self._joined))
        return bool(self._joined)

    def _drop_waiting(self) -> None:
        """Forget cancelled texts that wait. Call with the lock held."""
        if self._left:
            kept = [choice for choice in self._waiting if choice not in self._left]
            self._metrics.cancelled.inc(len(self._waiting) - len(kept))
            self._waiting = deque(kept)
            self._left.clear()
            self._metrics.waiting.set(len(kept))

    def _deliver(self, progress: StepOutput) -> threading.Event | None:
        """Deliver an output, and return an event if it is worth waiting for."""
        choice = self._joined[progress.ticket]
        now = perf_counter()
        sending = choice.deliver(progress)
        first = choice.last_token is None
        self._metrics.progressed(progress, now - (choice.last_token or choice.submitted), first=first)
        choice.last_token = now
        if progress.ended:
            del self._joined[progress.ticket]
            self._choice_seconds += 0.2 * (now - choice.joined - self._choice_seconds)
            self._show_kept()
            return None
        return sending

    def _refuse(self, choices: Iterable[ServedSequence], error: Exception) -> None:
        for choice in choices:
            choice.deliver(StepOutput(ticket=0, tokens=[], error=error))


def _let_send(sending: Iterable[threading.Event]) -> None:
    """Wait until the sending thread is done with these.

    The next round uses all cores. A thread that wakes up during it would wait for a core, and the round then for that core.
    """
    end = perf_counter() + _SEND_SECONDS
    for event in sending:
        event.wait(max(0.0, end - perf_counter()))
