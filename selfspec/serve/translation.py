"""A request's body to checked calls of the engine. Whatever is wrong with it is an ApiError here, before anything runs."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

from transformers import LogitsProcessorList, MinNewTokensLengthLogitsProcessor, StoppingCriteriaList

from policies import CostModel, Policy, PreVerifier, runs_own_code
from selfspec import SelfSpecGenerator
from selfspec.cache.copy_index import copies_drafts
from selfspec.cache.prefix_cache import ANYONE, Owner
from selfspec.engine.policy_store import PolicyStore, make_policy
from selfspec.engine.request import COLDEST, check_context, encode_prompt, end_tokens
from selfspec.serve import processors
from selfspec.serve.api_errors import ApiError
from selfspec.serve.api_requests import Body, ChatRequest, CompletionRequest
from selfspec.serve.bodies import LARGE_BODY
from selfspec.serve.model_tools import ModelTools
from selfspec.serve.processors import bias_processor
from selfspec.serve.prompts import Prompts, bad_request, check_length
from selfspec.serve.scheduler import ServedSequence
from selfspec.serve.schema_check import SchemaCheck
from selfspec.serve.serve_options import ANY_POLICY, MAX_CHOICES, SAFE_POLICIES, ServeOptions
from selfspec.serve.structured_output import GrammarProcessor, Vocabulary

REPEATING = "auto:cost=layers"
"""For sampled requests with a seed that name no policy: it decides by counts alone, never by measured time."""
_KEPT = 16
_COMPLETION_TOKENS = 16  # used when a completion request gives no max_tokens, as in OpenAI's API
_LEAST_TOP_P = 1e-9  # in place of 0: only the most likely token is left
_Prompt = tuple[list[int], str, int]
"""A prompt's ids, the text to put before its answer, and the limit of new tokens."""


class Translator:
    """For one model. Threads may share one."""

    def __init__(self, generator: SelfSpecGenerator, options: ServeOptions) -> None:
        assert generator.tokenizer is not None
        self._generator, self._options = generator, options
        self._policies = ServedPolicies(generator, options)
        self.schemas = SchemaCheck()
        texts = options.copied_texts
        self._copies = generator.copy_store(texts) if texts else None
        config, context = generator.model.generation_config, generator.model.max_positions
        # How requests that say nothing of it are sampled: as the checkpoint says, like everywhere else, or not at all.
        given = {name: getattr(config, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        given = {"temperature": 1.0} | {name: value for name, value in given.items() if value is not None}
        self._sampling: dict[str, Any] = given if config.do_sample else {"temperature": 0.0}
        self._vocab_size = generator.model.config.vocab_size
        self._eos = [token for token in end_tokens(config, generator.tokenizer) if token < self._vocab_size]
        self.vocabulary = Vocabulary(generator.tokenizer, self._vocab_size, self._eos)
        self._tools = ModelTools(generator.tokenizer, options.template, self.vocabulary)
        self._max_context = min(context, options.max_context or context)
        self.prompts = Prompts(generator.tokenizer, options.template, self._tools, self._vocab_size, self._max_context)

    @property
    def offers(self) -> dict[str, Any]:
        """What a client cannot know: whether there is a chat template, and what holds for requests that do not say."""
        policy = self._policies.choose(None, repeats=False).name
        has_chat, has_tools = self.prompts.has_template, self._tools.known
        return {"chat": has_chat, "tools": has_tools, "policy": policy, "sampling": self._sampling}

    def check_name(self, model: str | None) -> None:
        """Raise an ApiError (status 404) if another model is asked for."""
        if model not in (None, self._options.name):
            message = f"there is no model {model!r} here, this server has {self._options.name!r}"
            raise ApiError(message, status=404, param="model", code="model_not_found")

    def has_slow_schema(self, body: Body, size: int) -> bool:
        """Say whether it has a schema that compiles slowly, or may; in a large body, of `size` bytes, all may."""
        with bad_request("tools"):
            schemas = [schema for _, schema in body.schemas]
        return bool(schemas) and (size > LARGE_BODY or not all(map(self.schemas.is_quick, schemas)))

    def texts(self, body: Body) -> list[ServedSequence]:
        """Make the texts of a request: the n answers to a chat, or the n continuations of its first prompt, then the next."""
        self.check_name(body.model)
        if isinstance(body, CompletionRequest) and body.num_texts > MAX_CHOICES:
            raise ApiError(f"{len(body.prompts)} prompts with n={body.n}: at most {MAX_CHOICES} texts", param="n")
        self._check_schemas(body)
        stops = body.stop
        if isinstance(body, ChatRequest):
            prompts, num_top = [self._chat_prompt(body)], (body.top_logprobs or 0) if body.logprobs else None
            # The template's own stops are its end token.
            stops = [*stops, *(() if body.ignore_eos else self._options.template.stops)]
        else:
            prompts, num_top = self._completion_prompts(body), body.logprobs
        cut = processors.Stops(stops, body.min_tokens, self.vocabulary.special)
        sampling, ends = self._sampling_options(body), self._end_tokens(body)
        with bad_request("policy"):
            policy = self._policies.choose(body.policy, repeats="seed" in sampling)
        with bad_request("logit_bias"):
            biases = [bias_processor(body.logit_bias, self._vocab_size)] if body.logit_bias else []
        with bad_request("tool_choice" if body.form[1] is None else body.form[0]):
            grammar = self._tools.grammar(body)
            matcher = None if grammar is None else self.vocabulary.matcher(grammar)
        owner, device = self._owner(body), str(self._generator.model.device)
        served: list[ServedSequence] = []
        for ids, echo, most in [prompt for prompt in prompts for _ in range(body.n)]:
            own = LogitsProcessorList()
            if body.presence_penalty or body.frequency_penalty:
                own.append(processors.PenaltyProcessor(body.presence_penalty, body.frequency_penalty, len(ids)))
            own += biases
            if body.min_tokens and ends:
                own.append(MinNewTokensLengthLogitsProcessor(len(ids), body.min_tokens, ends, device))
            if grammar is not None and matcher is not None:
                own.append(GrammarProcessor(self.vocabulary, grammar, matcher, len(ids)))
            if "seed" in sampling and served:  # the texts of a request have the seeds seed, seed + 1, ...
                sampling, policy = {**sampling, "seed": sampling["seed"] + 1}, deepcopy(policy)
            criteria = [processors.StopTexts(self.prompts.tokenizer, cut, len(ids))] if cut.texts else []
            with bad_request("messages" if isinstance(body, ChatRequest) else "prompt", body.limit):
                checked = self._generator.check(
                    ids,
                    max_new_tokens=max(1, most),
                    repetition_penalty=body.repetition_penalty,
                    eos_token_id=ends,
                    policy=policy,
                    copy_from=self._copies if copies_drafts(policy.observes) else None,
                    logits_processor=own,
                    stopping_criteria=StoppingCriteriaList(criteria),
                    **sampling,
                )
            request, recorder, scored = replace(checked.request, owner=owner), None, None
            if num_top is not None:
                recorder = processors.LogprobRecorder(len(ids), num_top)
                request = replace(request, processors=LogitsProcessorList([recorder, *request.processors]))
                if isinstance(body, CompletionRequest) and body.scores_prompts:
                    scored = processors.PromptLogprobs(checked.bound.model, request.prompt, num_top)
                    request = replace(request, watch_prompt=scored)
            served.append(
                ServedSequence(
                    # The server decodes the text piece by piece, so the engine need not do it again.
                    call=replace(checked, request=request, tokenizer=None),
                    text=processors.TrimmedText(self.prompts.tokenizer, cut, ids),
                    echo=echo,
                    recorder=recorder,
                    scored=scored,
                    silent=most == 0,
                    reader=self._tools.reader(body),
                )
            )
        return served

    def _check_schemas(self, body: Body) -> None:
        """Compile its schemas on trial, which may take a second each. Raises ApiError if one cannot be used."""
        with bad_request("tools"):
            found = body.schemas
        for param, schema in found:
            with bad_request(param):
                self.schemas(schema)
        if len(found) > 1:
            with bad_request("tools"):
                self.schemas.check_together([schema for _, schema in found])

    def _chat_prompt(self, body: ChatRequest) -> _Prompt:
        tools = body.callable_tools
        if body.parallel_tool_calls is not None and not tools:
            body.ignore("parallel_tool_calls")
        ids = self.prompts.of_chat(body, tools=body.tools if tools else ())
        with bad_request("messages", body.limit):
            return ids, "", self._max_new_tokens(body, len(ids), self._options.default_chat_tokens)

    def _completion_prompts(self, body: CompletionRequest) -> list[_Prompt]:
        tokenizer, prompts = self.prompts.tokenizer, list[_Prompt]()
        least = self._wanted(body.max_tokens, _COMPLETION_TOKENS, 1)
        for prompt in body.prompts:
            with bad_request("prompt", ("max_tokens", least)):
                if isinstance(prompt, str):
                    check_length(tokenizer, [prompt], self._max_context)
                else:  # before every id is checked
                    check_context(len(prompt), least, self._max_context)
                ids = encode_prompt(prompt, tokenizer, self._vocab_size).tolist()
                most = self._max_new_tokens(body, len(ids), _COMPLETION_TOKENS)
            echo = ""
            if body.echo:
                echo = prompt if isinstance(prompt, str) else str(tokenizer.decode(ids, skip_special_tokens=True))
            prompts.append((ids, echo, most))
        return prompts

    def _max_new_tokens(self, body: Body, num_prompt: int, default: int) -> int:
        """Choose the limit of new tokens. Raises an error for more than the model has room for or the operator allows."""
        name, given = body.limit
        wanted, most = self._wanted(given, default, self._max_context - num_prompt), self._options.max_tokens
        if most is not None and wanted > most:
            raise ApiError(f"{name} is {wanted}, at most {most} are possible here", param=name)
        check_context(num_prompt, wanted, self._max_context)
        if body.min_tokens > wanted:
            raise ApiError(f"min_tokens={body.min_tokens} is above the limit of {wanted}", param="min_tokens")
        return wanted

    def _wanted(self, given: int | None, default: int, room: int) -> int:
        """Return the client's limit, or this default. -1 is all for which there is room."""
        if given is not None and given >= 0:
            return given
        most = min(room, self._options.max_tokens or room)
        return max(1, most if given is not None else min(default, most))

    def _owner(self, body: Body) -> Owner:
        """Whose texts a request's prompts may reuse: its own, and those of earlier requests with the same salt and user."""
        if self._options.share_prefixes:
            return ANYONE
        if body.cache_salt is None:
            return Owner(uuid4().hex, lasts=False)
        return Owner(json.dumps([body.cache_salt, body.user]))

    def _end_tokens(self, body: Body) -> list[int]:
        for token in body.stop_token_ids:
            if token >= self._vocab_size:
                known = f"[0, {self._vocab_size - 1}], the model's vocabulary"
                raise ApiError(f"stop_token_ids must be in {known}, got {token}", param="stop_token_ids")
        return [*([] if body.ignore_eos else self._eos), *body.stop_token_ids]

    def _sampling_options(self, body: Body) -> dict[str, Any]:
        """Arguments of `generate`. A request that would otherwise be greedy, and asks for samples, has the temperature 1."""
        own, temperature = self._sampling, body.temperature
        if temperature is None:
            narrows = body.top_p not in (None, 1) or body.min_p or (body.top_k or 0) > 0
            temperature = own["temperature"] or float(bool(narrows) or body.seed is not None or body.n > 1)
        if temperature < COLDEST:
            return {"do_sample": False}
        options = {"do_sample": True, "temperature": temperature}
        for name, least in (("top_p", _LEAST_TOP_P), ("top_k", 0), ("min_p", 0)):  # top_k: -1 turns it off, as in vLLM
            given = getattr(body, name)
            options[name] = own.get(name) if given is None else max(given, least)
        if body.seed is not None:
            options["seed"] = body.seed
        return options


class ServedPolicies:
    """Policies by name for the requests of one server.

    The server's own policy keeps what it learns from request to request, and so do the last 16 that clients named. A
    sampled request with a seed gets a policy of its own: what others have taught would change what is drafted, and so
    what is drawn.
    """

    def __init__(self, generator: SelfSpecGenerator, options: ServeOptions) -> None:
        self._generator, self._default = generator, options.policy
        self._default_name = generator.resolve_policy(options.policy).name
        allowed = SAFE_POLICIES if options.allow_policy is None else options.allow_policy
        self._any, self._allowed = ANY_POLICY in allowed, {REPEATING, self._default_name, *allowed}
        self._named = PolicyStore(most=_KEPT)

    def choose(self, name: str | None, *, repeats: bool) -> Policy:
        """repeats: whether the same request must be drafted the same way every time.

        Raises ValueError for an unknown name, for one that the server does not allow (of classes that are not ours only what
        the operator named), for one that names a folder, and for one that cannot repeat.
        """
        if name is not None:
            name = name.strip()
            if name not in self._allowed and (not self._any or runs_own_code(name)):
                known = "any of this package" if self._any else ", ".join(sorted(self._allowed))
                raise ValueError(f"policy {name!r} is not allowed on this server, which has {known} (--allow-policy)")
            if repeats:
                return self._make(name, measured=False)
            return self._named.find(name, partial(self._make, name, measured=True))
        if not repeats:
            return self._generator.resolve_policy(self._default)
        try:
            return self._make(self._default_name, measured=False)
        except ValueError:
            return self._make(REPEATING if self._generator.model.num_layers > 1 else "ar", measured=False)

    def _make(self, name: str, *, measured: bool) -> Policy:
        measure = None if measured else _refuse_measuring
        return make_policy(self._generator.bound, name, measure=measure, preverifier=self._beside_the_model)

    def _beside_the_model(self, path: str | None) -> PreVerifier:
        if path is not None:
            raise ValueError("a request may not name a folder of the server")
        return self._generator.load_preverifier(None)


def _refuse_measuring() -> CostModel:
    remedy = f"leave out seed or policy, or choose one that counts layers, such as {REPEATING}"
    raise ValueError(f"it decides by measured time, so a seed would not give the same text again: {remedy}")
