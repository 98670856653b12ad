"""Messages to a prompt, with the tokenizer's chat template or another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from layerskip_models.checkpoints.named_models import DEMO

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]
"""A conversation as in transformers and OpenAI's API: a list of {"role": "user", "content": "..."}, oldest first."""

Tools = Sequence[Mapping[str, Any]]
"""Functions a model may call, as in transformers and OpenAI's API: [{"type": "function", "function": {"name": "..."}}]."""

PLAIN = "plain"
_USUAL_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """source: Jinja as in transformers; None for the tokenizer's own. stops: strings that end an answer."""

    source: str | None = None
    stops: tuple[str, ...] = ()


OWN_TEMPLATE = ChatTemplate()
PLAIN_TEMPLATE = ChatTemplate(
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}Answer: {{ message.content.strip() }}\n\n"
    "{% elif message.role == 'user' %}Question: {{ message.content.strip() }}\n"
    "{% else %}{{ message.content.strip() }}\n\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Answer:{% endif %}",
    ("\nQuestion:",),
)
"""For base models, which were not trained on conversations: a list of questions and answers."""


def read_template(choice: str | None) -> ChatTemplate:
    """Read a template: "plain", the path of a Jinja file, or None for the tokenizer's own. OSError without such a file."""
    if choice is None:
        return OWN_TEMPLATE
    return PLAIN_TEMPLATE if choice == PLAIN else ChatTemplate(Path(choice).read_text(encoding="utf-8-sig"))


def template_of(model: str, choice: str | None) -> ChatTemplate:
    """Read a model's template. The demo is a base model, whose default is "plain". Raises as `read_template`."""
    return read_template(PLAIN if choice is None and model == DEMO else choice)


def has_template(tokenizer: PreTrainedTokenizerBase | None, template: ChatTemplate = OWN_TEMPLATE) -> bool:
    """Return whether there is a template: this one, or the tokenizer's own."""
    return template.source is not None or bool(getattr(tokenizer, "chat_template", None))


def are_messages(value: object) -> TypeGuard[Messages]:
    """Return whether it is a list of mappings, whatever they contain."""
    return isinstance(value, Sequence) and len(value) > 0 and all(isinstance(item, Mapping) for item in value)


def encode_messages(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase | None,
    template: ChatTemplate = OWN_TEMPLATE,
    tools: Tools | None = None,
    variables: Mapping[str, Any] | None = None,
    *,
    ask: bool | None = None,
) -> list[int]:
    """Encode a prompt that asks for the next answer; if the last message is the assistant's, it is continued.

    tools: for a template that tells the model of them. variables: others that the template reads. ask: treat all messages as
    complete, and say whether the beginning of the next answer follows them.
    Raises ValueError without a tokenizer or a template, and for messages that the template refuses or leaves out.
    """
    from jinja2 import TemplateError

    if not are_messages(messages) or not all(isinstance(message.get("role"), str) for message in messages):
        raise ValueError('messages must be a list of {"role": "user", "content": "..."}, the oldest first')
    if tokenizer is None:
        raise ValueError("messages need a tokenizer: pass one to SelfSpecGenerator, or give token ids as the prompt")
    if not has_template(tokenizer, template):
        remedy = "give a text prompt, or set tokenizer.chat_template; some commands take --chat-template (docs/chat.md)"
        raise ValueError(f"this model's tokenizer has no chat template: {remedy}")
    continued = ask is None and messages[-1]["role"] == "assistant"
    ends = {"add_generation_prompt": ask is not False and not continued, "continue_final_message": continued}
    told = None if tools is None else [dict(tool) for tool in tools]
    more = {**(variables or {}), **ends}
    render = partial(tokenizer.apply_chat_template, chat_template=template.source, tools=told, **more)
    for message in messages:
        check_characters(str(message.get("content")), "a message")
    conversation = [dict(message) for message in messages]
    unusual = [place for place, message in enumerate(messages) if message["role"] not in _USUAL_ROLES]
    if "developer" not in str(template.source or tokenizer.chat_template):
        for message in conversation:
            message["role"] = "system" if message["role"] == "developer" else message["role"]
    try:
        text = render(conversation, tokenize=False) if unusual else ""
        ids: list[int] = list(render(conversation, tokenize=True, return_dict=True)["input_ids"])
    except TemplateError as error:
        raise ValueError(f"the chat template refuses these messages: {error}") from error
    except Exception as error:  # a template is a program: it may divide by zero, recurse, or use all memory
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"the chat template fails on these messages ({why}): change them, or the template") from error
    # Templates silently skip roles that they do not know. Of the usual ones some leave out earlier answers on purpose.
    for place in unusual:
        content = messages[place].get("content")
        if isinstance(content, str) and content.strip() not in text:
            which = f"messages[{place}], whose role is {messages[place]['role']!r}"
            raise ValueError(f"the chat template leaves out {which}: use a role that it knows, or another template")
    return ids


def encode_question(text: str, tokenizer: PreTrainedTokenizerBase | None, *, raw: bool) -> str | list[int]:
    """Encode a text as a user's message, if the tokenizer has a chat template and not `raw`; else return the text."""
    if raw or not text or not has_template(tokenizer):  # an empty text is refused as a prompt
        return text
    return encode_messages([{"role": "user", "content": text}], tokenizer)


def check_characters(text: str, name: str) -> None:
    """Raise ValueError for half a character, which JSON can write and no tokenizer takes. name: of the text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise ValueError(f"{name} has half a character at {error.start}, {half}: leave it out") from None
