"""One request to a server of OpenAI's API, through the `openai` package, and what came back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Literal

import openai

Endpoint = Literal["completions", "chat"]
NUM_TOP = 5
"""Likeliest tokens that are asked for at each position: what OpenAI's completions allow at most."""
_EVENTS_PER_TOKEN = 8  # a stream with many more events than tokens is given up


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model of a server. url: up to and with `/v1`. fields: what every request holds beside the check's own fields."""

    url: str
    model: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request. prompt: the text, or with "chat" the user's message. seed: None for greedy, else at temperature 1."""

    endpoint: Endpoint
    prompt: str
    max_tokens: int
    seed: int | None = None
    stop: str | None = None
    streamed: bool = False
    logprobs: bool = False


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of an answer as UTF-8, its natural log probability, and the likeliest tokens there with theirs."""

    text: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReply:
    """What came back. tokens: None if the server gave no log probabilities.

    first_seconds, last_seconds: when the first and the last piece of a stream came, on one clock for all requests; None for
        an answer in one piece. error: in one line, if there is no text; status: of HTTP, if there was one.
    """

    text: str = ""
    finish_reason: str | None = None
    tokens: tuple[ScoredToken, ...] | None = None
    first_seconds: float | None = None
    last_seconds: float | None = None
    error: str | None = None
    status: int | None = None

    @property
    def busy(self) -> bool:
        """Whether the server said that it has too much to do, which is no fault of the text."""
        return self.error is not None and self.status in (429, 503)


class ServerClient:
    """Asks one model of one server. Threads may share it. Requests are never repeated."""

    def __init__(self, served: ServedModel, api_key: str, timeout_seconds: float) -> None:
        self.served, self._timeout_seconds = served, timeout_seconds
        self._client = openai.OpenAI(base_url=served.url, api_key=api_key, max_retries=0, timeout=timeout_seconds)

    def close(self) -> None:
        self._client.close()

    def ask(self, question: Question) -> ServerReply:
        """Send it. Whatever goes wrong is in the reply, because how a server fails is part of what is found out."""
        try:
            answer = self._send(question)
            return self._read_stream(answer, question) if question.streamed else _read_whole(answer)
        except openai.APIStatusError as error:
            return ServerReply(error=_one_line(error.message), status=error.status_code)
        except Exception as error:  # of the connection, of JSON, of fields that are missing
            return ServerReply(error=f"{type(error).__name__}: {_one_line(error)}")

    def _send(self, question: Question) -> Any:
        body: dict[str, Any] = {
            "model": self.served.model,
            "max_tokens": question.max_tokens,
            "temperature": 0 if question.seed is None else 1,
            "extra_body": dict(self.served.fields),
        }
        optional = {"seed": question.seed, "stop": question.stop, "stream": question.streamed or None}
        body |= {name: value for name, value in optional.items() if value is not None}
        if question.endpoint == "completions":
            scores: dict[str, Any] = {"logprobs": NUM_TOP} if question.logprobs else {}
            return self._client.completions.create(prompt=question.prompt, **body, **scores)
        scores = {"logprobs": True, "top_logprobs": NUM_TOP} if question.logprobs else {}
        return self._client.chat.completions.create(
            messages=[{"role": "user", "content": question.prompt}], **body, **scores
        )

    def _read_stream(self, answer: Any, question: Question) -> ServerReply:
        begun, times, texts = monotonic(), [], []
        tokens: list[ScoredToken] = []
        finish_reason = None
        limit = _EVENTS_PER_TOKEN * (question.max_tokens + 8)
        with answer:
            for number, event in enumerate(answer):
                if number > limit or monotonic() - begun > self._timeout_seconds:
                    raise ValueError(f"the stream did not end after {number} events")
                for choice in event.choices or ():
                    piece = _text_of(choice)
                    if piece:
                        texts.append(piece)
                        times.append(monotonic())
                    tokens += scored_tokens(choice.to_dict().get("logprobs")) or ()
                    finish_reason = choice.finish_reason or finish_reason
        if finish_reason is None and not texts:
            raise ValueError("the stream held no answer")
        return ServerReply(
            text="".join(texts),
            finish_reason=finish_reason,
            tokens=tuple(tokens) or None,
            first_seconds=times[0] if times else None,
            last_seconds=times[-1] if times else None,
        )


def model_names(url: str, api_key: str, timeout_seconds: float) -> list[str]:
    """What the server says it serves. Raises ValueError, in one line, if it cannot be asked."""
    with openai.OpenAI(base_url=url, api_key=api_key, max_retries=0, timeout=timeout_seconds) as client:
        try:
            return [model.id for model in client.models.list().data]
        except openai.APIStatusError as error:
            raise ValueError(f"{url}/models answers {error.status_code}: {_one_line(error.message)}") from None
        except Exception as error:
            raise ValueError(f"{url}/models cannot be read ({_one_line(error)}): is a server running there?") from None


def _read_whole(answer: Any) -> ServerReply:
    if not answer.choices:
        raise ValueError("the answer has no choices")
    choice = answer.choices[0]
    tokens = scored_tokens(choice.to_dict().get("logprobs"))
    return ServerReply(text=_text_of(choice) or "", finish_reason=choice.finish_reason, tokens=tokens)


def _text_of(choice: Any) -> str | None:
    """Of a completion, a chat answer, or a piece of one."""
    for holder in ("message", "delta"):
        if getattr(choice, holder, None) is not None:
            return getattr(choice, holder).content
    return getattr(choice, "text", None)


def scored_tokens(logprobs: Any) -> tuple[ScoredToken, ...] | None:
    """The field `logprobs` of a choice, in the form of chats or in that of completions; either may come from either route."""
    if not isinstance(logprobs, Mapping):
        return None
    if logprobs.get("content"):
        return tuple(
            ScoredToken(
                _bytes_of(item), item["logprob"], _top((_bytes_of(top), top) for top in item["top_logprobs"] or ())
            )
            for item in logprobs["content"]
        )
    if not logprobs.get("tokens"):
        return None
    tops = logprobs.get("top_logprobs") or [None] * len(logprobs["tokens"])
    return tuple(
        ScoredToken(token.encode(), logprob, tuple((text.encode(), value) for text, value in (top or {}).items()))
        for token, logprob, top in zip(logprobs["tokens"], logprobs["token_logprobs"], tops)
        if logprob is not None
    )


def _top(items: Iterable[tuple[bytes, Mapping[str, Any]]]) -> tuple[tuple[bytes, float], ...]:
    return tuple((text, item["logprob"]) for text, item in items)


def _bytes_of(item: Mapping[str, Any]) -> bytes:
    return bytes(item["bytes"]) if item.get("bytes") else item["token"].encode()


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:300]
