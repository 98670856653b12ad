"""What a server is told when it starts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ANY_POLICY = "any"
SAFE_POLICIES = ("ar", "auto", "auto:cost=layers", "copy", "del", "pacer")
"""Those whose costs nobody chooses: each decides for itself how much it drafts."""
MOST_CHOICES = 32
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
    allowed_policies: names that requests may choose beside the server's own; `ANY_POLICY` among them allows every name.
    allowed_hosts: names and addresses by which clients may call the server, without ports; None for all.
    share_prefixes: whether a prompt may go on from any other request's text; else only within one cache_salt.
    most_new_tokens: of a text. most_context: of a prompt and its new tokens; None for what the model can.
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
    allowed_policies: tuple[str, ...] = SAFE_POLICIES
    allowed_hosts: tuple[str, ...] | None = None
    share_prefixes: bool = False
    most_new_tokens: int | None = None
    most_context: int | None = None

    def __post_init__(self) -> None:
        for name in (
            *("batch_size", "max_waiting", "max_body_bytes", "default_chat_tokens"),
            *("most_new_tokens", "most_context"),
        ):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.api_key is not None and not self.api_key:
            raise ValueError("the API key is empty: give one, or none")


def default_name(model: str) -> str:
    """What clients call a model: the folder's own name, or a hub name without its owner."""
    return Path(re.sub(r"[/\\]+$", "", model)).resolve().name if Path(model).is_dir() else model.rpartition("/")[2]


def allowed_hosts(address: str, api_key: str | None, named: Sequence[str] = ()) -> tuple[str, ...] | None:
    """Names by which clients may call a server that listens on this address, None for any.

    A page from anywhere can give its own name this machine's address, and then calls the server as its own (DNS rebinding).
    So a server without a key that listens on this machine alone answers to this machine's names, and those of the operator.
    """
    if "*" in named:
        return None
    own = ("localhost", "127.0.0.1", "::1")
    is_local = address in own or address.startswith("127.")
    if not named and (api_key is not None or not is_local):
        return None
    return tuple(dict.fromkeys([*own, address.lower(), *(name.lower() for name in named)]))
