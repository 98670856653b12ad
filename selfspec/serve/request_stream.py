"""The texts of one request on their way through the scheduler, as the event loop sees them."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from selfspec.detokenize import DraftStreamer, SourcedText
from selfspec.engine.results import GenerationResult, StepOutput
from selfspec.engine.sampling import NonFiniteLogitsError
from selfspec.serve.api_errors import ApiError
from selfspec.serve.api_responses import Piece
from selfspec.serve.scheduler import Scheduler, ServedSequence
from selfspec.serve.structured_output import GrammarError

_PAUSE_SECONDS = 0.05
"""Shortest time between two events of a stream. On a CPU, sending and decoding share the cores, so every event slows the
engine down. Rounds of larger models take longer than this and are sent at once."""


class RequestStream:
    """Made and used in an event loop. streamed: `pieces` will be read, else `whole`, which waits until a text ends."""

    def __init__(
        self,
        scheduler: Scheduler,
        texts: Sequence[ServedSequence],
        tokenizer: PreTrainedTokenizerBase,
        *,
        streamed: bool,
        show_drafts: bool = False,
    ) -> None:
        self._scheduler, self._texts, self._streamed = scheduler, texts, streamed
        self._logs = [DraftLog(tokenizer, text.call.request.prompt) for text in texts] if show_drafts else None
        self._loop = asyncio.get_running_loop()
        self._came: asyncio.Queue[Piece] = asyncio.Queue()
        self._results: dict[int, GenerationResult] = {}
        self._sent = [threading.Event() for _ in texts]  # set while nothing waits to be sent
        for event in self._sent:
            event.set()
        self._unsent = [Piece(index=index) for index in range(len(texts))]
        self._sent_at = [0.0 for _ in texts]
        for index, text in enumerate(texts):
            # A strong reference would close a circle, and a text with all that it holds would stay in memory until Python's
            # next full collection, many minutes later.
            text.deliver = partial(_deliver, weakref.ref(self), index)

    @property
    def results(self) -> list[GenerationResult]:
        """Those of complete texts, in the order of the texts."""
        return [self._results[index] for index in sorted(self._results)]

    def cancel(self) -> None:
        """Drop those that are not complete."""
        if len(self._results) < len(self._texts):
            self._scheduler.cancel(self._texts)

    def fail(self, error: ApiError) -> None:
        """End `pieces` with this error, after what has come."""
        self._came.put_nowait(Piece(index=0, steps=[StepOutput(tokens=[], error=error)]))

    async def whole(self) -> list[Piece]:
        """Wait until all texts are complete, and return them. Errors as for `pieces`."""
        parts = [Piece(index=index) for index in range(len(self._texts))]
        async for piece in self.pieces():
            part = parts[piece.index]
            part.text += piece.text
            part.echo += piece.echo
            part.calls += piece.calls
            part.finish, part.stop = piece.finish, piece.stop
            if piece.logprobs is not None:
                part.logprobs = [*(part.logprobs or []), *piece.logprobs]
        return parts

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield all texts piece by piece as they come. Raises ApiError (status 400, 500, 503) if one fails."""
        scored = {index: text.scored.tokens for index, text in enumerate(self._texts) if text.scored is not None}
        for index, text in enumerate(self._texts):
            if text.echo and text.scored is None:
                yield Piece(index=index, text=text.echo)
        while len(self._results) < len(self._texts):
            piece = await self._came.get()
            index = piece.index
            self._take(piece)
            if index in scored:  # the first token is there, so the prompt has been read
                echo = self._texts[index].echo
                yield Piece(index=index, text=echo, echo=echo, logprobs=scored.pop(index))
            self._write(piece)
            if piece.text or piece.calls or piece.logprobs or piece.finish or piece.drafts:
                yield piece
            self._sent[index].set()

    def deliver(self, index: int, step: StepOutput) -> threading.Event | None:
        """Take a step of one text, in the scheduler's thread. See `ServedSequence.deliver`."""
        now = perf_counter()
        text, piece = self._texts[index], self._unsent[index]
        piece.steps.append(step)
        piece.seconds = now - text.submitted
        if text.recorder is not None and step.tokens:
            piece.logprobs = [] if piece.logprobs is None else piece.logprobs
            piece.logprobs += text.recorder.committed(step.tokens)
        if not step.ended and (not self._streamed or now - self._sent_at[index] < _PAUSE_SECONDS):
            return None
        self._sent_at[index], event = now, self._sent[index]
        reads = event.is_set()  # else the client has not read what came before, and is not waited for
        event.clear()
        try:
            self._loop.call_soon_threadsafe(self._came.put_nowait, piece)
        except RuntimeError:  # the loop is closed: nobody waits
            self._scheduler.cancel(self._texts)
        self._unsent[index] = Piece(index=index)
        return event if reads and not step.ended else None

    def _take(self, piece: Piece) -> None:
        """Note a result. Raises the text's error as ApiError."""
        text, last = self._texts[piece.index], piece.steps[-1]
        if isinstance(last.error, ApiError):
            raise last.error
        if isinstance(last.error, GrammarError):
            raise ApiError(str(last.error), param="response_format" if text.reader is None else "tool_choice")
        if last.error is not None:
            known = isinstance(last.error, (NonFiniteLogitsError, MemoryError))
            raise ApiError(str(last.error) if known else "the text could not be completed", status=500)
        if (result := last.result) is not None:
            if text.silent:
                result = replace(result, stats=replace(result.stats, num_new_tokens=0), stop_reason="length")
            self._results[piece.index] = result

    def _write(self, piece: Piece) -> None:
        """Fill in what the client sees."""
        text, result = self._texts[piece.index], self._results.get(piece.index)
        if text.silent:
            piece.logprobs = None
        else:
            piece.text = text.text.push([token for step in piece.steps for token in step.tokens])
        if result is not None:
            piece.text += text.text.finish()
            piece.finish = "length" if result.stop_reason in ("length", "max_time") else "stop"
            piece.stop = text.text.found if piece.finish == "stop" else None
        if self._logs is not None:
            piece.drafts = self._logs[piece.index].add(piece)
        if text.reader is None:
            return
        piece.text, piece.calls = text.reader.push(piece.text)
        if result is not None:
            rest, calls = text.reader.finish(is_whole=result.stop_reason == "eos")
            piece.text += rest
            piece.calls += calls
            if piece.finish == "stop" and text.reader.num_calls:
                piece.finish = "tool_calls"


def _deliver(stream: weakref.ref[RequestStream], index: int, step: StepOutput) -> threading.Event | None:
    found = stream()
    return None if found is None else found.deliver(index, step)  # None: the request has ended


class DraftLog:
    """Keeps tokens with their fates until their text is sent, for the field `selfspec` of chunks (docs/serving.md)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: torch.Tensor) -> None:
        self._pieces = SourcedText()
        self._streamer = DraftStreamer(tokenizer, self._pieces.add)
        self._streamer.put(prompt)

    def add(self, piece: Piece) -> dict[str, Any]:
        """Add what steps brought, and take the field of a chunk with the piece's text."""
        rounds: list[dict[str, int | None]] = []
        for step in piece.steps:
            if (record := step.record) is not None:
                drafted, accepted = record.counted_drafts
                copied, _ = record.counted_copies
                counts = {"drafted": drafted, "accepted": accepted, "copied": copied}
                rounds.append({"exit_layer": record.exit_layer, **counts})
                self._streamer.on_round(record)
            self._streamer.put(torch.tensor(step.tokens, dtype=torch.int64))
            if step.result is not None:
                self._streamer.end()
        taken = self._pieces.take(len(piece.text))
        fates: dict[str, dict[str, Any]] = {"copied": {"fate": "accepted", "copied": True}}
        pieces = [{"text": text, **fates.get(fate, {"fate": fate})} for text, fate in taken]
        tokens = sum(len(step.tokens) for step in piece.steps)
        return {"pieces": pieces, "rounds": rounds, "tokens": tokens, "seconds": piece.seconds}
