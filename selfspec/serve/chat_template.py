"""Messages to a prompt: by the tokenizer's chat template, or one given to the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from selfspec.serve.api_errors import ApiError
from selfspec.serve.api_requests import Message

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """source: Jinja, as in transformers; None for the tokenizer's own. stops: strings at which an answer ends."""

    source: str | None = None
    stops: tuple[str, ...] = ()


_PLAIN = ChatTemplate(
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}Answer: {{ message.content.strip() }}\n\n"
    "{% elif message.role == 'user' %}Question: {{ message.content.strip() }}\n"
    "{% else %}{{ message.content.strip() }}\n\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Answer:{% endif %}",
    ("\nQuestion:",),
)
"""For base models, which were trained on no conversation: the form of a list of questions and answers."""


def read_template(choice: str | None) -> ChatTemplate:
    """ "plain", the path of a Jinja file, or None for the tokenizer's own. Raises OSError if there is no such file."""
    if choice is None:
        return ChatTemplate()
    return _PLAIN if choice == PLAIN else ChatTemplate(Path(choice).read_text(encoding="utf-8"))


def chat_prompt(tokenizer: PreTrainedTokenizerBase, template: ChatTemplate, messages: Sequence[Message]) -> list[int]:
    """The ids of a prompt that asks for the next answer.

    Raises ApiError (status 400) without a template, and for messages that the template refuses.
    """
    if template.source is None and not getattr(tokenizer, "chat_template", None):
        raise ApiError(
            "this model has no chat template: use /v1/completions, or start the server with --chat-template",
            param="messages",
            code="no_chat_template",
        )
    conversation = [{"role": message.role, "content": message.text} for message in messages]
    for message, entry in zip(messages, conversation):
        if message.name is not None:
            entry["name"] = message.name
    try:
        ids = tokenizer.apply_chat_template(
            conversation,
            chat_template=template.source,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
    except TemplateError as error:
        raise ApiError(f"the chat template refuses these messages: {error}", param="messages") from None
    assert isinstance(ids, list)
    return ids
