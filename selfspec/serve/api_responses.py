"""Answers in the form of OpenAI's API, as JSON.

In addition, the usage has `drafted`, `accepted`, `rounds`, and of the drafts those that were copied: `copied` and
`copied_accepted`. Beside the usage of a single text there are its `timings`, with llama.cpp's names. With show_drafts, a
chunk of a stream has a field `selfspec` (see `selfspec.serve.draft_log`).

Log-probabilities are written token by token, because Python's JSON encoder lets no other thread run until it is done.
"""

from __future__ import annotations

import codecs
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import time
from typing import Any, Literal
from uuid import uuid4

from selfspec import __version__
from selfspec.engine.results import GenerationResult, StepOutput
from selfspec.engine.stopping import StopReason
from selfspec.serve.structured_output import Vocabulary
from selfspec.serve.token_logprobs import TokenLogprob
from selfspec.serve.tools.call_readers import Written

FinishReason = Literal["stop", "length", "tool_calls"]
FINGERPRINT = f"selfspec-{__version__}"


def finish_reason(reason: StopReason) -> FinishReason:
    return "length" if reason in ("length", "max_time") else "stop"


class _Json(str):
    """JSON already."""


def _object(fields: dict[str, Any]) -> _Json:
    written = (
        f'"{name}":{value if isinstance(value, _Json) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))}'
        for name, value in fields.items()
    )
    return _Json(f"{{{','.join(written)}}}")


def _list(items: Sequence[str]) -> _Json:
    return _Json(f"[{','.join(items)}]")


def _finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return None if value is None or not math.isfinite(value) else value


def usage(results: Sequence[GenerationResult], choices_per_prompt: int) -> dict[str, Any]:
    """Add up the usage of all texts of a request. A prompt counts once, however many texts it has."""
    stats = [result.stats for result in results]
    prompt = sum(s.num_prompt_tokens for s in stats[::choices_per_prompt])
    new = sum(s.num_new_tokens for s in stats)
    return {
        "completion_tokens": new,
        "prompt_tokens": prompt,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(s.num_reused_tokens for s in stats[::choices_per_prompt])},
        "drafted": sum(s.num_drafted for s in stats),
        "accepted": sum(s.num_accepted for s in stats),
        "copied": sum(s.num_copied for s in stats),
        "copied_accepted": sum(s.num_copied_accepted for s in stats),
        "rounds": sum(s.rounds for s in stats),
    }


def timings(results: Sequence[GenerationResult]) -> dict[str, float | None] | None:
    """Tokens and milliseconds of the one text of a request; None for several, whose times overlap.

    The times are from when the text joins the others, so they leave out its waiting. `predicted_n` counts the first token,
    which reading the prompt yields, as llama.cpp does. A rate without a time is None.
    Source: llama.cpp, `result_timings` in tools/server, which its SPEED-Bench client reads.
    """
    if len(results) != 1:
        return None
    stats = results[0].stats
    prompt_n, predicted_n = stats.num_prompt_tokens - stats.num_reused_tokens, stats.num_new_tokens
    prompt_ms = 1000 * stats.time_to_first_token
    predicted_ms = max(0.0, 1000 * stats.seconds - prompt_ms)
    return {
        "cache_n": stats.num_reused_tokens,
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_second": 1000 * prompt_n / prompt_ms if prompt_ms else None,
        "predicted_n": predicted_n,
        "predicted_ms": predicted_ms,
        "predicted_per_second": 1000 * predicted_n / predicted_ms if predicted_ms else None,
        "draft_n": stats.num_drafted,
        "draft_n_accepted": stats.num_accepted,
    }


@dataclass(slots=True, kw_only=True, eq=False)
class Piece:
    """What several steps brought one choice, or its whole answer.

    seconds: from the request's arrival in the queue to the last step. drafts: the field of a chunk with show_drafts.
    written: what the text is, if it may have tool calls in it. echo: the part of the text that is the prompt's, if `logprobs`
    has the prompt's tokens.
    """

    index: int
    steps: list[StepOutput] = field(default_factory=list)
    seconds: float = 0.0
    logprobs: list[TokenLogprob] | None = None
    text: str = ""
    finish: FinishReason | None = None
    drafts: dict[str, Any] | None = None
    written: Written | None = None
    echo: str = ""


class Answer(ABC):
    """One request's answer. An instance keeps what later chunks depend on."""

    prefix: str
    whole_name: str
    """The name of the answer's type in it."""
    chunk_name: str

    def __init__(self, model: str, vocabulary: Vocabulary) -> None:
        self._id = f"{self.prefix}-{uuid4().hex}"
        self._about: dict[str, Any] = {"created": int(time()), "model": model}
        self._vocabulary = vocabulary

    def whole(self, parts: Sequence[Piece], results: Sequence[GenerationResult], choices_per_prompt: int) -> str:
        """Write the body of an answer that is not streamed."""
        return self._made(self.whole_name, [self._choice(part) for part in parts], _counts(results, choices_per_prompt))

    def chunk(self, piece: Piece) -> str:
        """One chunk of a stream."""
        extra = {} if piece.drafts is None else {"selfspec": piece.drafts}
        return self._made(self.chunk_name, [self._delta(piece)], {"usage": None, **extra})

    def last_chunk(self, results: Sequence[GenerationResult], choices_per_prompt: int) -> str:
        """Write the last chunk of a stream, with the usage and without a choice."""
        return self._made(self.chunk_name, [], _counts(results, choices_per_prompt))

    def _made(self, name: str, choices: Sequence[_Json], more: dict[str, Any]) -> str:
        head = {"id": self._id, "choices": _list(choices), **self._about, "object": name}
        return _object({**head, "system_fingerprint": FINGERPRINT, **more})

    @abstractmethod
    def _choice(self, part: Piece) -> _Json:
        """Make a choice of a whole answer."""

    @abstractmethod
    def _delta(self, part: Piece) -> _Json:
        """Make a choice of a chunk."""


def _counts(results: Sequence[GenerationResult], choices_per_prompt: int) -> dict[str, Any]:
    """Collect the fields of an answer that say what it took."""
    found = timings(results)
    used = {"usage": usage(results, choices_per_prompt)}
    return used if found is None else {**used, "timings": found}


class ChatAnswer(Answer):
    prefix = "chatcmpl"
    whole_name, chunk_name = "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, vocabulary: Vocabulary) -> None:
        super().__init__(model, vocabulary)
        self._begun: set[int] = set()

    def _choice(self, part: Piece) -> _Json:
        found = part.written or Written(part.text)
        message: dict[str, Any] = {"content": found.content or (None if found.calls else ""), "role": "assistant"}
        if found.calls:
            message["tool_calls"] = [
                {"id": call.id, "function": {"arguments": call.arguments, "name": call.name}, "type": "function"}
                for call in found.calls
            ]
        if found.reasoning:
            message["reasoning_content"] = found.reasoning
        head = {"finish_reason": part.finish, "index": part.index, "logprobs": self._logprobs(part.logprobs)}
        return _object({**head, "message": message})

    def _delta(self, part: Piece) -> _Json:
        delta: dict[str, Any] = {}
        if part.written is None or part.written.content:
            delta["content"] = part.text if part.written is None else part.written.content
        if part.index not in self._begun:
            self._begun.add(part.index)
            delta["role"] = "assistant"
        if part.written is not None and part.written.calls:
            delta["tool_calls"] = [
                {
                    "index": call.index,
                    "id": call.id,
                    "function": {"arguments": call.arguments, "name": call.name},
                    "type": "function",
                }
                for call in part.written.calls
            ]
        if part.written is not None and part.written.reasoning:
            delta["reasoning_content"] = part.written.reasoning
        tail = {"index": part.index, "finish_reason": part.finish, "logprobs": self._logprobs(part.logprobs)}
        return _object({"delta": delta, **tail})

    def _logprobs(self, found: Sequence[TokenLogprob] | None) -> _Json | None:
        if found is None:
            return None
        name = self._vocabulary.name_of
        entries = []
        for one in found:
            top = [f'{{{name(token)},"logprob":{json.dumps(_finite(value))}}}' for token, value in one.top]
            value = json.dumps(_finite(one.logprob))
            entries.append(f'{{{name(one.token)},"logprob":{value},"top_logprobs":{_list(top)}}}')
        return _object({"content": _list(entries)})


class CompletionAnswer(Answer):
    prefix = "cmpl"
    whole_name = chunk_name = "text_completion"

    def __init__(self, model: str, vocabulary: Vocabulary) -> None:
        super().__init__(model, vocabulary)
        self._offsets: dict[int, int] = {}
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}

    def _choice(self, part: Piece) -> _Json:
        logprobs = None if part.logprobs is None else self._logprobs(part, part.logprobs)
        head = {"finish_reason": part.finish, "index": part.index, "logprobs": logprobs}
        return _object({**head, "text": part.text})

    _delta = _choice

    def _logprobs(self, part: Piece, found: Sequence[TokenLogprob]) -> dict[str, Any]:
        decoder = self._decoders.setdefault(part.index, codecs.getincrementaldecoder("utf-8")("replace"))
        offset = self._offsets.get(part.index, 0)
        offsets, names, top = [], [], []
        for one in found:
            raw = self._vocabulary.bytes_of(one.token)
            names.append(_shown_in_completions(raw))
            offsets.append(offset)
            # The text shows no special tokens, but for those that a client has written into the prompt.
            if not self._vocabulary.is_special(one.token) or part.echo.startswith(names[-1], offset):
                offset += len(decoder.decode(raw))
            likely = {
                _shown_in_completions(self._vocabulary.bytes_of(token)): _finite(value) for token, value in one.top
            }
            top.append(None if one.logprob is None else likely | {names[-1]: _finite(one.logprob)})
        self._offsets[part.index] = offset
        # The first token of a prompt has null.
        return {
            "text_offset": offsets,
            "token_logprobs": [_finite(one.logprob) for one in found],
            "tokens": names,
            "top_logprobs": top,
        }


def _shown_in_completions(raw: bytes) -> str:
    """Show the text of a token; part of a character as "bytes:\\xe2", since these names are keys and must differ."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
