"""The texts of one request on their way through the scheduler, as the event loop sees them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from time import perf_counter

from transformers import PreTrainedTokenizerBase

from selfspec.engine.engine import GenerationResult
from selfspec.engine.sampling import NonFiniteLogitsError
from selfspec.serve.api_errors import ApiError
from selfspec.serve.api_responses import Piece, finish_reason
from selfspec.serve.draft_log import DraftLog
from selfspec.serve.scheduler import ClosedError, Job, QueueFullError, Scheduler, TooManyError, Update
from selfspec.serve.structured_output import GrammarError
from selfspec.serve.token_logprobs import TokenLogprob
from selfspec.serve.translation import Choice
from selfspec.serve.trimmed_text import TrimmedText

_PAUSE_SECONDS = 0.05
"""Between two events of a stream, at least. On a CPU the threads that send and those that decode share the cores, so that
every event takes time from the engine. Rounds of larger models take longer than this, and are sent at once."""


class Texts:
    """The choices of one request. Made and used in an event loop.

    streamed: whether `pieces` will be read; else `whole`, for which the loop is woken only at each text's end.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        choices: Sequence[Choice],
        tokenizer: PreTrainedTokenizerBase,
        *,
        streamed: bool,
        show_drafts: bool = False,
    ) -> None:
        self._scheduler, self._choices, self._tokenizer = scheduler, choices, tokenizer
        self._loop = asyncio.get_running_loop()
        self._came: asyncio.Queue[tuple[int, list[Update]]] = asyncio.Queue()
        self._results: dict[int, GenerationResult] = {}
        self._logprobs: dict[int, list[TokenLogprob]] = {i: [] for i, c in enumerate(choices) if c.recorder is not None}
        self._show_drafts, self._streamed = show_drafts, streamed
        self._sent = [threading.Event() for _ in choices]  # whether all that came is sent
        for event in self._sent:
            event.set()
        self._jobs = [self._job(index, choice) for index, choice in enumerate(choices)]

    @property
    def results(self) -> list[GenerationResult]:
        """Of complete texts, in the order of the choices."""
        return [self._results[index] for index in sorted(self._results)]

    def submit(self) -> None:
        """Let them wait for a place. Raises ApiError (status 429 or 503)."""
        try:
            self._scheduler.submit(self._jobs)
        except TooManyError as error:
            raise ApiError(str(error), param="n") from None
        except QueueFullError as error:
            seconds = {"Retry-After": str(error.retry_seconds)}
            raise ApiError(str(error), status=429, code="queue_full", headers=seconds) from None
        except ClosedError as error:
            raise ApiError(str(error), status=503, code=error.code) from None

    def cancel(self) -> None:
        """Free their places, unless they are complete."""
        if len(self._results) < len(self._jobs):
            self._scheduler.cancel(self._jobs)

    async def whole(self) -> list[Piece]:
        """All texts, when they are complete. Raises ApiError (status 500 or 503) if one could not be completed."""
        while len(self._results) < len(self._jobs):
            index, updates = await self._came.get()
            self._take(index, updates)
        parts = []
        for index, choice in enumerate(self._choices):
            result = self._results[index]
            text = self._trimmed(choice)
            written = choice.echo + text.push([] if choice.silent else result.new_tokens)
            written += text.finish()
            logprobs = self._logprobs.get(index)
            if choice.scored is not None:
                logprobs = [*choice.scored.tokens, *(logprobs or [])]
            finish = finish_reason(result.stop_reason)
            parts.append(Piece(index=index, text=written, logprobs=logprobs, finish=finish))
        return parts

    async def pieces(self) -> AsyncIterator[Piece]:
        """The texts piece by piece, of all choices as they come. Errors as of `whole`."""
        texts = [self._trimmed(choice) for choice in self._choices]
        logs = [DraftLog(self._tokenizer) for _ in self._choices] if self._show_drafts else None
        scored = {
            index: choice.scored.tokens for index, choice in enumerate(self._choices) if choice.scored is not None
        }
        for index, choice in enumerate(self._choices):
            if choice.echo and choice.scored is None:
                yield Piece(index=index, text=choice.echo)
        while len(self._results) < len(self._jobs):
            index, updates = await self._came.get()
            self._take(index, updates)
            if index in scored:  # the first token is there, so the prompt is read
                yield Piece(index=index, text=self._choices[index].echo, logprobs=scored.pop(index))
            piece = _joined(index, updates, texts[index], silent=self._choices[index].silent)
            if logs is not None:
                logs[index].add(updates)
                piece.drafts = logs[index].take(len(piece.text))
            if piece.text or piece.logprobs or piece.finish or piece.drafts:
                yield piece
            self._sent[index].set()

    def _trimmed(self, choice: Choice) -> TrimmedText:
        return TrimmedText(self._tokenizer, choice.stops, choice.min_tokens)

    def _job(self, index: int, choice: Choice) -> Job:
        """Its `deliver` runs in the scheduler's thread."""
        held: list[Update] = []
        sent = 0.0

        def deliver(update: Update) -> threading.Event | None:
            nonlocal sent
            held.append(update)
            ended = update.result is not None or update.progress.error is not None
            now = perf_counter()
            if not ended and (not self._streamed or now - sent < _PAUSE_SECONDS):
                return None
            sent, event = now, self._sent[index]
            reads = event.is_set()  # else the client has not taken what came before, and is not waited for
            event.clear()
            try:
                self._loop.call_soon_threadsafe(self._came.put_nowait, (index, [*held]))
            except RuntimeError:  # the loop is closed: nobody waits
                self._scheduler.cancel(self._jobs)
            held.clear()
            return event if reads and not ended else None

        return Job(checked=choice.checked, deliver=deliver, recorder=choice.recorder)

    def _take(self, index: int, updates: list[Update]) -> None:
        last = updates[-1]
        error = last.progress.error
        if isinstance(error, ClosedError):
            raise ApiError(str(error), status=503, code=error.code)
        if isinstance(error, GrammarError):
            raise ApiError(str(error), param="response_format")
        if error is not None:
            known = isinstance(error, (NonFiniteLogitsError, MemoryError))
            raise ApiError(str(error) if known else "the text could not be completed", status=500)
        silent = self._choices[index].silent
        if index in self._logprobs and not self._streamed and not silent:
            self._logprobs[index] += _logprobs(updates) or []
        if last.result is not None:
            stats = replace(last.result.stats, num_new_tokens=0) if silent else last.result.stats
            self._results[index] = replace(
                last.result, stats=stats, stop_reason="length" if silent else last.result.stop_reason
            )


def _joined(index: int, updates: Sequence[Update], text: TrimmedText, *, silent: bool = False) -> Piece:
    """What several rounds brought, as one piece. silent: the end alone is told."""
    tokens = [] if silent else [token for update in updates for token in update.progress.tokens]
    piece = Piece(index=index, text=text.push(tokens), logprobs=None if silent else _logprobs(updates))
    result = updates[-1].result
    if result is not None:
        piece.text += text.finish()
        piece.finish = "length" if silent else finish_reason(result.stop_reason)
    return piece


def _logprobs(updates: Sequence[Update]) -> list[TokenLogprob] | None:
    found = [one for update in updates for one in update.logprobs or ()]
    return found if any(update.logprobs is not None for update in updates) else None
