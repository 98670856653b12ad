"""Messages of a request to a prompt: by the tokenizer's chat template, or one given to the server."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from selfspec.messages import ChatTemplate, conversation_ids, encode_messages, has_template
from selfspec.serve.api_errors import ApiError
from selfspec.serve.api_requests import Message


def chat_prompt(
    tokenizer: PreTrainedTokenizerBase, template: ChatTemplate, messages: Sequence[Message], ask: bool | None = None
) -> list[int]:
    """The ids of a prompt that asks for the next answer; if the last message is the assistant's, it is continued.

    ask: whether the beginning of the next answer follows the messages, which are then complete, the last one, too.
    Raises ApiError (status 400) without a template, and ValueError for messages that the template refuses.
    """
    if not has_template(tokenizer, template):
        raise ApiError(
            "this model has no chat template: use /v1/completions, or start the server with --chat-template",
            param="messages",
            code="no_chat_template",
        )
    conversation: list[dict[str, str]] = []
    for message in messages:
        more = {"name": message.name, "reasoning_content": message.reasoning_content}
        conversation.append(
            {
                "role": message.role,
                "content": message.text,
                **{key: text for key, text in more.items() if text is not None},
            }
        )
    if ask is not None:
        return conversation_ids(conversation, tokenizer, template, ask=ask)
    return encode_messages(conversation, tokenizer, template)
