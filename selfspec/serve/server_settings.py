"""Settings of a server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from selfspec.messages import OWN_TEMPLATE, ChatTemplate

ANY_POLICY = "any"
SAFE_POLICIES = ("ar", "auto", "auto:cost=layers", "copy", "del", "pacer")
"""Policies whose cost a client cannot choose: each decides for itself how much it drafts."""
MAX_CHOICES = 32
"""Largest `n`, and the most prompts of one completion request."""

_COUNTS = (
    "batch_size", "max_waiting", "max_body_bytes", "default_chat_tokens", "max_new_tokens", "max_context",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of one server.

    model_name: the model's name for clients. policy: for requests that name none; None for the generator's own.
    batch_size: number of texts decoded together. max_waiting: texts that may wait; further ones get status 429.
    max_body_bytes: limit on a request. default_chat_tokens: new tokens of a chat answer whose request sets no limit.
    api_key: what clients must send as a bearer token; None for no check.
    copy_from: texts to copy drafts from, for all requests whose policies copy.
    allowed_policies: names that requests may choose besides the server's own; `ANY_POLICY` allows every name.
    allowed_hosts: names and addresses, without ports, by which clients may call the server; None for all.
    share_prefixes: a prompt may reuse any other request's text; otherwise only texts with the same cache_salt.
    max_new_tokens: limit on a text. max_context: limit on a prompt with its new tokens; None for the model's context.
    """

    model_name: str
    policy: str | None = None
    batch_size: int = 8
    max_waiting: int = 64
    max_body_bytes: int = 4 << 20
    default_chat_tokens: int = 1024
    api_key: str | None = None
    copy_from: tuple[str, ...] = ()
    chat_template: ChatTemplate = OWN_TEMPLATE
    allowed_policies: tuple[str, ...] = SAFE_POLICIES
    allowed_hosts: tuple[str, ...] | None = None
    share_prefixes: bool = False
    max_new_tokens: int | None = None
    max_context: int | None = None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.api_key is not None and not self.api_key:
            raise ValueError("the API key is empty: give one, or none")


def default_name(model: str) -> str:
    """Name a model for clients: its folder's name, or its hub name without the owner."""
    return Path(re.sub(r"[/\\]+$", "", model)).resolve().name if Path(model).is_dir() else model.rpartition("/")[2]


def allowed_hosts(address: str, api_key: str | None, named: Sequence[str] = ()) -> tuple[str, ...] | None:
    """Host names by which clients may call a server that listens on this address; None for any.

    Any web page can give its own host name this machine's address and then call the server (DNS rebinding). So a server
    without a key that listens only on this machine accepts only this machine's names, and those that the operator adds.
    """
    if "*" in named:
        return None
    own = ("localhost", "127.0.0.1", "::1")
    is_local = address in own or address.startswith("127.")
    if not named and (api_key is not None or not is_local):
        return None
    return tuple(dict.fromkeys([*own, address.lower(), *(name.lower() for name in named)]))
