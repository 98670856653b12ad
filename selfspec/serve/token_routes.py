"""Text and messages to tokens and back, as in vLLM: /tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import FailFast, Field, model_validator

from selfspec.serve.api_requests import OWN_TEMPLATE, FewMessages, Message, refusals
from selfspec.serve.bodies import Strict, read_body, wrong_field
from selfspec.serve.tools.tool_requests import MAX_TOOLS, Tool
from selfspec.serve.translation import Translator


class TokenizeRequest(Strict):
    """Body of /tokenize: a prompt, or messages.

    add_special_tokens: for a prompt; messages get those of the chat template. add_generation_prompt, continue_final_message:
    for messages; without them the result is what /v1/chat/completions reads. tools: for messages, as in a chat.
    return_token_strs: also return the tokenizer's name of each token.
    """

    _kept_empty: ClassVar[frozenset[str]] = frozenset({"prompt"})
    _reasons: ClassVar[dict[str, str]] = {
        **refusals(OWN_TEMPLATE, "chat_template", "chat_template_kwargs"),
    }

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], FailFast(), FewMessages] = Field(default_factory=list)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS), FailFast()] = Field(default_factory=list)
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (not self.messages):
            raise wrong_field("prompt", "give a prompt or messages")
        if self.tools and not self.messages:
            raise wrong_field("tools", "tools go with messages")
        if self.messages and self.add_special_tokens:
            raise wrong_field("add_special_tokens", "the chat template adds the special tokens of messages")
        for name in ("add_generation_prompt", "continue_final_message"):
            if not self.messages and getattr(self, name):
                raise wrong_field(name, f"{name} goes with messages")
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise wrong_field("add_generation_prompt", "the last message is continued, or answered, but not both")
            if self.messages[-1].role != "assistant":
                raise wrong_field("continue_final_message", "the last message is not the assistant's")
        return self


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], FailFast()]


def add_token_routes(app: FastAPI, translator: Translator) -> None:
    tokenizer = translator.tokenizer

    @app.post("/tokenize")
    async def tokenize(request: Request) -> JSONResponse:
        lanes = request.app.state.lanes
        body, size = await read_body(request, TokenizeRequest, lanes)
        ids = await lanes.prompts.run_by_size(size, lambda: _tokens(translator, body))
        found: dict[str, Any] = {"count": len(ids), "max_model_len": translator.max_context, "tokens": ids}
        if body.return_token_strs:
            found["token_strs"] = tokenizer.convert_ids_to_tokens(ids)
        return JSONResponse(found, headers=body.ignored_fields_header)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> JSONResponse:
        lanes = request.app.state.lanes
        body, size = await read_body(request, DetokenizeRequest, lanes)
        translator.check_name(body.model)
        text = await lanes.prompts.run_by_size(size, lambda: translator.text_of(body.tokens))
        return JSONResponse({"prompt": text}, headers=body.ignored_fields_header)

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> JSONResponse:
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return JSONResponse(
            {
                "tokenizer_class": type(tokenizer).__name__,
                "model_max_length": translator.max_context,
                **{name: getattr(tokenizer, name, None) for name in names},
                "chat_template": translator.chat_template,
            }
        )


def _tokens(translator: Translator, body: TokenizeRequest) -> list[int]:
    translator.check_name(body.model)
    if body.prompt is not None:
        return translator.tokens_of(body.prompt, special=body.add_special_tokens is not False)
    ask = body.add_generation_prompt if not body.continue_final_message else None
    return translator.chat_ids(body.messages, ask, body.tools)
