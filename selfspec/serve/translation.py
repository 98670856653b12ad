"""A request's body to checked calls of the engine. Whatever cannot be is an ApiError here, before anything runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from transformers import LogitsProcessorList, PreTrainedTokenizerBase, StoppingCriteriaList

from policies import Policy
from selfspec import SelfSpecGenerator
from selfspec.copying.copy_sources import copies_drafts
from selfspec.engine import Checked
from selfspec.messages import ChatTemplate, has_template
from selfspec.request import ContextLengthError, encode_prompt
from selfspec.serve.api_errors import ApiError
from selfspec.serve.api_requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
)
from selfspec.serve.bias_processors import BiasProcessor, PenaltyProcessor
from selfspec.serve.chat_template import chat_prompt
from selfspec.serve.served_policies import ServedPolicies
from selfspec.serve.server_settings import MOST_CHOICES, ServerSettings
from selfspec.serve.structured_output import GrammarProcessor, Vocabulary
from selfspec.serve.token_logprobs import LogprobRecorder
from selfspec.serve.trimmed_text import StopTexts

_COMPLETION_TOKENS = 16
"""Where a completion request gives no max_tokens, as in OpenAI's API."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choice:
    """One text to generate. stops: where its text is cut. echo: what stands before it. recorder: for log-probabilities."""

    checked: Checked
    stops: tuple[str, ...]
    echo: str = ""
    recorder: LogprobRecorder | None = None


class Translator:
    """Turns requests into choices. Threads may share one."""

    def __init__(self, generator: SelfSpecGenerator, settings: ServerSettings) -> None:
        assert generator.tokenizer is not None
        self._generator, self._settings = generator, settings
        self.tokenizer: PreTrainedTokenizerBase = generator.tokenizer
        self._policies = ServedPolicies(generator, settings.policy)
        self.copies = generator.copy_store(settings.copy_from) if settings.copy_from else None
        self._template = ChatTemplate(settings.chat_template, settings.chat_stops)
        config = generator.model.generation_config
        self._sampling = config.to_dict() if config.do_sample else {}
        eos = config.eos_token_id
        self._vocab_size = generator.model.config.vocab_size
        self.vocabulary = Vocabulary(
            self.tokenizer, self._vocab_size, [] if eos is None else eos if isinstance(eos, list) else [eos]
        )

    @property
    def offers(self) -> dict[str, Any]:
        """What a client cannot know: whether there is a chat template, and the policy of requests that name none."""
        return {
            "chat": has_template(self.tokenizer, self._template),
            "policy": self._policies.choose(None, repeats=False).name,
        }

    def chat(self, body: ChatRequest) -> list[Choice]:
        """The n answers to a conversation."""
        self._check_model(body)
        with _bad_request("messages"):
            ids = chat_prompt(self.tokenizer, self._template, body.messages)
        room = self._generator.model.max_positions - len(ids)
        limit = body.max_completion_tokens or body.max_tokens
        wanted = max(1, min(self._settings.default_chat_tokens, room)) if limit is None else limit
        num_top = (body.top_logprobs or 0) if body.logprobs else None
        stops = (*body.stops, *self._template.stops)
        with _bad_request("messages"):
            return self._choices(body, ids, "", wanted, stops, num_top, 0)

    def completions(self, body: CompletionRequest) -> list[Choice]:
        """The n continuations of every prompt, those of the first prompt first."""
        self._check_model(body)
        if len(body.prompts) * body.n > MOST_CHOICES:
            raise ApiError(f"{len(body.prompts)} prompts with n={body.n}: at most {MOST_CHOICES} texts", param="n")
        if body.echo and body.logprobs is not None:
            raise ApiError(
                "logprobs are of generated tokens only: leave out echo or logprobs",
                param="logprobs",
                code="unsupported_parameter",
            )
        choices: list[Choice] = []
        for prompt in body.prompts:
            with _bad_request("prompt"):
                ids = encode_prompt(prompt, self.tokenizer, self._vocab_size).tolist()
                echo = ""
                if body.echo:
                    echo = prompt if isinstance(prompt, str) else self._text(ids)
                wanted = body.max_tokens or _COMPLETION_TOKENS
                choices += self._choices(body, ids, echo, wanted, body.stops, body.logprobs, len(choices))
        return choices

    def _choices(
        self,
        body: GenerationRequest,
        ids: list[int],
        echo: str,
        max_new_tokens: int,
        stops: Sequence[str],
        num_top: int | None,
        first: int,
    ) -> list[Choice]:
        return [
            self._choice(body, ids, echo, max_new_tokens, tuple(stops), num_top, first + index)
            for index in range(body.n)
        ]

    def _choice(
        self,
        body: GenerationRequest,
        ids: list[int],
        echo: str,
        max_new_tokens: int,
        stops: tuple[str, ...],
        num_top: int | None,
        index: int,
    ) -> Choice:
        sampling = self._sampling_options(body, index)
        criteria = StoppingCriteriaList([StopTexts(self.tokenizer, stops, len(ids))] if stops else [])
        policy = self._policy(body, sampling)
        checked = self._generator.check(
            ids,
            max_new_tokens=max_new_tokens,
            policy=policy,
            copy_from=self.copies if copies_drafts(policy.needs, self._generator.runner) else None,
            logits_processor=self._processors(body, len(ids)),
            stopping_criteria=criteria,
            **sampling,
        )
        recorder = None
        if num_top is not None:
            recorder = LogprobRecorder(len(ids), num_top)
            processors = LogitsProcessorList([recorder, *checked.request.processors])
            checked = replace(checked, request=replace(checked.request, processors=processors))
        # Its text is made here piece by piece, and not once more by the engine.
        return Choice(checked=replace(checked, tokenizer=None), stops=stops, echo=echo, recorder=recorder)

    def _sampling_options(self, body: GenerationRequest, index: int) -> dict[str, Any]:
        """Arguments of `generate`. The choices of a request are seeded one after the other: seed, seed + 1, ..."""
        own = self._sampling
        temperature = body.temperature
        if temperature is None:
            temperature = 1.0 if own.get("temperature") is None else own["temperature"]
        if temperature == 0:
            return {"do_sample": False}
        options = {"do_sample": True, "temperature": temperature}
        for name in ("top_p", "top_k", "min_p"):
            given = getattr(body, name)
            options[name] = own.get(name) if given is None else given
        if body.seed is not None:
            options["seed"] = body.seed + index
        return options

    def _policy(self, body: GenerationRequest, sampling: dict[str, Any]) -> Policy:
        try:
            return self._policies.choose(body.policy, repeats="seed" in sampling)
        except (ValueError, FileNotFoundError) as error:
            raise ApiError(str(error), param="policy") from None

    def _processors(self, body: GenerationRequest, prompt_length: int) -> LogitsProcessorList:
        processors = LogitsProcessorList()
        if body.presence_penalty or body.frequency_penalty:
            processors.append(PenaltyProcessor(body.presence_penalty, body.frequency_penalty, prompt_length))
        if body.logit_bias:
            try:
                processors.append(BiasProcessor(body.logit_bias, self._vocab_size, self._generator.model.device))
            except ValueError as error:
                raise ApiError(str(error), param="logit_bias") from None
        schema: dict[str, Any] | bool | None = None
        if isinstance(body.response_format, JsonObjectFormat):
            schema = {"type": "object"}
        elif isinstance(body.response_format, JsonSchemaFormat):
            schema = body.response_format.json_schema.schema_
        if schema is not None:
            try:
                processors.append(GrammarProcessor(self.vocabulary, schema, prompt_length))
            except ValueError as error:
                raise ApiError(str(error), param="response_format") from None
        return processors

    def _check_model(self, body: GenerationRequest) -> None:
        check_model(body.model, self._settings.model_name)

    def _text(self, ids: list[int]) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        assert isinstance(text, str)
        return text


def check_model(asked: str, served: str) -> None:
    """Raise an ApiError (status 404) for another model than the one that is served."""
    if asked != served:
        raise ApiError(
            f"there is no model {asked!r} here, this server has {served!r}",
            status=404,
            param="model",
            code="model_not_found",
        )


@contextmanager
def _bad_request(param: str) -> Iterator[None]:
    """What the engine refuses, as status 400. param: what is likely meant where the message names nothing."""
    try:
        yield
    except ContextLengthError as error:
        raise ApiError(str(error), param=param, code="context_length_exceeded") from None
    except (ValueError, TypeError) as error:
        message = str(error)
        named = re.match(r"(temperature|top_p|top_k|min_p|seed)\b", message)
        raise ApiError(message, param=named[1] if named else param) from None
