"""A request's text or messages to prompt ids. Prompts that are far too long are refused before all of them is tokenised."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from selfspec.engine.request import ContextLengthError
from selfspec.messages import ChatTemplate, conversation_ids, encode_messages, has_template
from selfspec.serve.api_errors import ApiError
from selfspec.serve.api_requests import Message

_USUAL = 8
"""A generous number of characters per token. Texts with fewer per position of the context are tokenised at once."""


def check_length(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], most_tokens: int) -> None:
    """Raise ContextLengthError for texts that together have more than twice as many tokens as are possible.

    They are counted piece by piece, which is right except for a token or two at the cuts.
    """
    if sum(map(len, texts)) <= _USUAL * most_tokens:
        return
    piece = max(1024, _USUAL * most_tokens // 2)
    count = 0
    for text in texts:
        for start in range(0, len(text), piece):
            part = text[start : start + piece]
            count += len(tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"])
            if count > 2 * most_tokens:
                raise ContextLengthError(count, 1, most_tokens)


def chat_prompt(
    tokenizer: PreTrainedTokenizerBase, template: ChatTemplate, messages: Sequence[Message], ask: bool | None = None
) -> list[int]:
    """The ids of a prompt that asks for the next answer; if the last message is the assistant's, it is continued.

    ask: treat all messages as complete, and say whether the beginning of the next answer follows them.
    Raises ApiError (status 400) without a template, and ValueError for messages that the template refuses.
    """
    if not has_template(tokenizer, template):
        raise ApiError(
            "this model has no chat template: use /v1/completions, or start the server with --chat-template",
            param="messages",
            code="no_chat_template",
        )
    conversation = []
    for message in messages:
        fields = {"role": message.role, "content": message.text, "name": message.name}
        fields["reasoning_content"] = message.reasoning_content
        conversation.append({name: text for name, text in fields.items() if text is not None})
    if ask is not None:
        return conversation_ids(conversation, tokenizer, template, ask=ask)
    return encode_messages(conversation, tokenizer, template)
