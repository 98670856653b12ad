"""Messages to a prompt, with the tokenizer's chat template or another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]
"""A conversation as in transformers and OpenAI's API: a list of {"role": "user", "content": "..."}, oldest first."""

Tools = Sequence[Mapping[str, Any]]
"""What a model may call, as in transformers and OpenAI's API: [{"type": "function", "function": {"name": "...", ...}}]."""

PLAIN = "plain"
_KNOWN_ROLES = ("system", "user", "assistant", "tool")


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
    """ "plain", the path of a Jinja file, or None for the tokenizer's own. Raises OSError if there is no such file."""
    if choice is None:
        return OWN_TEMPLATE
    return PLAIN_TEMPLATE if choice == PLAIN else ChatTemplate(Path(choice).read_text(encoding="utf-8-sig"))


def template_of(model: str | None, choice: str | None) -> ChatTemplate:
    """Read a model's template. The demo (None) is a base model, whose default is "plain". Raises as `read_template`."""
    return read_template(PLAIN if choice is None and model is None else choice)


def has_template(tokenizer: PreTrainedTokenizerBase | None, template: ChatTemplate = OWN_TEMPLATE) -> bool:
    """Whether there is a template: this one, or the tokenizer's own."""
    return template.source is not None or bool(getattr(tokenizer, "chat_template", None))


def are_messages(value: object) -> TypeGuard[Messages]:
    """Whether it is a list of mappings, whatever they contain."""
    return isinstance(value, Sequence) and len(value) > 0 and all(isinstance(item, Mapping) for item in value)


def encode_messages(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase | None,
    template: ChatTemplate = OWN_TEMPLATE,
    tools: Tools | None = None,
) -> list[int]:
    """Encode a prompt that asks for the next answer; if the last message is the assistant's, it is continued.

    tools: what the model may call, for a template that tells it of them.
    Raises ValueError without a tokenizer or a template, and for messages that the template refuses or leaves out.
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
    return _ids(
        messages, tokenizer, template, tools, add_generation_prompt=not continued, continue_final_message=continued
    )


def conversation_ids(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    template: ChatTemplate = OWN_TEMPLATE,
    *,
    ask: bool,
    tools: Tools | None = None,
) -> list[int]:
    """Encode a complete conversation. ask: add the start of the next answer. Raises ValueError as `encode_messages`."""
    if not has_template(tokenizer, template):
        raise ValueError(
            "this model's tokenizer has no chat template, which messages need: choose one with --chat-template (docs/chat.md)"
        )
    return _ids(messages, tokenizer, template, tools, add_generation_prompt=ask, continue_final_message=False)


def _ids(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    template: ChatTemplate,
    tools: Tools | None,
    **options: bool,
) -> list[int]:
    from jinja2 import TemplateError

    def render(conversation: Sequence[Mapping[str, Any]], tokenize: bool) -> Any:
        return tokenizer.apply_chat_template(
            [dict(message) for message in conversation],
            chat_template=template.source,
            tools=None if tools is None else [dict(tool) for tool in tools],
            tokenize=tokenize,
            return_dict=tokenize,
            **options,
        )

    for message in messages:
        check_characters(str(message.get("content")), "a message")
    try:
        found = render(_heard(messages, lambda conversation: render(conversation, False)), True)
    except UnheardError:
        raise
    except TemplateError as error:
        raise ValueError(f"the chat template refuses these messages: {error}") from error
    except Exception as error:  # a template is a program: it may divide by zero, recurse, or use all memory
        raise ValueError(
            f"the chat template fails on these messages ({type(error).__name__}: {error}): change them, or the template"
        ) from error
    ids: list[int] = list(found["input_ids"])
    return ids


def check_characters(text: str, name: str) -> None:
    """Raise ValueError for half a character, which JSON can write and no tokenizer takes. name: of the text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise ValueError(f"{name} has half a character at {error.start}, {half}: leave it out") from None


class UnheardError(ValueError):
    """A chat template leaves out a message, so that the model would not see it."""

    def __init__(self, place: int, role: str) -> None:
        super().__init__(
            f"the chat template leaves out messages[{place}], whose role is {role!r}: "
            "use a role that the template knows, or another template"
        )


def _heard(messages: Messages, render: Callable[[Messages], str]) -> Messages:
    """Give the messages roles that the template knows: "developer" becomes "system" if the template has no such role.

    Templates silently skip roles that they do not know. Messages of the usual roles are not checked, since some templates
    leave out earlier answers on purpose. Raises UnheardError for a message of another role that is left out.
    """
    uncertain = [place for place, message in enumerate(messages) if message["role"] not in _KNOWN_ROLES]
    unheard = _unheard(messages, uncertain, render)
    if not unheard:
        return messages
    renamed = [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]
    if renamed != list(messages):
        unheard = _unheard(renamed, uncertain, render)
    if unheard:
        raise UnheardError(unheard[0], messages[unheard[0]]["role"])
    return renamed


def _unheard(messages: Messages, places: Sequence[int], render: Callable[[Messages], str]) -> list[int]:
    """Find the messages among `places` whose text is missing in the prompt, by rendering unique words in their place.

    If the template refuses these words, it may be refusing the role "developer": then the messages of that role.
    """
    probes = {place: f"probe{place}of{len(messages)}messages" for place in places}
    probed = {place: _with_text(messages[place], probe) for place, probe in probes.items()}
    if not any(probed.values()):
        return []
    try:
        text = render([probed.get(place) or message for place, message in enumerate(messages)])
    except Exception:
        return [place for place in places if messages[place]["role"] == "developer"]
    return [place for place in places if probed[place] is not None and probes[place] not in text]


def _with_text(message: Mapping[str, Any], text: str) -> Mapping[str, Any] | None:
    """Give the message another text; None if it has no text, or tool calls that a template may show instead."""
    content = message.get("content")
    if message.get("tool_calls") or not content:
        return None
    if isinstance(content, str):
        return {**message, "content": text} if content.strip() else None
    if not isinstance(content, list):
        return None
    parts = [
        {**part, "text": text} if isinstance(part, Mapping) and isinstance(part.get("text"), str) else part
        for part in content
    ]
    return {**message, "content": parts} if parts != content else None
