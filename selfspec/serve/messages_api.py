"""Anthropic's Messages API: a request becomes a chat, and its answer a list of content blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field

from selfspec.serve.api_errors import MESSAGES, ApiError
from selfspec.serve.api_responses import PartsAnswer
from selfspec.serve.bodies import Integer
from selfspec.serve.other_apis import OtherRequest, Placed, response_format

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class CountTokensRequest(
    OtherRequest,
    harmless="cache_control context_management diagnostics inference_geo speed user_profile_id workspace_id",
    neutral={"thinking": ({"type": "disabled"}, {"type": "adaptive"})},
):
    """Body of /v1/messages/count_tokens. Messages and tools are checked as a chat's."""

    _own_names: ClassVar[dict[str, str]] = {"stop": "stop_sequences", "response_format": "output_config.format"}
    _functions: ClassVar[tuple[str | None, ...]] = (None, "custom")

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    max_tokens: Integer | None = None
    stop_sequences: list[str] = Field(default_factory=list)
    tool_choice: dict[str, Any] = Field(default_factory=lambda: {"type": "auto"})
    output_config: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)

    def _messages(self) -> Iterator[Placed]:
        if self.system is not None:
            yield "system", {"role": "system", "content": self.system}
        for number, message in enumerate(self.messages):
            place, role, content = f"messages.{number}", message.get("role"), message.get("content")
            for index, block in enumerate(content if isinstance(content, list) else ()):
                kind = block.get("type") if isinstance(block, dict) else None
                if kind == "text":
                    yield place, {"role": role, "content": [block]}
                elif kind == "tool_use":
                    function = {"name": block.get("name"), "arguments": json.dumps(block.get("input", {}))}
                    yield place, {"role": role, "tool_calls": [{"id": block.get("id"), "function": function}]}
                elif kind == "tool_result":
                    call, result = block.get("tool_use_id"), block.get("content")
                    yield place, {"role": "tool", "tool_call_id": call, "content": result}
                elif kind not in ("thinking", "redacted_thinking"):
                    at = f"{place}.content.{index}.type"
                    raise ApiError(f"{at}: only texts, calls and results are read, not {str(kind)[:64]!r}", param=at)
            if not isinstance(content, list):
                yield place, message

    def _chat_fields(self) -> dict[str, Any]:
        kind = self.tool_choice.get("type")
        named = {"type": "function", "function": {"name": self.tool_choice.get("name")}}
        return {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "tool_choice": named if kind == "tool" else "required" if kind == "any" else kind,
            "parallel_tool_calls": False if self.tool_choice.get("disable_parallel_tool_use") else None,
            "response_format": response_format(self.output_config),
            "user": self.metadata.get("user_id"),
        }


class MessagesRequest(CountTokensRequest):
    """Body of /v1/messages."""

    max_tokens: Integer


class MessagesAnswer(PartsAnswer):
    prefix = "msg_"
    ping = 'event: ping\ndata: {"type":"ping"}\n\n'

    def failure(self, error: ApiError) -> str:
        return self._event("error", **error.body(MESSAGES))

    def _message(self, **more: Any) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": self._parts}
        return {**head, "stop_reason": None, "stop_sequence": None, **more}

    def _begin(self) -> str:
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        return self._event("message_start", message=self._message(usage=usage))

    def _of_block(self, kind: str, **fields: Any) -> str:
        return self._event(f"content_block_{kind}", index=len(self._parts) - 1, **fields)

    def _begin_text(self) -> str:
        self._parts.append({"type": "text", "text": ""})
        return self._of_block("start", content_block=self._parts[-1])

    def _write(self, text: str) -> str:
        self._parts[-1]["text"] += text
        return self._of_block("delta", delta={"type": "text_delta", "text": text})

    def _end_text(self) -> str:
        return self._of_block("stop")

    def _call(self, call: dict[str, Any]) -> str:
        name, written = call["function"]["name"], call["function"]["arguments"]
        self._parts.append({"type": "tool_use", "id": call["id"], "name": name, "input": {}})
        events = self._of_block("start", content_block=self._parts[-1])
        self._parts[-1]["input"] = json.loads(written)
        events += self._of_block("delta", delta={"type": "input_json_delta", "partial_json": written})
        return events + self._of_block("stop")

    def _end(self, used: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        counts = dict(used["usage"])
        cached = counts.pop("prompt_tokens_details")["cached_tokens"]
        caching = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
        read, written = counts.pop("prompt_tokens") - cached, counts.pop("completion_tokens")
        usage = {"input_tokens": read, **caching, "output_tokens": written, **counts}
        stop = self._stop if self._stop in self._request.stop_sequences else None  # else it is the template's
        why = {"stop_reason": _STOP_REASONS[self._finish] if stop is None else "stop_sequence", "stop_sequence": stop}
        events = self._event("message_delta", delta=why, usage=usage) + self._event("message_stop")
        return events, self._message(**{**used, "usage": usage}, **why)
