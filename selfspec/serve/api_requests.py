"""The bodies of requests: OpenAI's names and meanings, some of vLLM's, and our own `policy` and `show_drafts`.

`selfspec.serve.bodies.Strict` says what happens to fields that are not here.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, Field, field_validator, model_validator

from selfspec.options import OPTIONS
from selfspec.serve.bodies import Integer, Strict, wrong_field
from selfspec.serve.server_settings import MAX_CHOICES
from selfspec.serve.tools.tool_requests import MAX_TOOLS, PastCall, Tool, ToolChoice, ToolChoiceField

_MAX_STOPS = 16
_MAX_STOP_IDS = 64
_LONGEST_NAME = 256
NO_TOOLS = "tools go with messages, to /v1/chat/completions: leave out {}"
_OLD_TOOLS = "{} is not supported: give tools"
_TEXT_ONLY = "only text is supported: leave out {}"
OWN_TEMPLATE = "the operator chooses the chat template: leave out {}"
_CONTINUED = "the last message is continued if it is the assistant's, else answered: leave out {}"


def refusals(message: str, *fields: str) -> dict[str, str]:
    """Write the message of each field. message: has {} in place of the field."""
    return {field: message.format(field) for field in fields}


def _one_or_several_stops(value: Any) -> Any:
    """Make a list of stop strings. The error is in plain words; pydantic's would be about two types."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError(f"give a string or a list of up to {_MAX_STOPS}")
    stops = [stop for stop in value if stop is not None]
    if len(stops) > _MAX_STOPS:
        raise ValueError(f"{len(stops)} stop strings: at most {_MAX_STOPS} are supported")
    return stops


def _prompts(value: Any) -> Any:
    """One text, several texts, one list of token ids, or several lists. Checked at once; pydantic would try four types."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("give a text, a list of texts, a list of token ids, or a list of such lists")
    if not value:
        raise ValueError("the prompt is empty: give at least one token to continue")
    if all(type(one) is int for one in value):
        return value
    several = all(type(one) is str for one in value) or all(type(one) is list for one in value)
    if not several:
        raise ValueError("the list mixes types: give a list of texts, a list of token ids, or a list of such lists")
    if len(value) > MAX_CHOICES:
        raise ValueError(f"{len(value)} prompts: at most {MAX_CHOICES} are supported in one request")
    for index, one in enumerate(value):
        if isinstance(one, list) and not (one and all(type(token) is int for token in one)):
            raise ValueError(f"item {index} is not a list of at least one token id")
    return value


def _ranged(name: str, **own: float) -> Any:
    """Give the range of an option of a generation, narrowed by what is given here."""
    allowed = OPTIONS[name][1].allowed
    assert allowed is not None
    bounds: dict[str, Any] = {"ge" if allowed.ends[0] == "[" else "gt": allowed.low, "le": allowed.high, **own}
    return Field(**bounds)


Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Prompt = Annotated[Any, BeforeValidator(_prompts)]


class StreamOptions(Strict):
    """include_usage: send a last chunk with the usage of the whole request."""

    _harmless: ClassVar[frozenset[str]] = frozenset({"include_obfuscation", "continuous_usage_stats"})

    include_usage: bool = False


class JsonSchema(Strict):
    """A schema that the text must follow. strict: has no effect, since the schema is always enforced."""

    name: str
    schema_: dict[str, Any] | bool = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class GenerationRequest(Strict):
    """The fields that both kinds of request have.

    model: may be left out, since a server has one. Another's name is refused.
    temperature: by default 1, as in OpenAI's API, unless the checkpoint's generation_config sets sampling. 0 is greedy.
    ignore_eos: the text continues after the model's end tokens. min_tokens: no end before this many new tokens.
    policy: how to speculate, by name. show_drafts: with `stream`, every chunk says which tokens were drafted, and their fate.
    cache_salt: requests with the same salt may reuse each other's prompts, as in vLLM; without one nothing is shared.
    user: the texts of two users are never shared.
    """

    _harmless: ClassVar[frozenset[str]] = frozenset({
        "metadata", "parallel_tool_calls", "prediction", "priority", "prompt_cache_key", "prompt_cache_retention",
        "reasoning_effort", "request_id", "safety_identifier", "service_tier", "store", "verbosity",
    })  # fmt: skip
    _neutral: ClassVar[dict[str, tuple[object, ...]]] = {
        "add_special_tokens": (True,),
        "best_of": (1,),
        "early_stopping": (False,),
        "function_call": ("none", "auto"),
        "include_stop_str_in_output": (False,),
        "length_penalty": (1, 1.0),
        "modalities": (["text"],),
        "return_tokens_as_token_ids": (False,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "tool_choice": ("none", "auto"),
        "use_beam_search": (False,),
    }
    _reasons: ClassVar[dict[str, str]] = {
        **refusals(_CONTINUED, "add_generation_prompt", "continue_final_message"),
        **refusals(NO_TOOLS, "tool_choice", "tools"),
        **refusals(_OLD_TOOLS, "function_call", "functions"),
        **refusals(OWN_TEMPLATE, "chat_template", "chat_template_kwargs"),
        **refusals(_TEXT_ONLY, "audio", "modalities"),
        **refusals("{} is not supported: response_format takes a JSON schema", "guided_grammar", "guided_regex"),
        "best_of": "best_of is not supported: ask for n texts and choose among them",
        "guided_json": "guided_json is not supported: use response_format",
        "max_new_tokens": "max_new_tokens is called max_tokens here",
        "messages": "messages are not supported here: send them to /v1/chat/completions",
        "prompt": "a chat has no prompt: give messages, or send the prompt to /v1/completions",
        "prompt_logprobs": "prompt_logprobs is not supported: /v1/completions takes echo with logprobs",
        "suffix": "suffix is not supported: the model writes what comes after the prompt, and knows nothing of what follows",
        "use_beam_search": "beam search is not supported: leave out use_beam_search",
        "web_search_options": "this server searches nothing: leave out web_search_options",
    }

    model: str | None = None
    max_tokens: Annotated[Integer, Field(ge=-1)] | None = None
    min_tokens: Annotated[Integer, Field(ge=0)] = 0
    temperature: Annotated[float, _ranged("temperature", le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Integer, Field(ge=-1)] | None = None
    min_p: Annotated[float, _ranged("min_p")] | None = None
    seed: Annotated[Integer, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[Stop], FailFast(), BeforeValidator(_one_or_several_stops)] = Field(default_factory=list)
    stop_token_ids: Annotated[list[Annotated[Integer, Field(ge=0)]], Field(max_length=_MAX_STOP_IDS), FailFast()] = (
        Field(default_factory=list)
    )
    ignore_eos: bool = False
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    n: Annotated[Integer, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    policy: Annotated[str, Field(max_length=200)] | None = None
    show_drafts: bool = False
    user: str | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=_LONGEST_NAME)] | None = None

    @model_validator(mode="after")
    def _agrees(self) -> GenerationRequest:
        if not self.stream and self.stream_options is not None:
            raise wrong_field("stream_options", "stream_options needs stream=true")
        if not self.stream and self.show_drafts:
            raise wrong_field("show_drafts", "show_drafts needs stream=true")
        for name in ("ignore_eos", "min_tokens"):
            if getattr(self, name) and self.response_format is not None and self.response_format.type != "text":
                raise wrong_field(name, f"{name} does not go with response_format: JSON ends where it is complete")
        return self

    @property
    def schema_(self) -> dict[str, Any] | bool | None:
        """The JSON schema that the text must follow; None if any text will do."""
        if isinstance(self.response_format, JsonSchemaFormat):
            return self.response_format.json_schema.schema_
        return {"type": "object"} if isinstance(self.response_format, JsonObjectFormat) else None

    @property
    def num_texts(self) -> int:
        return self.n

    @property
    def limit(self) -> tuple[str, int | None]:
        """This request's name for the maximum number of new tokens, and that number."""
        return "max_tokens", self.max_tokens


class TextPart(Strict):
    _harmless: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    type: Literal["text"]
    text: str

    @field_validator("type", mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        if value != "text":
            raise ValueError(f"only parts of type 'text' are supported, got {str(value)[:40]!r}")
        return value


def _content(value: Any) -> Any:
    if not isinstance(value, (str, list)):
        raise ValueError("give a text, or a list of parts of type 'text'")
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _few(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_MESSAGES:
        raise ValueError(f"{len(value)} messages: at most {MAX_MESSAGES} are supported")
    return value


MAX_MESSAGES = 8192
"""Each takes some .05 ms to check and to render."""
FewMessages = BeforeValidator(_few)


class Message(Strict):
    """One message of a conversation. The template also gets name and reasoning_content.

    tool_calls: those of an assistant. tool_call_id: which of them a message of the role "tool" answers.
    """

    _harmless: ClassVar[frozenset[str]] = frozenset({
        "annotations", "cache_control", "id", "parsed", "provider_specific_fields", "reasoning", "reasoning_details",
        "thinking_blocks",
    })  # fmt: skip
    _reasons: ClassVar[dict[str, str]] = {
        **refusals("{} is not supported: give tool_calls", "function_call"),
        **refusals(_TEXT_ONLY, "audio"),
        "refusal": "a refusal is not read by the model: give it as content, or leave the message out",
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[TextPart], FailFast(), BeforeValidator(_content)]
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[PastCall] | None, Field(max_length=MAX_TOOLS)] = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _may_be_silent(cls, fields: Any) -> Any:
        """Allow an assistant's message without content, which clients send back, and a tool's."""
        if isinstance(fields, dict) and fields.get("role") in ("assistant", "tool") and fields.get("content") is None:
            return {**fields, "content": ""}
        return fields

    @field_validator("role", mode="before")
    @classmethod
    def _is_supported(cls, value: Any) -> Any:
        if value == "function":
            raise ValueError("messages of the role 'function' are not supported: use tools, and the role 'tool'")
        return value

    @model_validator(mode="after")
    def _of_tools(self) -> Message:
        if self.tool_calls is not None and self.role != "assistant":
            raise wrong_field("tool_calls", "tool_calls go with the role 'assistant'")
        if self.tool_call_id is not None and self.role != "tool":
            raise wrong_field("tool_call_id", "tool_call_id goes with the role 'tool'")
        return self

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)

    @property
    def described(self) -> dict[str, Any]:
        """As chat templates take it."""
        found = {**self.model_dump(exclude_none=True, exclude={"tool_calls"}), "content": self.text}
        return (
            found if self.tool_calls is None else {**found, "tool_calls": [call.described for call in self.tool_calls]}
        )


class ChatRequest(GenerationRequest):
    """Body of /v1/chat/completions.

    parallel_tool_calls: false drops all calls of an answer but the first.
    continue_final_message, add_generation_prompt: taken where they say what is done anyway: the last message is continued
        if it is the assistant's, and answered otherwise.
    """

    messages: Annotated[list[Message], Field(min_length=1), FailFast(), FewMessages]
    max_completion_tokens: Annotated[Integer, Field(ge=-1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[Integer, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS), FailFast()] = Field(default_factory=list)
    tool_choice: ToolChoiceField = ToolChoice()
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def _of_chat(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise wrong_field("top_logprobs", "top_logprobs needs logprobs=true")
        for name in ("max_tokens", "max_completion_tokens"):
            if getattr(self, name) == 0:
                raise wrong_field(name, f"{name} must be at least 1")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise wrong_field("max_tokens", "max_tokens and max_completion_tokens are two names of one limit: give one")
        continued = self.messages[-1].role == "assistant"
        for name, done in (("continue_final_message", continued), ("add_generation_prompt", not continued)):
            if getattr(self, name) not in (None, done):
                raise wrong_field(name, _CONTINUED.format(name))
        names = [tool.function.name for tool in self.tools]
        if len({*names}) < len(names):
            raise wrong_field("tools", "two tools have the same name")
        if self.tool_choice.name is not None and self.tool_choice.name not in names:
            raise wrong_field("tool_choice", f"tool_choice names {self.tool_choice.name[:64]!r}, which is not in tools")
        if self.tool_choice.forces and not names:
            raise wrong_field("tool_choice", "tool_choice needs tools")
        if self.tool_choice.forces and (self.ignore_eos or self.min_tokens):
            raise wrong_field(
                "tool_choice", "a call that must be made ends where it is complete: leave out ignore_eos and min_tokens"
            )
        return self

    @property
    def callable_tools(self) -> list[Tool]:
        """Those that the model may call."""
        if self.tool_choice.mode == "none":
            return []
        return [tool for tool in self.tools if self.tool_choice.name in (None, tool.function.name)]

    @property
    def limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().limit


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions. prompt: one text, several texts, one list of token ids, or several."""

    prompt: Prompt
    echo: bool = False
    logprobs: Annotated[Integer, Field(ge=0, le=5)] | None = None

    @model_validator(mode="after")
    def _of_completions(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.scores_prompts:
            raise wrong_field("max_tokens", "max_tokens must be at least 1, or 0 with echo and logprobs")
        return self

    @property
    def num_texts(self) -> int:
        return self.n * len(self.prompts)

    @property
    def scores_prompts(self) -> bool:
        return self.echo and self.logprobs is not None

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return [*self.prompt]
