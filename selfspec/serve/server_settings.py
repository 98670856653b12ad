"""What a server is told when it starts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

MOST_CHOICES = 16
"""Largest `n`, and the most prompts of one completion request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of one server.

    model_name: what clients call the model. policy: for requests that name none; None for the generator's own.
    batch_size: texts that are decoded together. max_waiting: texts that may wait for a place; more get status 429.
    max_body_bytes: of a request. default_chat_tokens: new tokens of a chat answer whose request gives no limit.
    api_key: what clients must send as a bearer token; None for no check.
    copy_from: texts that drafts of all requests may be copied from, for policies that copy.
    chat_template: Jinja source instead of the tokenizer's own template. chat_stops: stop strings that belong to it.
    """

    model_name: str
    policy: str | None = None
    batch_size: int = 8
    max_waiting: int = 64
    max_body_bytes: int = 4 << 20
    default_chat_tokens: int = 1024
    api_key: str | None = None
    copy_from: tuple[str, ...] = ()
    chat_template: str | None = None
    chat_stops: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_waiting", "max_body_bytes", "default_chat_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.api_key is not None and not self.api_key:
            raise ValueError("the API key is empty: give one, or none")


def default_name(model: str) -> str:
    """What clients call a model: the folder's own name, or a hub name without its owner."""
    return Path(re.sub(r"[/\\]+$", "", model)).resolve().name if Path(model).is_dir() else model.rpartition("/")[2]
