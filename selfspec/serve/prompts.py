"""Texts and messages to tokens and back. Prompts that are far too long are refused before all of their text is tokenised."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedTokenizerBase

from selfspec.engine.request import ContextLengthError
from selfspec.messages import ChatTemplate, check_characters, encode_messages, has_template
from selfspec.serve.api_errors import ApiError
from selfspec.serve.api_messages import Tool
from selfspec.serve.api_requests import ChatRequest, TokenizeRequest
from selfspec.serve.model_tools import ModelTools, tool_template

_OWN_VARIABLES = frozenset({"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters})
_USUAL = 8
"""A generous number of characters per token. Texts with fewer per position of the context are tokenised at once."""


class Prompts:
    """For one model. Threads may share one. max_context: limit on the tokens of a prompt and its answer."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: ChatTemplate,
        tools: ModelTools,
        vocab_size: int,
        max_context: int,
    ) -> None:
        self.tokenizer, self.max_context = tokenizer, max_context
        self._template, self._tools, self._vocab_size = template, tools, vocab_size
        self.has_template = has_template(tokenizer, template)
        own = getattr(tokenizer, "chat_template", None)
        self.template_source = template.source or (own.get("default") if isinstance(own, dict) else own)

    def of_chat(
        self, body: ChatRequest | TokenizeRequest, ask: bool | None = None, *, tools: Sequence[Tool]
    ) -> list[int]:
        """Encode the prompt that asks for the next answer; if the last message is the assistant's, it is continued.

        ask: treat all messages as complete, and say whether the beginning of the next answer follows them. tools: those
        that the model is told of.
        Raises ApiError without a template, and for messages that the template refuses.
        """
        messages, variables = body.messages, self._variables(body)
        self._tools.check(messages, tools)
        with bad_request("tools"):
            described = [tool.described for tool in tools] or None
        with bad_request("messages"):
            conversation = _named_results([message.described for message in messages])
            calls = [message.get("tool_calls") for message in conversation]
            told = map(json.dumps, filter(None, [described, *calls]))
            check_length(self.tokenizer, [*(message.text for message in messages), *told], self.max_context)
            if not self.has_template:
                why = "this model has no chat template: use /v1/completions, or start the server with --chat-template"
                raise ApiError(why, param="messages", code="no_chat_template")
            template = self._template
            if described or any(calls) or any(message.role == "tool" for message in messages):
                template = tool_template(self.tokenizer, template)
            return encode_messages(conversation, self.tokenizer, template, described, variables, ask=ask)

    def _variables(self, body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
        """Return those that the template reads; the others are ignored. Raises ApiError for what the server itself sets."""
        found = {}
        for name, value in body.chat_template_kwargs.items():
            if name in _OWN_VARIABLES:
                why, param = f"the server sets {name} itself: leave it out", f"chat_template_kwargs.{name}"
                raise ApiError(why, param=param, code="unsupported_parameter")
            if re.search(rf"\b{name}\b", str(self.template_source)):
                found[name] = value
            else:
                body.ignore(f"chat_template_kwargs.{name}")
        return found

    def of_text(self, text: str, *, special: bool) -> list[int]:
        """Encode a text. special: with the tokenizer's special tokens. Raises ApiError for a text that is too long."""
        with bad_request("prompt"):
            check_length(self.tokenizer, [text], self.max_context)
            return [*self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]]

    def text_of(self, ids: Sequence[int]) -> str:
        """Decode tokens to text, special ones included. Raises ApiError for too many tokens or unknown ids."""
        with bad_request("tokens"):
            if len(ids) > 2 * self.max_context:
                raise ContextLengthError(len(ids), 1, self.max_context)
            if any(not 0 <= token < self._vocab_size for token in ids):
                raise ValueError(f"tokens must be in [0, {self._vocab_size - 1}], the model's vocabulary")
        return str(self.tokenizer.decode([*ids]))


def check_length(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_tokens: int) -> None:
    """Raise ContextLengthError for texts that together have more than twice as many tokens as are possible.

    They are counted piece by piece, which is right except for a token or two at the cuts. Raises ValueError for half a
    character, which no tokenizer takes.
    """
    for text in texts:
        check_characters(text, "the text")
    if sum(map(len, texts)) <= _USUAL * max_tokens:
        return
    piece = max(1024, _USUAL * max_tokens // 2)
    count = 0
    for text in texts:
        for start in range(0, len(text), piece):
            part = text[start : start + piece]
            count += len(tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"])
            if count > 2 * max_tokens:
                raise ContextLengthError(count, 1, max_tokens)


def _named_results(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With the function's name in messages of the role "tool": some templates show it, and OpenAI's API has only the id."""
    names: dict[str, str] = {}
    named = []
    for message in conversation:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ()) if "id" in call}
        name = names.get(message.get("tool_call_id", ""))
        named.append({"name": name, **message} if message["role"] == "tool" and name is not None else message)
    return named


@contextmanager
def bad_request(param: str, limit: tuple[str, int | None] = ("max_tokens", None)) -> Iterator[None]:
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
