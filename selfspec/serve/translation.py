"""A request's body to checked calls of the engine. Whatever is wrong with it is an ApiError here, before anything runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from llguidance import LLMatcher
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from policies import Policy
from selfspec import SelfSpecGenerator
from selfspec.cache.copy_index import copies_drafts
from selfspec.cache.prefix_cache import ANYONE, Owner
from selfspec.engine.request import COLDEST, ContextLengthError, check_context, encode_prompt, end_tokens
from selfspec.messages import conversation_ids, encode_messages, has_template
from selfspec.serve.api_errors import ApiError
from selfspec.serve.api_requests import ChatRequest, CompletionRequest, GenerationRequest, Message
from selfspec.serve.bias_processors import BiasProcessor, PenaltyProcessor
from selfspec.serve.lanes import LARGE_BODY
from selfspec.serve.prompts import check_length
from selfspec.serve.scheduler import ServedSequence
from selfspec.serve.schema_check import SchemaCheck
from selfspec.serve.served_policies import ServedPolicies
from selfspec.serve.server_settings import MAX_CHOICES, ServerSettings
from selfspec.serve.structured_output import Grammar, GrammarProcessor, Vocabulary
from selfspec.serve.token_logprobs import LogprobRecorder, PromptLogprobs
from selfspec.serve.tools.tool_formats import tool_template
from selfspec.serve.tools.tool_requests import Tool
from selfspec.serve.tools.tool_translation import ToolTranslator, named_results, schemas_of
from selfspec.serve.trimmed_text import Stops, StopTexts, TrimmedText

_COMPLETION_TOKENS = 16
"""Used when a completion request gives no max_tokens, as in OpenAI's API."""


_LEAST_TOP_P = 1e-9
"""In place of 0: only the most likely token is left."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shared:
    """What all texts of a request share.

    ends: tokens that end a text. processors: those that are the same function for every text. compiled: what the texts must
    follow, with a fresh matcher to copy. policy: of the first text; if sampling has a seed, each other text gets a copy.
    """

    owner: Owner
    policy: Policy
    sampling: dict[str, Any]
    ends: list[int]
    stops: Stops
    processors: LogitsProcessorList
    compiled: tuple[Grammar, LLMatcher] | None


class Translator:
    """Turns requests into choices. Threads may share one."""

    def __init__(self, generator: SelfSpecGenerator, settings: ServerSettings) -> None:
        assert generator.tokenizer is not None
        self._generator, self._settings = generator, settings
        self.tokenizer: PreTrainedTokenizerBase = generator.tokenizer
        self._policies = ServedPolicies(generator, settings.policy, settings.allowed_policies)
        self._schemas = SchemaCheck()
        context = generator.model.max_positions
        self.max_context = min(context, settings.max_context or context)  # of a prompt and its new tokens
        self.copies = generator.copy_store(settings.copy_from) if settings.copy_from else None
        self._template = settings.chat_template
        config = generator.model.generation_config
        self._sampling = config.to_dict() if config.do_sample else {}
        self._vocab_size = generator.model.config.vocab_size
        self._eos = [token for token in end_tokens(config, self.tokenizer) if token < self._vocab_size]
        added = self.tokenizer.added_tokens_decoder.items()
        self._special = {token: str(one.content) for token, one in added if one.special and one.content}
        self.vocabulary = Vocabulary(self.tokenizer, self._vocab_size, self._eos)
        self._tools = ToolTranslator(self.tokenizer, self._template, self.vocabulary)

    def has_slow_schema(self, body: GenerationRequest, size: int) -> bool:
        """Say whether it has a schema that takes long to compile, or that was not compiled yet.

        size: of the body in bytes; the schema of a large one takes long to look up.
        """
        with _bad_request("tools"):
            schemas = [schema for _, schema in schemas_of(body)]
        return bool(schemas) and (size > LARGE_BODY or not all(map(self._schemas.is_quick, schemas)))

    def is_slow(self, body: GenerationRequest) -> bool:
        """Say whether a small body may be much work: biases, a policy by name, a grammar."""
        return bool(body.logit_bias or body.policy or schemas_of(body) or body.response_format)

    def _check_schema(self, body: GenerationRequest) -> None:
        """Compile its schemas on trial, which may take a second each. Raises ApiError if one cannot be used."""
        found = schemas_of(body)
        for param, schema in found:
            with _bad_request(param):
                self._schemas(schema)
        if len(found) > 1:
            with _bad_request("tools"):
                self._schemas.check_together([schema for _, schema in found])

    def close(self) -> None:
        self._schemas.close()

    @property
    def offers(self) -> dict[str, Any]:
        """What a client cannot know: whether there is a chat template, and the policy of requests that name none."""
        return {
            "chat": has_template(self.tokenizer, self._template),
            "tools": self._tools.known,
            "policy": self._policies.choose(None, repeats=False).name,
        }

    def chat(self, body: ChatRequest) -> list[ServedSequence]:
        """Make the choices of a chat request."""
        self.check_name(body.model)
        self._check_schema(body)
        tools = body.callable_tools
        if body.parallel_tool_calls is not None and not tools:
            body.ignore("parallel_tool_calls")
        ids = self.chat_ids(body.messages, tools=body.tools if tools else ())
        room = self.max_context - len(ids)
        wanted = self._wanted(body.limit[1], self._settings.default_chat_tokens, room)
        num_top = (body.top_logprobs or 0) if body.logprobs else None
        # The template's own stops are its end token.
        stops = (*body.stop, *(() if body.ignore_eos else self._template.stops))
        with _bad_request("messages", body.limit):
            self._check_limit(len(ids), body.limit[0], wanted)
        shared = self._shared(body, stops)
        with _bad_request("messages", body.limit):
            return [self._choice(body, shared, ids, "", wanted, num_top, index) for index in range(body.n)]

    def chat_ids(self, messages: Sequence[Message], ask: bool | None = None, tools: Sequence[Tool] = ()) -> list[int]:
        """Encode the prompt that asks for the next answer; if the last message is the assistant's, it is continued.

        ask: treat all messages as complete, and say whether the beginning of the next answer follows them. tools: those
        that the model is told of.
        Raises ApiError without a template, and for messages that the template refuses.
        """
        self._tools.check(messages, tools)
        with _bad_request("tools"):
            described = [tool.described for tool in tools] or None
        with _bad_request("messages"):
            conversation = named_results([message.described for message in messages])
            texts = [message.text for message in messages]
            calls = [message.get("tool_calls") for message in conversation]
            check_length(
                self.tokenizer, [*texts, *map(json.dumps, filter(None, [described, *calls]))], self.max_context
            )
            if not has_template(self.tokenizer, self._template):
                raise ApiError(
                    "this model has no chat template: use /v1/completions, or start the server with --chat-template",
                    param="messages",
                    code="no_chat_template",
                )
            template = self._template
            if described or any(calls) or any(message.role == "tool" for message in messages):
                template = tool_template(self.tokenizer, template)
            if ask is None:
                return encode_messages(conversation, self.tokenizer, template, described)
            return conversation_ids(conversation, self.tokenizer, template, ask=ask, tools=described)

    @property
    def chat_template(self) -> str | None:
        own = getattr(self.tokenizer, "chat_template", None)
        return self._template.source or (own.get("default") if isinstance(own, dict) else own)

    def tokens_of(self, text: str, *, special: bool) -> list[int]:
        """Encode a text. special: with the tokenizer's special tokens. Raises ApiError for a text that is too long."""
        with _bad_request("prompt"):
            check_length(self.tokenizer, [text], self.max_context)
            return [*self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]]

    def text_of(self, ids: Sequence[int]) -> str:
        """Decode tokens to text, special ones included. Raises ApiError for too many tokens or unknown ids."""
        with _bad_request("tokens"):
            if len(ids) > 2 * self.max_context:
                raise ContextLengthError(len(ids), 1, self.max_context)
            if any(not 0 <= token < self._vocab_size for token in ids):
                raise ValueError(f"tokens must be in [0, {self._vocab_size - 1}], the model's vocabulary")
        return str(self.tokenizer.decode([*ids]))

    def check_name(self, model: str | None) -> None:
        """Raise an ApiError (status 404) if another model is asked for."""
        served = self._settings.model_name
        if model not in (None, served):
            message = f"there is no model {model!r} here, this server has {served!r}"
            raise ApiError(message, status=404, param="model", code="model_not_found")

    def completions(self, body: CompletionRequest) -> list[ServedSequence]:
        """Make the n continuations of every prompt, those of the first prompt first."""
        self.check_name(body.model)
        if len(body.prompts) * body.n > MAX_CHOICES:
            raise ApiError(f"{len(body.prompts)} prompts with n={body.n}: at most {MAX_CHOICES} texts", param="n")
        self._check_schema(body)
        least = self._wanted(body.max_tokens, _COMPLETION_TOKENS, 1)
        prompts: list[tuple[list[int], str, int]] = []
        for prompt in body.prompts:
            with _bad_request("prompt", ("max_tokens", least)):
                if isinstance(prompt, str):
                    check_length(self.tokenizer, [prompt], self.max_context)
                else:  # before every id is checked
                    self._check_limit(len(prompt), "max_tokens", least)
                ids = encode_prompt(prompt, self.tokenizer, self._vocab_size).tolist()
                wanted = self._wanted(body.max_tokens, _COMPLETION_TOKENS, self.max_context - len(ids))
                self._check_limit(len(ids), "max_tokens", wanted)
                echo = ""
                if body.echo:
                    echo = prompt if isinstance(prompt, str) else self.tokenizer.decode(ids, skip_special_tokens=True)
                prompts.append((ids, echo, wanted))
        shared = self._shared(body, body.stop)
        choices: list[ServedSequence] = []
        with _bad_request("prompt"):
            for ids, echo, wanted in prompts:
                for _ in range(body.n):
                    choices.append(self._choice(body, shared, ids, echo, wanted, body.logprobs, len(choices)))
        return choices

    def _wanted(self, limit: int | None, default: int, room: int) -> int:
        """Choose the limit of new tokens: the client's, or this default. -1 is all for which there is room."""
        if limit is not None and limit >= 0:
            return limit
        most = min(room, self._settings.max_new_tokens or room)
        return max(1, most if limit is not None else min(default, most))

    def _check_limit(self, num_prompt: int, name: str, wanted: int) -> None:
        """Raise an error for more tokens than the model has room for or the operator allows. name: of the client's limit."""
        most = self._settings.max_new_tokens
        if most is not None and wanted > most:
            raise ApiError(f"{name} is {wanted}, at most {most} are possible here", param=name)
        check_context(num_prompt, wanted, self.max_context)

    def _owner(self, body: GenerationRequest) -> Owner:
        """Whose texts a request's prompts may reuse: its own, and those of earlier requests with the same salt and user."""
        if self._settings.share_prefixes:
            return ANYONE
        if body.cache_salt is None:
            return Owner(uuid4().hex, lasts=False)
        return Owner(json.dumps([body.cache_salt, body.user]))

    def _shared(self, body: GenerationRequest, stops: Sequence[str]) -> _Shared:
        """Make what a request needs only once, however many texts it asks for."""
        sampling, ends = self._sampling_options(body), self._end_tokens(body)
        with _bad_request("policy"):
            policy = self._policies.choose(body.policy, repeats="seed" in sampling)
        processors = LogitsProcessorList()
        if body.logit_bias:
            with _bad_request("logit_bias"):
                processors.append(BiasProcessor(body.logit_bias, self._vocab_size, self._generator.model.device))
        with _bad_request("response_format" if body.schema_ is not None else "tool_choice"):
            grammar = self._tools.grammar(body)
            compiled = None if grammar is None else (grammar, self.vocabulary.matcher(grammar))
        return _Shared(
            owner=self._owner(body), policy=policy, sampling=sampling, ends=ends, processors=processors, compiled=compiled,
            stops=Stops(stops, body.min_tokens, self._special),
        )  # fmt: skip

    def _choice(
        self,
        body: GenerationRequest,
        shared: _Shared,
        ids: list[int],
        echo: str,
        max_new_tokens: int,
        num_top: int | None,
        index: int,
    ) -> ServedSequence:
        if body.min_tokens > max_new_tokens:
            raise ApiError(f"min_tokens={body.min_tokens} is above the limit of {max_new_tokens}", param="min_tokens")
        sampling, policy = {**shared.sampling}, shared.policy
        if "seed" in sampling and index:  # the choices of a request have the seeds seed, seed + 1, ...
            sampling["seed"], policy = sampling["seed"] + index, deepcopy(policy)
        criteria = [StopTexts(self.tokenizer, shared.stops, len(ids))] if shared.stops.texts else []
        checked = self._generator.check(
            ids,
            max_new_tokens=max(1, max_new_tokens),
            repetition_penalty=body.repetition_penalty,
            eos_token_id=shared.ends,
            policy=policy,
            copy_from=self.copies if copies_drafts(policy.observes) else None,
            logits_processor=self._processors(body, shared, len(ids)),
            stopping_criteria=StoppingCriteriaList(criteria),
            **sampling,
        )
        request, recorder, scored = replace(checked.request, owner=shared.owner), None, None
        if num_top is not None:
            recorder = LogprobRecorder(len(ids), num_top)
            request = replace(request, processors=LogitsProcessorList([recorder, *request.processors]))
            if isinstance(body, CompletionRequest) and body.scores_prompts:
                scored = PromptLogprobs(checked.bound.model, request.prompt, num_top)
                request = replace(request, watch_prompt=scored)
        return ServedSequence(
            # The server decodes the text piece by piece, so the engine need not do it again.
            checked=replace(checked, request=request, tokenizer=None),
            text=TrimmedText(self.tokenizer, shared.stops, ids),
            echo=echo,
            recorder=recorder,
            scored=scored,
            silent=max_new_tokens == 0,
            reader=self._tools.reader(body, ids),
        )

    def _end_tokens(self, body: GenerationRequest) -> list[int]:
        for token in body.stop_token_ids:
            if token >= self._vocab_size:
                raise ApiError(
                    f"stop_token_ids must be in [0, {self._vocab_size - 1}], the model's vocabulary, got {token}",
                    param="stop_token_ids",
                )
        return [*([] if body.ignore_eos else self._eos), *body.stop_token_ids]

    def _sampling_options(self, body: GenerationRequest) -> dict[str, Any]:
        """Arguments of `generate`."""
        own = self._sampling
        temperature = body.temperature
        if temperature is None:
            temperature = 1.0 if own.get("temperature") is None else own["temperature"]
        if temperature < COLDEST:
            return {"do_sample": False}
        options = {"do_sample": True, "temperature": temperature}
        for name, least in (("top_p", _LEAST_TOP_P), ("top_k", 0), ("min_p", 0)):  # top_k: -1 turns it off, as in vLLM
            given = getattr(body, name)
            options[name] = own.get(name) if given is None else max(given, least)
        if body.seed is not None:
            options["seed"] = body.seed
        return options

    def _processors(self, body: GenerationRequest, shared: _Shared, prompt_length: int) -> LogitsProcessorList:
        processors = LogitsProcessorList()
        if body.presence_penalty or body.frequency_penalty:
            processors.append(PenaltyProcessor(body.presence_penalty, body.frequency_penalty, prompt_length))
        processors += shared.processors
        if body.min_tokens and shared.ends:
            device = str(self._generator.model.device)
            processors.append(MinNewTokensLengthLogitsProcessor(prompt_length, body.min_tokens, shared.ends, device))
        if shared.compiled is not None:
            grammar, matcher = shared.compiled
            processors.append(GrammarProcessor(self.vocabulary, grammar, prompt_length, matcher))
        return processors


@contextmanager
def _bad_request(param: str, limit: tuple[str, int | None] = ("max_tokens", None)) -> Iterator[None]:
    """Turn the engine's errors into ApiErrors with status 400.

    param: the field to name if the message names none. limit: the request's name for its limit of new tokens, and the limit
    if there is one.
    """
    try:
        yield
    except ContextLengthError as error:
        name, most = limit
        twice = 2 * error.context  # counting stopped there
        count = f"more than {twice}" if error.num_prompt > twice else str(error.num_prompt)
        asked = f", and the prompt has {count}: shorten it"
        if most is not None:
            asked = f", the prompt has {count}, and {name} is {most}: shorten the prompt or lower {name}"
        message = f"this model's maximum context length is {error.context} tokens{asked}"
        raise ApiError(message, param=param, code="context_length_exceeded") from None
    except (ValueError, TypeError, FileNotFoundError) as error:
        message = str(error)
        named = re.match(r"(temperature|top_p|top_k|min_p|seed|repetition_penalty)\b", message)
        raise ApiError(message, param=named[1] if named else param) from None
