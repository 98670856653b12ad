"""The options of `selfspec serve`, and what a server makes of them. Needs none of the server's packages."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from layerskip_models.checkpoints.named_models import DEMO
from selfspec.cli.option_groups import ChatTemplateOption, CopyFromOption, ModelArgument, option
from selfspec.cli.text_input import read_copy_files
from selfspec.messages import ChatTemplate, template_of
from selfspec.options import POLICY_HELP

SAFE_POLICIES = ("ar", "auto", "auto:cost=layers", "copy", "del", "pacer")
"""Policies whose cost a client cannot choose: each decides for itself how much it drafts."""
ANY_POLICY = "any"
MAX_CHOICES = 32  # largest `n`, and the most prompts of one completion request

_SPECULATION, _NETWORK, _LOAD = "Speculation", "Network", "Load"
_POLICIES = f"Policy that requests may name, '{ANY_POLICY}' for all. Default: the server's, {', '.join(SAFE_POLICIES)}."
_HOSTS = "Host name that clients may call, '*' for any. Default: any; without a key on a local --host, localhost."
_COUNTS = ("batch_size", "max_waiting", "default_chat_tokens", "max_tokens", "max_context")
_OWN_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Settings of one server; those of a replica under Ray are the same. Files are read when they are first asked for."""

    model: ModelArgument = DEMO
    policy: str | None = option(None, f"{POLICY_HELP} Requests may name another.", _SPECULATION)
    allow_policy: list[str] | None = option(None, _POLICIES, _SPECULATION)
    copy_from: CopyFromOption = None
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for all.", _NETWORK)
    port: int = option(8000, "Port; 0 takes a free one.", _NETWORK, min=0, max=65535)
    api_key: str | None = option(None, "Key that clients must send.", _NETWORK, envvar="SELFSPEC_API_KEY")
    allow_host: list[str] | None = option(None, _HOSTS, _NETWORK)
    allow_origin: list[str] | None = option(None, "Origin of pages that may call; '*' for any; repeatable.", _NETWORK)
    served_name: str | None = option(None, "Model's name for clients (default: the last part of its name).", _NETWORK)
    chat_template: ChatTemplateOption = None
    batch_size: int = option(8, "Number of texts decoded together.", _LOAD, min=1)
    max_waiting: int = option(64, "Number of texts that may wait; further ones get status 429.", _LOAD, min=1)
    prefix_cache: str | None = option(None, 'Memory for texts to go on from, as "2GB" (default: the last text).', _LOAD)
    share_prefixes: bool = option(
        False, "Let all prompts reuse each other's texts, not only those of one cache_salt.", _LOAD, "--share-prefixes"
    )
    max_tokens: int | None = option(None, "Maximum number of new tokens of a text.", _LOAD, min=1)
    max_context: int | None = option(
        None, "Maximum tokens of prompt and answer: memory is reserved (default: the model's context).", _LOAD, min=1
    )
    max_body_mb: float = option(4, "Largest request body, in MB.", _LOAD, min=0.001)
    default_chat_tokens: int = option(1024, "Maximum new tokens of an answer whose request sets none.", _LOAD, min=1)
    access_log: bool = option(True, "Write a line for each request.", _LOAD, "--access-log/--no-access-log")
    grace_seconds: int = option(30, "Seconds that running requests may continue after SIGTERM or Ctrl-C.", _LOAD, min=0)

    def check(self) -> None:
        """Raise ValueError for a value that cannot be served with, and the errors of the files that are named."""
        if not math.isfinite(self.max_body_mb):
            raise ValueError(f"--max-body-mb must be a number of megabytes, got {self.max_body_mb}")
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.api_key is not None and not self.api_key:
            raise ValueError("the API key is empty: give one, or none")
        _ = self.template, self.copied_texts

    @cached_property
    def name(self) -> str:
        """The model's name for clients: its folder's name, or its hub name without the owner, unless another is given."""
        folder = Path(re.sub(r"[/\\]+$", "", self.model)).resolve().name if Path(self.model).is_dir() else None
        return self.served_name or folder or self.model.rpartition("/")[2]

    @cached_property
    def template(self) -> ChatTemplate:
        return template_of(self.model, self.chat_template)

    @cached_property
    def copied_texts(self) -> list[str]:
        return read_copy_files(self.copy_from)

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * (1 << 20))

    @cached_property
    def hosts(self) -> frozenset[str] | None:
        """Host names, without ports, by which clients may call the server; None for any.

        Any web page can give its own host name this machine's address and then call the server (DNS rebinding). So a server
        without a key that listens only on this machine accepts only this machine's names, and those that the operator adds.
        """
        named = [name.lower() for name in self.allow_host or ()]
        is_local = self.host in _OWN_NAMES or self.host.startswith("127.")
        if "*" in named or (not named and (self.api_key is not None or not is_local)):
            return None
        return frozenset([*_OWN_NAMES, self.host.lower(), *named])
