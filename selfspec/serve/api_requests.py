"""The bodies of requests: OpenAI's names and meanings, some of vLLM's, and our own `policy` and `show_drafts`."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field, model_validator

from selfspec.serve.api_messages import MAX_TOOLS, TEXT_ONLY, Choice, Message, Tool, ToolChoice
from selfspec.serve.bodies import Integer, Strict, refusals, refuse
from selfspec.serve.schema_check import Grammar
from selfspec.serve.serve_options import MAX_CHOICES

MAX_MESSAGES = 8192  # each takes some .05 ms to check and to render
_MAX_STOPS, _MAX_STOP_IDS, _LONGEST_NAME = 16, 64, 256
_GUIDED = frozenset({"guided_choice", "guided_grammar", "guided_json", "guided_regex"})
_IN_SLASHES = {"/": r"\/", "\n": r"\n"}
OWN_TEMPLATE = "the operator chooses the chat template: leave out chat_template"
_CONTINUED = "the last message is continued if it is the assistant's, else answered: leave out {}"


def _stops(value: Any) -> Any:
    """Make a list of stop strings. The error is in plain words; pydantic's would be about two types."""
    if not isinstance(value, (str, list)):
        raise ValueError(f"give a string or a list of up to {_MAX_STOPS}")
    stops = [value] if isinstance(value, str) else [stop for stop in value if stop is not None]
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
    kinds = {type(one) for one in value}
    if kinds not in ({int}, {str}, {list}):
        raise ValueError("the list mixes types: give a list of texts, a list of token ids, or a list of such lists")
    if kinds != {int} and len(value) > MAX_CHOICES:
        raise ValueError(f"{len(value)} prompts: at most {MAX_CHOICES} are supported in one request")
    for index, one in enumerate(value if kinds == {list} else ()):
        if {type(token) for token in one} != {int}:
            raise ValueError(f"item {index} is not a list of at least one token id")
    if any(max(map(abs, ids)) >= 1 << 63 for ids in ([value] if kinds == {int} else value if kinds == {list} else ())):
        raise ValueError("there is a number that is no token's id")
    return value


Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Stops = Annotated[list[Stop], FailFast(), BeforeValidator(_stops, json_schema_input_type=str | list[str])]
StopTokens = Annotated[list[Annotated[Integer, Field(ge=0)]], Field(max_length=_MAX_STOP_IDS), FailFast()]
Prompts = str | list[str] | list[int] | list[list[int]]
Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
Variables = dict[Name, bool | int | float | Annotated[str, Field(max_length=1000)]]


class StreamOptions(Strict, harmless="include_obfuscation continuous_usage_stats"):
    """include_usage: send a last chunk with the usage of the whole request."""

    include_usage: bool = False


class JsonSchema(Strict):
    """A schema that the text must follow. strict: has no effect, since the schema is always enforced."""

    name: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")  # llama.cpp's place for it

    @model_validator(mode="after")
    def _agrees(self) -> ResponseFormat:
        given = self.schema_ is not None
        is_wrong = (self.type == "json_schema" and not given) != (self.json_schema is not None)
        refuse(
            ("json_schema", is_wrong, "json_schema goes with the type 'json_schema', which needs it"),
            ("schema", given and self.type == "text", "schema goes with the types 'json_object' and 'json_schema'"),
        )
        return self


class StructuredOutputs(Strict):
    """Hold vLLM's field that says which form the text has. json: a schema. grammar: in Lark's form or llama.cpp's."""

    json_: dict[str, Any] | bool | None = Field(default=None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: list[Annotated[str, Field(min_length=1)]] | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _agrees(self) -> StructuredOutputs:
        given = (self.json_, self.json_object or None, self.regex, self.choice, self.grammar)
        if given.count(None) != len(given) - 1:
            raise ValueError("give one of json, json_object, regex, choice and grammar")
        return self

    @property
    def followed(self) -> Grammar | None:
        if self.regex is not None:  # between slashes, a slash or the end of a line would end it
            return "start: /" + re.sub(r"\\.|/|\n", lambda part: _IN_SLASHES.get(part[0], part[0]), self.regex) + "/"
        if self.choice is not None:
            return "start: " + " | ".join(map(json.dumps, self.choice))
        return self.grammar if self.json_ is None else self.json_


_HARMLESS = """
    cache_prompt chat_id conversation_id dry_allowed_length dry_base dry_penalty_last_n dry_sequence_breakers
    dynatemp_exponent id_slot keep_alive metadata mirostat_eta mirostat_tau parallel_tool_calls prediction priority
    prompt_cache_key prompt_cache_retention reasoning reasoning_effort request_id return_progress rid route
    safety_identifier separate_reasoning service_tier session_id store stream_reasoning stream_tool_calls
    timings_per_token tool_stream usage verbosity xtc_threshold
"""
_NEUTRAL_BY_VALUE: tuple[tuple[tuple[object, ...], str], ...] = (
    ((False,), "background disable_reasoning early_stopping echo include_stop_str_in_output moderation no_stop_trim"),
    ((False,), "post_sampling_probs return_token_ids return_tokens_as_token_ids safe_prompt use_beam_search"),
    ((True,), "add_special_tokens detokenize include_reasoning skip_special_tokens spaces_between_special_tokens"),
    ((0,), "dry_multiplier dynatemp_range min_keep mirostat n_probs t_max_predict_ms top_a xtc_probability"),
    ((1,), "best_of length_penalty tfs tfs_z typical_p"),
    ((-1,), "reasoning_budget repeat_last_n truncate_prompt_tokens"),
    (("none", "auto"), "function_call tool_choice"),
    ((["text"],), "modalities"),
)
_NEUTRAL = {name: values for values, names in _NEUTRAL_BY_VALUE for name in names.split()}


_REASONS = {
    **refusals(_CONTINUED, "add_generation_prompt", "continue_final_message"),
    **refusals("tools go with messages, to /v1/chat/completions: leave out {}", "tool_choice", "tools"),
    **refusals("{} is not supported: give tools", "function_call", "functions"),
    "chat_template": OWN_TEMPLATE,
    "chat_template_kwargs": "chat_template_kwargs goes with messages, to /v1/chat/completions",
    **refusals(TEXT_ONLY, "audio", "modalities"),
    **refusals("{} is called max_tokens here", "max_new_tokens", "max_output_tokens", "n_predict"),
    **refusals("{} is not supported: chat_template_kwargs takes what the template knows, such as enable_thinking",
               "disable_reasoning", "reasoning_budget", "thinking", "thinking_token_budget"),
    "best_of": "best_of is not supported: ask for n texts and choose among them",
    "extra_body": "extra_body is an argument of OpenAI's client: put its fields into the body itself",
    "grammar": "grammar is not supported here: put it into structured_outputs",
    "messages": "messages are not supported here: send them to /v1/chat/completions",
    "prompt": "a chat has no prompt: give messages, or send the prompt to /v1/completions",
    "prompt_logprobs": "prompt_logprobs is not supported: /v1/completions takes echo with logprobs",
    "random_seed": "random_seed is called seed here",
    "suffix": "suffix is not supported: the model writes what comes after the prompt, and knows nothing of what follows",
}  # fmt: skip


class GenerationRequest(Strict, harmless=_HARMLESS, neutral=_NEUTRAL, reasons=_REASONS):
    """The fields that both kinds of request have; docs/serving.md says what each means."""

    model: str | None = None
    max_tokens: Annotated[Integer, Field(ge=-1)] | None = None
    min_tokens: Annotated[Integer, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Integer, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[Integer, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stops = Field(default_factory=list)
    stop_token_ids: StopTokens = Field(default_factory=list)
    ignore_eos: bool = False
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    n: Annotated[Integer, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    policy: Annotated[str, Field(max_length=200)] | None = None
    show_drafts: bool = False
    user: str | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=_LONGEST_NAME)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, fields: Any) -> Any:
        """Take other servers' names and places of fields. What is given by both names is refused by the other one."""
        if not isinstance(fields, dict):
            return fields
        if "repetition_penalty" not in fields and "repeat_penalty" in fields:
            fields["repetition_penalty"] = fields.pop("repeat_penalty")
        for place, names in (("chat_template_kwargs", {"enable_thinking"}), ("structured_outputs", _GUIDED)):
            if place not in fields and (found := names & fields.keys()):
                fields[place] = {name.removeprefix("guided_"): fields.pop(name) for name in found}
        return fields

    @model_validator(mode="after")
    def _agrees(self) -> GenerationRequest:
        field, grammar = self.form
        ends = f"does not go with {field}: the text ends where it is complete"
        both = self.structured_outputs is not None and field == "response_format"
        refuse(
            ("stream_options", self.stream_options and not self.stream, "stream_options needs stream=true"),
            ("show_drafts", self.show_drafts and not self.stream, "show_drafts needs stream=true"),
            ("ignore_eos", self.ignore_eos and grammar is not None, f"ignore_eos {ends}"),
            ("min_tokens", self.min_tokens and grammar is not None, f"min_tokens {ends}"),
            ("structured_outputs", both, "response_format and structured_outputs say the same: give one"),
        )
        return self

    @property
    def form(self) -> tuple[str, Grammar | None]:
        """The field that says what the text must follow, and that schema or grammar; None if any text will do."""
        asked, structured = self.response_format, self.structured_outputs
        name, given = "structured_outputs", None if structured is None else structured.followed
        if asked is not None and asked.type != "text":
            name, given = "response_format", asked.schema_ if asked.json_schema is None else asked.json_schema.schema_
        elif structured is None:
            return name, None
        return name, {"type": "object"} if given is None else given

    @property
    def schemas(self) -> list[tuple[str, Grammar]]:
        """The client's own schemas and grammars that the text must follow, each with its field."""
        field, grammar = self.form
        return [] if grammar is None or grammar == {"type": "object"} else [(field, grammar)]

    @property
    def num_texts(self) -> int:
        return self.n

    @property
    def limit(self) -> tuple[str, int | None]:
        """This request's name for the maximum number of new tokens, and that number."""
        return "max_tokens", self.max_tokens


class ChatRequest(GenerationRequest, neutral={"add_special_tokens": (True, False)}):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), FailFast()]
    max_completion_tokens: Annotated[Integer, Field(ge=-1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[Integer, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS), FailFast()] = Field(default_factory=list)
    tool_choice: Choice = Field(default_factory=ToolChoice)
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Variables = Field(default_factory=dict)

    @model_validator(mode="after")
    def _of_chat(self) -> ChatRequest:
        most, most_completion, choice = self.max_tokens, self.max_completion_tokens, self.tool_choice
        names = [tool.function.name for tool in self.tools]
        asks = self.messages[-1].role != "assistant"
        refuse(
            ("top_logprobs", self.top_logprobs and not self.logprobs, "top_logprobs needs logprobs=true"),
            ("max_tokens", most == 0, "max_tokens must be at least 1"),
            ("max_completion_tokens", most_completion == 0, "max_completion_tokens must be at least 1"),
            ("max_tokens", most is not None and most_completion not in (None, most),
             "max_tokens and max_completion_tokens are two names of one limit: give one"),
            ("continue_final_message", self.continue_final_message is asks, _CONTINUED.format("continue_final_message")),
            ("add_generation_prompt", self.add_generation_prompt is (not asks),
             _CONTINUED.format("add_generation_prompt")),
            ("tools", len({*names}) < len(names), "two tools have the same name"),
            *(("tool_choice", name not in (None, *names), f"tool_choice names {str(name)[:64]!r}, which is not in tools")
              for name in (choice.name, *(choice.allowed or ()))),
            ("tool_choice", choice.forces and not names, "tool_choice needs tools"),
            ("tool_choice", choice.forces and (self.ignore_eos or self.min_tokens),
             "a call that must be made ends where it is complete: leave out ignore_eos and min_tokens"),
        )  # fmt: skip
        return self

    @property
    def callable_tools(self) -> list[Tool]:
        """Those that the model may call."""
        if self.tool_choice.mode == "none":
            return []
        choice = self.tool_choice
        named = choice.allowed if choice.name is None else (choice.name,)
        return [tool for tool in self.tools if named is None or tool.function.name in named]

    @property
    def schemas(self) -> list[tuple[str, Grammar]]:
        """Raises ValueError for parameters of a tool that are no object."""
        must_follow = self.tool_choice.forces or self.form[1] is not None
        return super().schemas + [("tools", tool.schema_) for tool in self.callable_tools if must_follow]

    @property
    def limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().limit


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions. prompt: one text, several texts, one list of token ids, or several."""

    prompt: Annotated[Any, BeforeValidator(_prompts, json_schema_input_type=Prompts)]
    echo: bool = False
    logprobs: Annotated[Integer, Field(ge=0, le=5)] | None = None

    @model_validator(mode="after")
    def _of_completions(self) -> CompletionRequest:
        is_wrong = self.max_tokens == 0 and not self.scores_prompts
        refuse(("max_tokens", is_wrong, "max_tokens must be at least 1, or 0 with echo and logprobs"))
        return self

    @property
    def num_texts(self) -> int:
        return self.n * len(self.prompts)

    @property
    def scores_prompts(self) -> bool:
        return self.echo and self.logprobs is not None

    @property
    def prompts(self) -> list[str | list[int]]:
        return [self.prompt] if isinstance(self.prompt, str) or isinstance(self.prompt[0], int) else [*self.prompt]


Body = ChatRequest | CompletionRequest


class TokenizeRequest(Strict, kept_empty="prompt", reasons={"chat_template": OWN_TEMPLATE}):
    """Body of /tokenize: a prompt, or messages. Without the fields that say so, those end as a chat's prompt does."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES), FailFast()] = Field(default_factory=list)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS), FailFast()] = Field(default_factory=list)
    chat_template_kwargs: Variables = Field(default_factory=dict)
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _agrees(self) -> TokenizeRequest:
        last = self.messages[-1].role if self.messages else None
        of_messages = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
        refuse(
            ("prompt", (self.prompt is None) == (last is None), "give a prompt or messages"),
            *((name, getattr(self, name) and last is None, f"{name} goes with messages") for name in of_messages),
            ("add_special_tokens", self.add_special_tokens and last, "the template adds the special tokens of messages"),
            ("add_generation_prompt", self.add_generation_prompt and self.continue_final_message,
             "the last message is continued, or answered, but not both"),
            ("continue_final_message", self.continue_final_message and last != "assistant",
             "the last message is not the assistant's"),
        )  # fmt: skip
        return self


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], FailFast()]
