"""OpenAI's Responses API: a request becomes a chat, and its answer a list of output items. Nothing is stored."""

from __future__ import annotations

from collections.abc import Iterator
from time import time
from typing import Any, ClassVar
from uuid import uuid4

from pydantic import Field

from selfspec.serve.api_errors import ApiError
from selfspec.serve.api_responses import PartsAnswer
from selfspec.serve.bodies import Integer, refusals
from selfspec.serve.other_apis import OtherRequest, Placed, response_format

_STATELESS = "nothing is stored here: set store to false, send the earlier items in input, and leave out {}"


class ResponsesRequest(
    OtherRequest,
    harmless="client_metadata max_tool_calls prompt_cache_options truncation",
    reasons=refusals(_STATELESS, "conversation", "previous_response_id", "prompt"),
):
    """Body of /v1/responses. Fields of input items and of tools are checked as those of a chat's messages and tools."""

    _own_names: ClassVar[dict[str, str]] = {
        "messages": "input", "response_format": "text.format",
        "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens",
    }  # fmt: skip

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Integer | None = None
    text: dict[str, Any] = Field(default_factory=dict)
    tool_choice: str | dict[str, Any] = "auto"
    include: list[str] = Field(default_factory=list)
    top_logprobs: Integer | None = None
    metadata: dict[str, str] = Field(default_factory=dict)

    def _messages(self) -> Iterator[Placed]:
        if self.instructions is not None:
            yield "instructions", {"role": "system", "content": self.instructions}
        if isinstance(self.input, str):
            yield "input", {"role": "user", "content": self.input}
            return
        for number, item in enumerate(self.input):
            place, kind, call = f"input.{number}", item.get("type", "message"), item.get("call_id")
            if kind == "message":
                yield place, item
            elif kind == "function_call":
                function = {name: item.get(name) for name in ("name", "arguments")}
                yield place, {"role": "assistant", "tool_calls": [{"id": call, "function": function}]}
            elif kind == "function_call_output":
                yield place, {"role": "tool", "tool_call_id": call, "content": item.get("output")}
            elif kind != "reasoning":
                unread = "only messages, calls and their outputs are read"
                why = _STATELESS.format(kind) if kind == "item_reference" else unread
                raise ApiError(f"{place}.type is {str(kind)[:64]!r}: {why}", param=f"{place}.type")

    def _chat_fields(self) -> dict[str, Any]:
        return {
            "max_completion_tokens": self.max_output_tokens,
            "response_format": response_format(self.text),
            "tool_choice": _choice(self.tool_choice),
            "logprobs": "message.output_text.logprobs" in self.include or bool(self.top_logprobs),
            "top_logprobs": self.top_logprobs,
        }


def _choice(given: Any) -> Any:
    """Make a chat's form of it, which has a level more."""
    if not isinstance(given, dict):
        return given
    rest = {name: value for name, value in given.items() if name != "type"}
    if isinstance(rest.get("tools"), list):  # those that are allowed
        rest["tools"] = [_choice(tool) for tool in rest["tools"]]
    return {"type": given.get("type"), str(given.get("type")): rest}


class ResponsesAnswer(PartsAnswer):
    prefix = "resp_"
    _number = 0  # of events

    def failure(self, error: ApiError) -> str:
        failed = self._response("failed", error={"code": "server_error", "message": error.message})
        return self._event("response.failed", response=failed)

    def _event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        return super()._event(kind, **fields, sequence_number=self._number - 1)

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        given, chat = self._request, self._request.chat
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": status, "error": None,
            "incomplete_details": None, "instructions": given.instructions, "max_output_tokens": given.max_output_tokens,
            "metadata": given.metadata, "model": self._model, "output": self._parts,
            "parallel_tool_calls": chat.parallel_tool_calls is not False, "previous_response_id": None, "store": False,
            "temperature": chat.temperature, "text": {"format": given.text.get("format") or {"type": "text"}},
            "tool_choice": given.tool_choice, "tools": given.tools or [], "top_p": chat.top_p, "truncation": "disabled",
            "usage": None, "user": chat.user, **more,
        }  # fmt: skip

    def _begin(self) -> str:
        response = self._response("in_progress")
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def _of_item(self, kind: str, **fields: Any) -> str:
        return self._event(f"response.{kind}", output_index=len(self._parts) - 1, **fields)

    def _of_text(self, kind: str, **fields: Any) -> str:
        return self._of_item(kind, item_id=self._parts[-1]["id"], content_index=0, **fields)

    def _add(self, prefix: str, **fields: Any) -> str:
        self._parts.append({"id": f"{prefix}{uuid4().hex}", **fields, "status": "in_progress"})
        return self._of_item("output_item.added", item=self._parts[-1])

    def _begin_text(self) -> str:
        added = self._add("msg_", type="message", role="assistant", content=[])
        self._parts[-1]["content"] = [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
        return added + self._of_text("content_part.added", part=self._parts[-1]["content"][0])

    def _write(self, text: str) -> str:
        (part,), logprobs = self._parts[-1]["content"], self._logprobs(self._unsent)
        part["text"] += text
        part["logprobs"] += logprobs
        return self._of_text("output_text.delta", delta=text, logprobs=logprobs)

    def _end_text(self) -> str:
        (part,) = self._parts[-1]["content"]
        self._parts[-1]["status"] = "incomplete" if self._finish == "length" else "completed"
        done = self._of_text("output_text.done", text=part["text"], logprobs=part["logprobs"])
        done += self._of_text("content_part.done", part=part)
        return done + self._of_item("output_item.done", item=self._parts[-1])

    def _call(self, call: dict[str, Any]) -> str:
        name, written = call["function"]["name"], call["function"]["arguments"]
        events = self._add("fc_", type="function_call", call_id=call["id"], name=name, arguments="")
        item = self._parts[-1]
        item |= {"arguments": written, "status": "completed"}
        events += self._of_item("function_call_arguments.delta", item_id=item["id"], delta=written)
        events += self._of_item("function_call_arguments.done", item_id=item["id"], name=name, arguments=written)
        return events + self._of_item("output_item.done", item=item)

    def _end(self, used: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        counts, is_cut = dict(used["usage"]), self._finish == "length"
        usage = {
            "input_tokens": counts.pop("prompt_tokens"),
            "input_tokens_details": {**counts.pop("prompt_tokens_details"), "cache_write_tokens": 0},
            "output_tokens": counts.pop("completion_tokens"),
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        more: dict[str, Any] = {**used, "usage": {**usage, **counts}, "completed_at": int(time())}
        if is_cut:
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        response = self._response("incomplete" if is_cut else "completed", **more)
        return self._event(f"response.{response['status']}", response=response), response
