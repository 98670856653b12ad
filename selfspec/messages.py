"""Messages to a prompt: by the tokenizer's chat template, or by another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]
"""A conversation as transformers and OpenAI have it: {"role": "system", "user" or "assistant", "content": text} each."""

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """source: Jinja, as in transformers; None for the tokenizer's own. stops: strings at which an answer ends."""

    source: str | None = None
    stops: tuple[str, ...] = ()


OWN_TEMPLATE = ChatTemplate()
"""The tokenizer's."""
PLAIN_TEMPLATE = ChatTemplate(
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
        return OWN_TEMPLATE
    return PLAIN_TEMPLATE if choice == PLAIN else ChatTemplate(Path(choice).read_text(encoding="utf-8"))


def template_of(model: str | None, choice: str | None) -> ChatTemplate:
    """What a model talks by. model: None for the demo, a base model, which takes "plain" by itself.

    Raises as `read_template`.
    """
    return read_template(PLAIN if choice is None and model is None else choice)


def has_template(tokenizer: PreTrainedTokenizerBase | None, template: ChatTemplate = OWN_TEMPLATE) -> bool:
    """Whether messages can become a prompt: by this template, or by the tokenizer's own."""
    return template.source is not None or bool(getattr(tokenizer, "chat_template", None))


def are_messages(value: object) -> TypeGuard[Messages]:
    """Whether it is a list of mappings, right or wrong ones."""
    return isinstance(value, Sequence) and len(value) > 0 and all(isinstance(item, Mapping) for item in value)


def encode_messages(
    messages: Messages, tokenizer: PreTrainedTokenizerBase | None, template: ChatTemplate = OWN_TEMPLATE
) -> list[int]:
    """The ids of a prompt that asks for the next answer; if the last message is the assistant's, it is continued.

    template: the tokenizer's own unless given. Raises ValueError without a tokenizer or a template, and for messages that the
    template refuses.
    """
    if not are_messages(messages) or not all(isinstance(message.get("role"), str) for message in messages):
        raise ValueError('messages must be a list of {"role": "user", "content": "..."}, the oldest first')
    if tokenizer is None:
        raise ValueError("messages need a tokenizer: pass one to SelfSpecGenerator, or give token ids as the prompt")
    if not has_template(tokenizer, template):
        raise ValueError(
            "this model's tokenizer has no chat template: give a text prompt, or set tokenizer.chat_template (docs/chat.md)"
        )
    continued = messages[-1]["role"] == "assistant"
    return _ids(messages, tokenizer, template, add_generation_prompt=not continued, continue_final_message=continued)


def conversation_ids(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate = OWN_TEMPLATE, *, ask: bool
) -> list[int]:
    """The ids of a conversation that is complete, for training; ask: followed by the beginning of the next answer.

    Raises ValueError as `encode_messages`.
    """
    if not has_template(tokenizer, template):
        raise ValueError(
            "this model's tokenizer has no chat template, which messages need: choose one with --chat-template (docs/chat.md)"
        )
    return _ids(messages, tokenizer, template, add_generation_prompt=ask, continue_final_message=False)


def _ids(messages: Messages, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate, **options: bool) -> list[int]:
    try:
        found = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=template.source,
            tokenize=True,
            return_dict=True,
            **options,
        )
    except TemplateError as error:
        raise ValueError(f"the chat template refuses these messages: {error}") from error
    ids: list[int] = list(found["input_ids"])
    return ids
