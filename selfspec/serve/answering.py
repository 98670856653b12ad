"""The choices of one request on their way through the scheduler, as the event loop sees them."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from transformers import PreTrainedTokenizerBase

from selfspec.engine.results import GenerationResult, StepOutput
from selfspec.engine.sampling import NonFiniteLogitsError
from selfspec.serve.api_errors import ApiError
from selfspec.serve.api_responses import Piece, finish_reason
from selfspec.serve.draft_log import DraftLog
from selfspec.serve.scheduler import Scheduler, ServedSequence
from selfspec.serve.structured_output import GrammarError
from selfspec.serve.tools.call_readers import Written

_PAUSE_SECONDS = 0.05
"""Shortest time between two events of a stream. On a CPU, sending and decoding share the cores, so every event slows the
engine down. Rounds of larger models take longer than this and are sent at once."""


class RequestStream:
    """The choices of one request. Made and used in an event loop.

    streamed: `pieces` will be read; otherwise `whole`, for which the loop is woken only when a text ends.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        choices: Sequence[ServedSequence],
        tokenizer: PreTrainedTokenizerBase,
        *,
        streamed: bool,
        show_drafts: bool = False,
    ) -> None:
        self._scheduler, self._choices, self._tokenizer = scheduler, choices, tokenizer
        self._loop = asyncio.get_running_loop()
        self._came: asyncio.Queue[Piece] = asyncio.Queue()
        self._results: dict[int, GenerationResult] = {}
        self._show_drafts, self._streamed = show_drafts, streamed
        self._sent = [threading.Event() for _ in choices]  # set while nothing waits to be sent
        for event in self._sent:
            event.set()
        self._unsent = [Piece(index=index) for index in range(len(choices))]
        self._sent_at = [0.0 for _ in choices]
        for index, choice in enumerate(choices):
            choice.deliver = _Delivery(weakref.ref(self), index)

    @property
    def results(self) -> list[GenerationResult]:
        """Those of complete texts, in the order of the choices."""
        return [self._results[index] for index in sorted(self._results)]

    def cancel(self) -> None:
        """Drop those that are not complete."""
        if len(self._results) < len(self._choices):
            self._scheduler.cancel(self._choices)

    def fail(self, error: ApiError) -> None:
        """End `pieces` with this error, after what has come."""
        self._came.put_nowait(Piece(index=0, steps=[StepOutput(ticket=0, tokens=[], error=error)]))

    async def whole(self) -> list[Piece]:
        """Wait until all texts are complete, and return them. Errors as for `pieces`."""
        parts = [Piece(index=index) for index in range(len(self._choices))]
        async for piece in self.pieces():
            part = parts[piece.index]
            part.text += piece.text
            part.echo += piece.echo
            part.finish = piece.finish
            if piece.written is not None:
                part.written = part.written or Written()
                part.written.add(piece.written)
            if piece.logprobs is not None:
                part.logprobs = [*(part.logprobs or []), *piece.logprobs]
        return parts

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield all choices' texts piece by piece as they come. Raises ApiError (status 400, 500, 503) if one fails."""
        logs = (
            [DraftLog(self._tokenizer, choice.checked.request.prompt) for choice in self._choices]
            if self._show_drafts
            else None
        )
        scored = {
            index: choice.scored.tokens for index, choice in enumerate(self._choices) if choice.scored is not None
        }
        for index, choice in enumerate(self._choices):
            if choice.echo and choice.scored is None:
                yield Piece(index=index, text=choice.echo)
        while len(self._results) < len(self._choices):
            piece = await self._came.get()
            index = piece.index
            self._take(piece)
            if index in scored:  # the first token is there, so the prompt has been read
                echo = self._choices[index].echo
                yield Piece(index=index, text=echo, echo=echo, logprobs=scored.pop(index))
            self._write(piece)
            if logs is not None:
                logs[index].add(piece)
                piece.drafts = logs[index].take(len(piece.text))
            shown = piece.text if piece.written is None else piece.written
            if shown or piece.logprobs or piece.finish or piece.drafts:
                yield piece
            self._sent[index].set()

    def deliver(self, index: int, step: StepOutput) -> threading.Event | None:
        """Take a step of one choice, in the scheduler's thread. See `ServedSequence.deliver`."""
        now = perf_counter()
        choice, piece = self._choices[index], self._unsent[index]
        piece.steps.append(step)
        piece.seconds = now - choice.submitted
        if choice.recorder is not None and step.tokens:
            piece.logprobs = [] if piece.logprobs is None else piece.logprobs
            piece.logprobs += choice.recorder.committed(step.tokens)
        if not step.ended and (not self._streamed or now - self._sent_at[index] < _PAUSE_SECONDS):
            return None
        self._sent_at[index], event = now, self._sent[index]
        reads = event.is_set()  # else the client has not read what came before, and is not waited for
        event.clear()
        try:
            self._loop.call_soon_threadsafe(self._came.put_nowait, piece)
        except RuntimeError:  # the loop is closed: nobody waits
            self._scheduler.cancel(self._choices)
        self._unsent[index] = Piece(index=index)
        return event if reads and not step.ended else None

    def _take(self, piece: Piece) -> None:
        """Note a result. Raises the text's error as ApiError."""
        last = piece.steps[-1]
        error = last.error
        if isinstance(error, ApiError):
            raise error
        if isinstance(error, GrammarError):
            forced = self._choices[piece.index].reader is not None
            raise ApiError(str(error), param="tool_choice" if forced else "response_format")
        if error is not None:
            known = isinstance(error, (NonFiniteLogitsError, MemoryError))
            raise ApiError(str(error) if known else "the text could not be completed", status=500)
        if last.result is not None:
            result = last.result
            if self._choices[piece.index].silent:
                result = replace(result, stats=replace(result.stats, num_new_tokens=0), stop_reason="length")
            self._results[piece.index] = result

    def _write(self, piece: Piece) -> None:
        choice = self._choices[piece.index]
        if choice.silent:
            piece.logprobs = None
        else:
            piece.text = choice.text.push([token for step in piece.steps for token in step.tokens])
        if piece.index in self._results:
            piece.text += choice.text.finish()
            piece.finish = finish_reason(self._results[piece.index].stop_reason)
        if choice.reader is not None:
            piece.written = choice.reader.push(piece.text, [token for step in piece.steps for token in step.tokens])
            if piece.finish is not None:
                reason = self._results[piece.index].stop_reason
                piece.written.add(choice.reader.finish(is_whole=reason == "eos"))
                if piece.finish == "stop" and choice.reader.num_calls:
                    piece.finish = "tool_calls"


@dataclass(frozen=True, slots=True)
class _Delivery:
    """What the scheduler calls with every step of a choice.

    It does not keep the texts alive. `RequestStream` has the choices, and each choice has this: a strong reference would
    close the circle, and a text with all that it holds would stay in memory until Python's next full collection, many
    minutes later.
    """

    texts: weakref.ref[RequestStream]
    index: int

    def __call__(self, step: StepOutput) -> threading.Event | None:
        texts = self.texts()
        return None if texts is None else texts.deliver(self.index, step)  # None: the request has ended
