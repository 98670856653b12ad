"""Answers in the form of OpenAI's API, as JSON.

In addition, the usage has `drafted`, `accepted`, `rounds`, and of the drafts those that were copied: `copied` and
`copied_accepted`. Beside the usage of a single text there are its `timings`, with llama.cpp's names. With show_drafts, a
chunk of a stream has a field `selfspec` (see `selfspec.serve.request_stream.DraftLog`).
"""

from __future__ import annotations

import codecs
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import starmap
from time import time
from typing import Any, Literal
from uuid import uuid4

from selfspec import __version__
from selfspec.engine.results import GenerationResult, GenerationStats, StepOutput
from selfspec.serve.api_errors import ApiError
from selfspec.serve.processors import TokenLogprob
from selfspec.serve.structured_output import Vocabulary

FINGERPRINT = f"selfspec-{__version__}"
_LOGPROBS_DEPTH = 5  # in an answer: its choices, one of them, its logprobs, a list of them, one token's


@dataclass(slots=True, kw_only=True, eq=False)
class Piece:
    """What several steps brought one text, or its whole answer.

    seconds: from the request's arrival in the queue to the last step. text: without the calls in it. stop: the stop string
    that ended it. drafts: the field of a chunk with show_drafts. echo: the part of the text that is the prompt's, if
    `logprobs` has the prompt's tokens.
    """

    index: int
    steps: list[StepOutput] = field(default_factory=list)
    seconds: float = 0.0
    logprobs: list[TokenLogprob] | None = None
    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish: Literal["stop", "length", "tool_calls"] | None = None
    stop: str | None = None
    drafts: dict[str, Any] | None = None
    echo: str = ""


def encode(value: Any, depth: int = _LOGPROBS_DEPTH) -> str:
    """Write an answer as JSON, part by part: Python's encoder lets no other thread run until it is done."""
    if depth and isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(name)}:{encode(one, depth - 1)}' for name, one in value.items())}}}"
    if depth and isinstance(value, list):
        return f"[{','.join([encode(one, depth - 1) for one in value])}]"
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def totals(results: Sequence[GenerationResult], texts_per_prompt: int) -> dict[str, Any]:
    """Make the fields `usage` and `timings` of a request. A prompt counts once, however many texts it has.

    Times are given for a single text, since those of several overlap. They are from when the text joins the others, so they
    leave out its waiting. `predicted_n` counts the first token, which reading the prompt yields, as llama.cpp does. A rate
    without a time is None. Source: llama.cpp, `result_timings` in tools/server, which its SPEED-Bench client reads.
    """
    stats = [result.stats for result in results]
    prompt = sum(s.num_prompt_tokens for s in stats[::texts_per_prompt])
    new = sum(s.num_new_tokens for s in stats)
    usage = {
        "completion_tokens": new,
        "prompt_tokens": prompt,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(s.num_reused_tokens for s in stats[::texts_per_prompt])},
        "drafted": sum(s.num_drafted for s in stats),
        "accepted": sum(s.num_accepted for s in stats),
        "copied": sum(s.num_copied for s in stats),
        "copied_accepted": sum(s.num_copied_accepted for s in stats),
        "rounds": sum(s.rounds for s in stats),
    }
    if len(stats) != 1:
        return {"usage": usage}
    cached, prompt_ms = stats[0].num_reused_tokens, 1000 * stats[0].time_to_first_token
    new_ms = max(0.0, 1000 * stats[0].seconds - prompt_ms)
    timings = {
        "cache_n": cached,
        "prompt_n": prompt - cached,
        "prompt_ms": prompt_ms,
        "prompt_per_second": 1000 * (prompt - cached) / prompt_ms if prompt_ms else None,
        "predicted_n": new,
        "predicted_ms": new_ms,
        "predicted_per_second": 1000 * new / new_ms if new_ms else None,
        "draft_n": stats[0].num_drafted,
        "draft_n_accepted": stats[0].num_accepted,
    }
    return {"usage": usage, "timings": timings, "metrics": {"speculative_decoding": _acceptance(stats[0])}}


def _acceptance(stats: GenerationStats) -> dict[str, Any]:
    """Say of one text what vLLM does with --per-request-spec-decode-metrics. A step is a round that drafted anything."""
    steps, longest = sum(stats.rounds_by_accepted.values()), max(stats.rounds_by_length, default=0)
    return {
        "mean_acceptance_length": 1 + stats.num_accepted / max(1, steps),
        "draft_acceptance_rate": stats.num_accepted / max(1, stats.num_drafted),
        "acceptance_histogram": [stats.rounds_by_accepted.get(count, 0) for count in range(longest + 1)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": stats.num_accepted,
        "num_draft_tokens": stats.num_drafted,
        "num_spec_tokens": longest,
    }


class _Answer:
    """Write one request's answer. An instance keeps what later events of a stream depend on.

    request: the body. prompt_tokens: of one text. ping: sent while a stream waits. repeats_logprobs: the last events of the
    stream have those of the whole text.
    """

    prefix: str
    ping = ": waiting\n\n"
    repeats_logprobs = False

    def __init__(self, model: str, vocabulary: Vocabulary, request: Any, prompt_tokens: int) -> None:
        self._id, self._created, self._model = f"{self.prefix}{uuid4().hex}", int(time()), model
        self._vocabulary, self._request, self._prompt_tokens = vocabulary, request, prompt_tokens

    def _logprobs(self, found: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        def named(token: int, value: float | None) -> dict[str, Any]:
            return {**self._vocabulary.name_of(token), "logprob": _finite(value)}

        return [{**named(one.token, one.logprob), "top_logprobs": [*starmap(named, one.top)]} for one in found]


class ChoicesAnswer(_Answer, ABC):
    """An answer with a choice for each text, and chunks of one choice each."""

    whole_name: str
    """The name of the answer's type in it."""
    chunk_name: str

    def whole(self, parts: Sequence[Piece], results: Sequence[GenerationResult], texts_per_prompt: int) -> str:
        """Write the body of an answer that is not streamed."""
        return self._written(self.whole_name, [*map(self._choice, parts)], totals(results, texts_per_prompt))

    def chunk(self, piece: Piece) -> str:
        """Write the events of a piece of a stream."""
        extra = {} if piece.drafts is None else {"selfspec": piece.drafts}
        return f"data: {self._written(self.chunk_name, [self._delta(piece)], {'usage': None, **extra})}\n\n"

    def last_chunk(self, results: Sequence[GenerationResult], texts_per_prompt: int, shows_usage: bool) -> str:
        """Write the events that end a stream. shows_usage: the client asks for it; other APIs always have it."""
        if not shows_usage:
            return "data: [DONE]\n\n"
        return f"data: {self._written(self.chunk_name, [], totals(results, texts_per_prompt))}\n\ndata: [DONE]\n\n"

    def failure(self, error: ApiError) -> str:
        """Write the events that end a stream after an error."""
        return f"data: {encode(error.body())}\n\ndata: [DONE]\n\n"

    def _written(self, name: str, choices: list[dict[str, Any]], more: dict[str, Any]) -> str:
        head = {"id": self._id, "choices": choices, "created": self._created, "model": self._model, "object": name}
        return encode({**head, "system_fingerprint": FINGERPRINT, **more})

    @abstractmethod
    def _choice(self, part: Piece) -> dict[str, Any]:
        """Make a choice of a whole answer."""

    def _delta(self, part: Piece) -> dict[str, Any]:
        """Make a choice of a chunk, which is like that of a whole answer unless a class says otherwise."""
        return self._choice(part)


class ChatAnswer(ChoicesAnswer):
    prefix = "chatcmpl-"
    whole_name, chunk_name = "chat.completion", "chat.completion.chunk"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._num_calls: dict[int, int] = {}  # of each text that has begun

    def _choice(self, part: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"content": part.text or (None if part.calls else ""), "role": "assistant"}
        if part.calls:
            message["tool_calls"] = part.calls
        head = {"finish_reason": part.finish, "index": part.index, "logprobs": self._content(part.logprobs)}
        return {**head, "message": message}

    def _delta(self, part: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if part.text or not part.calls:
            delta["content"] = part.text
        if part.index not in self._num_calls:
            self._num_calls[part.index] = 0
            delta["role"] = "assistant"
        if part.calls:
            first = self._num_calls[part.index]
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(part.calls, first)]
            self._num_calls[part.index] += len(part.calls)
        tail = {"index": part.index, "finish_reason": part.finish, "logprobs": self._content(part.logprobs)}
        return {"delta": delta, **tail}

    def _content(self, found: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        return None if found is None else {"content": self._logprobs(found)}


class CompletionAnswer(ChoicesAnswer):
    prefix = "cmpl-"
    whole_name = chunk_name = "text_completion"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._offsets: dict[int, int] = {}
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}

    def _choice(self, part: Piece) -> dict[str, Any]:
        logprobs = None if part.logprobs is None else self._scores(part, part.logprobs)
        return {"finish_reason": part.finish, "index": part.index, "logprobs": logprobs, "text": part.text}

    def _scores(self, part: Piece, found: Sequence[TokenLogprob]) -> dict[str, Any]:
        decoder = self._decoders.setdefault(part.index, codecs.getincrementaldecoder("utf-8")("replace"))
        offset = self._offsets.get(part.index, 0)
        offsets, names, top, bytes_of = [], [], [], self._vocabulary.bytes_of
        for one in found:
            raw = bytes_of(one.token)
            names.append(_shown_in_completions(raw))
            offsets.append(offset)
            # The text shows special tokens only where a client has written them into the prompt.
            if one.token not in self._vocabulary.special or part.echo.startswith(names[-1], offset):
                offset += len(decoder.decode(raw))
            likely = {_shown_in_completions(bytes_of(token)): _finite(value) for token, value in one.top}
            top.append(None if one.logprob is None else likely | {names[-1]: _finite(one.logprob)})
        self._offsets[part.index] = offset
        logprobs = [_finite(one.logprob) for one in found]  # the first token of a prompt has null
        return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": names, "top_logprobs": top}


class PartsAnswer(_Answer, ABC):
    """An answer that is a list of texts and calls, and whose stream has events for each of them.

    A whole answer is what its stream adds up to. `_begin` writes the events before all others, `_begin_text`, `_write` and
    `_end_text` those of a text, `_call` those of a call as a chat has it, `_end` those after all others and the whole answer.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._parts: list[dict[str, Any]] = []
        self._begun = self._in_text = False  # the second: the last part is a text that may go on
        self._unsent: list[TokenLogprob] = []
        self._finish: str = "stop"
        self._stop: str | None = None

    def whole(self, parts: Sequence[Piece], results: Sequence[GenerationResult], texts_per_prompt: int) -> str:
        self.chunk(parts[0])
        self._end_parts()
        return self._written(self._end(totals(results, texts_per_prompt))[1])

    def chunk(self, piece: Piece) -> str:
        events = "" if self._begun else self._begin()
        self._begun, self._finish, self._stop = True, piece.finish or self._finish, piece.stop
        self._unsent += piece.logprobs or ()
        self.repeats_logprobs = self.repeats_logprobs or bool(piece.logprobs)
        if piece.text or (self._unsent and self._in_text):
            events += self._text(piece.text)
        for call in piece.calls:
            events += self._close() + self._call(call)
        return events

    def last_chunk(self, results: Sequence[GenerationResult], texts_per_prompt: int, shows_usage: bool) -> str:
        return self._end_parts() + self._end(totals(results, texts_per_prompt))[0]

    def _text(self, text: str) -> str:
        begun = "" if self._in_text else self._begin_text()
        self._in_text = True
        written, self._unsent = self._write(text), []
        return begun + written

    def _close(self) -> str:
        is_open, self._in_text = self._in_text, False
        return self._end_text() if is_open else ""

    def _end_parts(self) -> str:
        return ("" if self._parts else self._text("")) + self._close()

    def _event(self, kind: str, **fields: Any) -> str:
        return f"event: {kind}\ndata: {self._written({'type': kind, **fields})}\n\n"

    def _written(self, value: dict[str, Any]) -> str:
        """Write JSON. Half a character, which a field that is told back may hold, cannot be sent."""
        return encode(value, _LOGPROBS_DEPTH + 2).encode("utf-8", "replace").decode()

    @abstractmethod
    def _begin(self) -> str: ...
    @abstractmethod
    def _begin_text(self) -> str: ...
    @abstractmethod
    def _write(self, text: str) -> str: ...
    @abstractmethod
    def _end_text(self) -> str: ...
    @abstractmethod
    def _call(self, call: dict[str, Any]) -> str: ...
    @abstractmethod
    def _end(self, used: dict[str, Any]) -> tuple[str, dict[str, Any]]: ...
    @abstractmethod
    def failure(self, error: ApiError) -> str: ...


Answer = ChoicesAnswer | PartsAnswer


def _shown_in_completions(raw: bytes) -> str:
    """Show the text of a token; part of a character as "bytes:\\xe2", since these names are keys and must differ."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return None if value is None or not math.isfinite(value) else value
