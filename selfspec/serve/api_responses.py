"""Answers as OpenAI's own types.

In addition, the usage has `drafted`, `accepted`, `rounds`, and of the drafts those that were copied: `copied` and
`copied_accepted`. Beside the usage of a single text there are its `timings`, with llama.cpp's names. With show_drafts, a
chunk of a stream has a field `selfspec` (see `selfspec.serve.draft_log`).
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import time
from typing import Any, Literal, cast
from uuid import uuid4

from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage, ChatCompletionTokenLogprob
from openai.types.chat import chat_completion as whole
from openai.types.chat import chat_completion_chunk as pieces
from openai.types.chat.chat_completion_message_function_tool_call import (
    ChatCompletionMessageFunctionToolCall,
    Function,
)
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_choice import Logprobs
from openai.types.completion_usage import PromptTokensDetails

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


def usage(results: Sequence[GenerationResult], choices_per_prompt: int) -> CompletionUsage:
    """The usage of all texts of a request. A prompt counts once, however many texts it has."""
    stats = [result.stats for result in results]
    prompt = sum(s.num_prompt_tokens for s in stats[::choices_per_prompt])
    new = sum(s.num_new_tokens for s in stats)
    reused = sum(s.num_reused_tokens for s in stats[::choices_per_prompt])
    details = PromptTokensDetails(cached_tokens=reused)
    counts: dict[str, Any] = {
        "drafted": sum(s.num_drafted for s in stats),
        "accepted": sum(s.num_accepted for s in stats),
        "copied": sum(s.num_copied for s in stats),
        "copied_accepted": sum(s.num_copied_accepted for s in stats),
        "rounds": sum(s.rounds for s in stats),
    }
    total = prompt + new
    return CompletionUsage(
        prompt_tokens=prompt, completion_tokens=new, total_tokens=total, prompt_tokens_details=details, **counts
    )


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
    written: what the text is, if it may have tool calls in it.
    """

    index: int
    steps: list[StepOutput] = field(default_factory=list)
    seconds: float = 0.0
    logprobs: list[TokenLogprob] | None = None
    text: str = ""
    finish: FinishReason | None = None
    drafts: dict[str, Any] | None = None
    written: Written | None = None


class Answer(ABC):
    """One request's answer. An instance keeps what later chunks depend on."""

    prefix: str
    whole_type: tuple[Any, str]
    """OpenAI's type of the answer, and the name of that type in it."""
    chunk_type: tuple[Any, str]

    def __init__(self, model: str, vocabulary: Vocabulary) -> None:
        self.head: dict[str, Any] = {
            "id": f"{self.prefix}-{uuid4().hex}",
            "created": int(time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        self._vocabulary = vocabulary

    def whole(self, parts: Sequence[Piece], results: Sequence[GenerationResult], choices_per_prompt: int) -> str:
        """The body of an answer that is not streamed, as JSON."""
        kind, name = self.whole_type
        counts = _counts(results, choices_per_prompt)
        made = kind(object=name, choices=[self._choice(part) for part in parts], **counts, **self.head)
        return made.model_dump_json(exclude_unset=True)

    def chunk(self, piece: Piece) -> str:
        """One chunk of a stream, as JSON."""
        kind, name = self.chunk_type
        extra = {} if piece.drafts is None else {"selfspec": piece.drafts}
        made = kind(object=name, choices=[self._delta(piece)], usage=None, **self.head, **extra)
        return made.model_dump_json(exclude_unset=True)

    def last_chunk(self, results: Sequence[GenerationResult], choices_per_prompt: int) -> str:
        """The last chunk of a stream, with the usage and without a choice, as JSON."""
        kind, name = self.chunk_type
        made = kind(object=name, choices=[], **_counts(results, choices_per_prompt), **self.head)
        return made.model_dump_json(exclude_unset=True)

    @abstractmethod
    def _choice(self, part: Piece) -> Any:
        """A choice of a whole answer."""

    @abstractmethod
    def _delta(self, part: Piece) -> Any:
        """A choice of a chunk."""


def _counts(results: Sequence[GenerationResult], choices_per_prompt: int) -> dict[str, Any]:
    """The fields of an answer that say what it took."""
    found = timings(results)
    used = {"usage": usage(results, choices_per_prompt)}
    return used if found is None else {**used, "timings": found}


class ChatAnswer(Answer):
    prefix = "chatcmpl"
    whole_type = ChatCompletion, "chat.completion"
    chunk_type = ChatCompletionChunk, "chat.completion.chunk"

    def __init__(self, model: str, vocabulary: Vocabulary) -> None:
        super().__init__(model, vocabulary)
        self._begun: set[int] = set()

    def _choice(self, part: Piece) -> whole.Choice:
        assert part.finish is not None
        logprobs = None if part.logprobs is None else whole.ChoiceLogprobs(content=self._logprobs(part.logprobs))
        message = ChatCompletionMessage(role="assistant", content=part.text)
        if part.written is not None:
            message.content = part.written.content or (None if part.written.calls else "")
            if part.written.calls:
                message.tool_calls = [
                    ChatCompletionMessageFunctionToolCall(
                        id=call.id, type="function", function=Function(name=call.name, arguments=call.arguments)
                    )
                    for call in part.written.calls
                ]
            if part.written.reasoning:
                message.reasoning_content = part.written.reasoning  # type: ignore[attr-defined]
        return whole.Choice(index=part.index, message=message, finish_reason=part.finish, logprobs=logprobs)

    def _delta(self, part: Piece) -> pieces.Choice:
        delta = pieces.ChoiceDelta(content=part.text) if part.written is None else _delta_of(part.written)
        if part.index not in self._begun:
            self._begun.add(part.index)
            delta.role = "assistant"
        logprobs = None if part.logprobs is None else pieces.ChoiceLogprobs(content=self._logprobs(part.logprobs))
        return pieces.Choice(index=part.index, delta=delta, finish_reason=part.finish, logprobs=logprobs)

    def _logprobs(self, found: Sequence[TokenLogprob]) -> list[ChatCompletionTokenLogprob]:
        def named(token: int) -> dict[str, Any]:
            raw = self._vocabulary.bytes_of(token)
            return {"token": raw.decode("utf-8", errors="replace"), "bytes": [*raw]}

        return [
            ChatCompletionTokenLogprob(
                **named(one.token),
                logprob=cast(float, one.logprob),  # only a completion's prompt has a token without
                top_logprobs=[TopLogprob(**named(token), logprob=value) for token, value in one.top],
            )
            for one in found
        ]


def _delta_of(written: Written) -> pieces.ChoiceDelta:
    delta = pieces.ChoiceDelta()
    if written.content:
        delta.content = written.content
    if written.reasoning:
        delta.reasoning_content = written.reasoning  # type: ignore[attr-defined]
    if written.calls:
        delta.tool_calls = [
            pieces.ChoiceDeltaToolCall(
                index=call.index,
                id=call.id,
                type="function",
                function=pieces.ChoiceDeltaToolCallFunction(name=call.name, arguments=call.arguments),
            )
            for call in written.calls
        ]
    return delta


class CompletionAnswer(Answer):
    prefix = "cmpl"
    whole_type = chunk_type = Completion, "text_completion"

    def __init__(self, model: str, vocabulary: Vocabulary) -> None:
        super().__init__(model, vocabulary)
        self._offsets: dict[int, int] = {}
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}

    def _choice(self, part: Piece) -> CompletionChoice:
        logprobs = None if part.logprobs is None else self._logprobs(part.index, part.logprobs)
        finish: Any = part.finish  # OpenAI sends null until the end, which the type does not allow
        return CompletionChoice.model_construct(
            index=part.index, text=part.text, finish_reason=finish, logprobs=logprobs
        )

    _delta = _choice

    def _logprobs(self, index: int, found: Sequence[TokenLogprob]) -> Logprobs:
        decoder = self._decoders.setdefault(index, codecs.getincrementaldecoder("utf-8")("replace"))
        offset = self._offsets.get(index, 0)
        offsets, names, top = [], [], []
        for one in found:
            raw = self._vocabulary.bytes_of(one.token)
            names.append(_shown_in_completions(raw))
            offsets.append(offset)
            if not self._vocabulary.is_special(one.token):  # special tokens are not in the text
                offset += len(decoder.decode(raw))
            likely = {_shown_in_completions(self._vocabulary.bytes_of(token)): value for token, value in one.top}
            top.append(None if one.logprob is None else likely | {names[-1]: one.logprob})
        self._offsets[index] = offset
        # The first token of a prompt has null, which the type does not allow.
        return Logprobs.model_construct(
            tokens=names,
            token_logprobs=cast(Any, [one.logprob for one in found]),
            top_logprobs=cast(Any, top),
            text_offset=offsets,
        )


def _shown_in_completions(raw: bytes) -> str:
    """The text of a token; part of a character as "bytes:\\xe2", since these names are keys and must differ."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
