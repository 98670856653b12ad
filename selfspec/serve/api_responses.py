"""Answers as OpenAI's own types.

Beyond them: `drafted`, `accepted`, `copied`, `copied_accepted` and `rounds` in the usage (the copied ones are among the
others), and in a chunk of a stream with show_drafts what
`selfspec.serve.draft_log` describes, in a field `selfspec`.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from time import time
from typing import Any, Literal, cast
from uuid import uuid4

from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage, ChatCompletionTokenLogprob
from openai.types.chat import chat_completion as whole
from openai.types.chat import chat_completion_chunk as pieces
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_choice import Logprobs
from openai.types.completion_usage import PromptTokensDetails

from selfspec import __version__
from selfspec.engine.engine import GenerationResult
from selfspec.engine.stopping import StopReason
from selfspec.serve.structured_output import Vocabulary
from selfspec.serve.token_logprobs import TokenLogprob

FinishReason = Literal["stop", "length"]
FINGERPRINT = f"selfspec-{__version__}"


def finish_reason(reason: StopReason) -> FinishReason:
    """OpenAI's name of why a text ended."""
    return "length" if reason in ("length", "max_time") else "stop"


def usage(results: Sequence[GenerationResult], choices_per_prompt: int) -> CompletionUsage:
    """Of all texts of a request; a prompt counts once, however many texts it has."""
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


@dataclass(slots=True, kw_only=True, eq=False)
class Piece:
    """What a stream sends of one choice, or a whole answer."""

    index: int
    text: str
    logprobs: list[TokenLogprob] | None = None
    finish: FinishReason | None = None
    drafts: dict[str, Any] | None = None


class Answer(ABC):
    """One request's answer: its id, and how its parts are written."""

    prefix: str

    def __init__(self, model: str, vocabulary: Vocabulary) -> None:
        self.head: dict[str, Any] = {
            "id": f"{self.prefix}-{uuid4().hex}",
            "created": int(time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        self._vocabulary = vocabulary

    @abstractmethod
    def whole(self, parts: Sequence[Piece], used: CompletionUsage) -> str:
        """The body of an answer that is not streamed, JSON."""

    @abstractmethod
    def chunk(self, piece: Piece | None, used: CompletionUsage | None = None) -> str:
        """One chunk of a stream, JSON; without a piece, the last one, with the usage."""


class ChatAnswer(Answer):
    """Of /v1/chat/completions."""

    prefix = "chatcmpl"

    def __init__(self, model: str, vocabulary: Vocabulary) -> None:
        super().__init__(model, vocabulary)
        self._begun: set[int] = set()

    def whole(self, parts: Sequence[Piece], used: CompletionUsage) -> str:
        choices = []
        for part in parts:
            assert part.finish is not None
            logprobs = None if part.logprobs is None else whole.ChoiceLogprobs(content=self._logprobs(part.logprobs))
            message = ChatCompletionMessage(role="assistant", content=part.text)
            choices.append(
                whole.Choice(index=part.index, message=message, finish_reason=part.finish, logprobs=logprobs)
            )
        answer = ChatCompletion(object="chat.completion", choices=choices, usage=used, **self.head)
        return answer.model_dump_json(exclude_unset=True)

    def chunk(self, piece: Piece | None, used: CompletionUsage | None = None) -> str:
        choices: list[pieces.Choice] = []
        extra: dict[str, Any] = {}
        if piece is not None:
            delta = pieces.ChoiceDelta(content=piece.text)
            if piece.index not in self._begun:
                self._begun.add(piece.index)
                delta.role = "assistant"
            logprobs = None if piece.logprobs is None else pieces.ChoiceLogprobs(content=self._logprobs(piece.logprobs))
            choices.append(pieces.Choice(index=piece.index, delta=delta, finish_reason=piece.finish, logprobs=logprobs))
            extra = {} if piece.drafts is None else {"selfspec": piece.drafts}
        chunk = ChatCompletionChunk(object="chat.completion.chunk", choices=choices, usage=used, **self.head, **extra)
        return chunk.model_dump_json(exclude_unset=True)

    def _logprobs(self, found: Sequence[TokenLogprob]) -> list[ChatCompletionTokenLogprob]:
        bytes_of = self._vocabulary.bytes_of
        return [
            ChatCompletionTokenLogprob(
                token=_shown(bytes_of(one.token)),
                bytes=[*bytes_of(one.token)],
                logprob=cast(float, one.logprob),  # chat answers have no prompt's
                top_logprobs=[
                    TopLogprob(token=_shown(bytes_of(token)), bytes=[*bytes_of(token)], logprob=value)
                    for token, value in one.top
                ],
            )
            for one in found
        ]


class CompletionAnswer(Answer):
    """Of /v1/completions."""

    prefix = "cmpl"

    def __init__(self, model: str, vocabulary: Vocabulary) -> None:
        super().__init__(model, vocabulary)
        self._offsets: dict[int, int] = {}
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}

    def whole(self, parts: Sequence[Piece], used: CompletionUsage) -> str:
        choices = [self._choice(part) for part in parts]
        answer = Completion(object="text_completion", choices=choices, usage=used, **self.head)
        return answer.model_dump_json(exclude_unset=True)

    def chunk(self, piece: Piece | None, used: CompletionUsage | None = None) -> str:
        choices = [] if piece is None else [self._choice(piece)]
        extra: dict[str, Any] = {} if piece is None or piece.drafts is None else {"selfspec": piece.drafts}
        chunk = Completion(object="text_completion", choices=choices, usage=used, **self.head, **extra)
        return chunk.model_dump_json(exclude_unset=True)

    def _choice(self, piece: Piece) -> CompletionChoice:
        logprobs = None if piece.logprobs is None else self._logprobs(piece.index, piece.logprobs)
        finish: Any = piece.finish  # null until the end, as OpenAI sends it; the type knows whole answers only
        return CompletionChoice.model_construct(
            index=piece.index, text=piece.text, finish_reason=finish, logprobs=logprobs
        )

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
        # The first token of a prompt has null, which the type does not know.
        return Logprobs.model_construct(
            tokens=names,
            token_logprobs=cast(Any, [one.logprob for one in found]),
            top_logprobs=cast(Any, top),
            text_offset=offsets,
        )


def _shown(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace")


def _shown_in_completions(raw: bytes) -> str:
    """A part of a character as "bytes:\\xe2": these names are keys, and must differ."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
