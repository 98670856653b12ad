"""The bodies of requests. A field that is not here is refused by name, never ignored.

Names and meanings are OpenAI's. Beyond them: top_k, min_p, policy and show_drafts.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from selfspec.serve.server_settings import MOST_CHOICES

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "functions": ([],),
    "modalities": (["text"],),
    "store": (False,),
    "tool_choice": ("none",),
    "tools": ([],),
}
"""Fields of OpenAI's API that are not supported, with the values that ask for nothing."""
Stop = Annotated[str, Field(min_length=1, max_length=1000)]


class Strict(BaseModel):
    """Refuses fields it does not know, and values of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    """include_usage: one more chunk at the end of a stream, with the usage of the whole request."""

    include_usage: bool = False


class JsonSchema(Strict):
    """A schema that the text must follow. strict: accepted, and always so."""

    name: str
    schema_: dict[str, Any] | bool = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class GenerationRequest(Strict):
    """What both kinds of request have.

    temperature: 1 by default, as in OpenAI's API, unless the checkpoint's generation_config says how to sample. 0 is greedy.
    policy: how to speculate, by name. show_drafts: with `stream`, every chunk says which tokens were drafted, and their fate.
    user: accepted; the server has no use for it.
    """

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    policy: Annotated[str, Field(max_length=200)] | None = None
    show_drafts: bool = False
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _not_given(cls, fields: Any) -> Any:
        """A field that is null, or asks for nothing, is as good as left out."""
        if not isinstance(fields, dict):
            raise ValueError("the body must be a JSON object")
        return {
            name: value
            for name, value in fields.items()
            if value is not None and not (name in _NEUTRAL and value in _NEUTRAL[name])
        }

    @model_validator(mode="after")
    def _of_streams(self) -> GenerationRequest:
        if not self.stream and self.stream_options is not None:
            raise ValueError("stream_options needs stream=true")
        if not self.stream and self.show_drafts:
            raise ValueError("show_drafts needs stream=true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class TextPart(Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(GenerationRequest):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _of_chat(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens are two names of one limit: give one")
        return self


Ids = Annotated[list[int], Field(min_length=1)]


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions. prompt: one text, several texts, one list of token ids, or several."""

    prompt: (
        str
        | Ids
        | Annotated[list[str], Field(min_length=1, max_length=MOST_CHOICES)]
        | Annotated[list[Ids], Field(min_length=1, max_length=MOST_CHOICES)]
    )
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one by one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return [*self.prompt]
