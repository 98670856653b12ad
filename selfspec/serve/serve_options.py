"""The options of `selfspec serve`, which are also those of a replica under Ray. Needs none of the server's packages."""

from __future__ import annotations

import math
from dataclasses import dataclass

from layerskip_models import DEMO_PATH
from selfspec.cli.option_groups import ChatTemplateOption, CopyFromOption, option
from selfspec.cli.text_input import read_copy_files
from selfspec.messages import template_of
from selfspec.options import POLICY_HELP
from selfspec.serve.server_settings import SAFE_POLICIES, ServerSettings, allowed_hosts, default_name

_SPECULATION, _NETWORK, _LOAD = "Speculation", "Network", "Load"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    policy: str | None = option(None, f"{POLICY_HELP} Requests may name another.", _SPECULATION)
    allow_policy: list[str] | None = option(
        None,
        "A policy that requests may name, 'any' for all; repeatable. Default: "
        "ar, auto, auto:cost=layers, copy, del, pacer and the server's own.",
        _SPECULATION,
    )
    copy_from: CopyFromOption = None
    api_key: str | None = option(
        None,
        "Key that clients must send. The environment variable keeps it out of the process list.",
        _NETWORK,
        envvar="SELFSPEC_API_KEY",
    )
    allow_host: list[str] | None = option(
        None,
        "Host name under which clients may call the server, as a proxy sends it; '*' for any; repeatable. "
        "Default: only localhost for a server without a key on this machine's own address, else any.",
        _NETWORK,
    )
    served_name: str | None = option(
        None, "Name of the model for clients (default: the last part of its name).", _NETWORK
    )
    chat_template: ChatTemplateOption = None
    batch_size: int = option(8, "Number of texts decoded together.", _LOAD, min=1)
    max_waiting: int = option(64, "Number of texts that may wait; further ones get status 429.", _LOAD, min=1)
    prefix_cache: str | None = option(
        None,
        'Memory for complete texts, such as "2GB". A prompt that begins like one of them is read only from where it differs. '
        "Default: the last text.",
        _LOAD,
    )
    share_prefixes: bool = option(
        False,
        "All requests come from one user, so their prompts may reuse each other's texts. Default: only requests with the "
        "same cache_salt may.",
        _LOAD,
        "--share-prefixes",
    )
    max_tokens: int | None = option(None, "Maximum number of new tokens of a text.", _LOAD, min=1)
    max_context: int | None = option(
        None,
        "Maximum number of tokens of a prompt and its answer, for which memory is reserved (default: the model's context).",
        _LOAD,
        min=1,
    )
    max_body_mb: float = option(4, "Largest request body, in MB.", _LOAD, min=0.001)
    default_chat_tokens: int = option(
        1024, "Maximum number of new tokens of a chat answer whose request sets none.", _LOAD, min=1
    )

    def settings(self, model: str | None, host: str) -> ServerSettings:
        """Make the settings of a server that listens on `host`. Reads the files that are named; raises their errors."""
        if not math.isfinite(self.max_body_mb):
            raise ValueError(f"--max-body-mb must be a number of megabytes, got {self.max_body_mb}")
        return ServerSettings(
            model_name=self.served_name or default_name(str(DEMO_PATH) if model is None else model),
            policy=self.policy,
            batch_size=self.batch_size,
            max_waiting=self.max_waiting,
            max_body_bytes=int(self.max_body_mb * (1 << 20)),
            default_chat_tokens=self.default_chat_tokens,
            api_key=self.api_key,
            copy_from=tuple(read_copy_files(self.copy_from)),
            chat_template=template_of(model, self.chat_template),
            allowed_policies=SAFE_POLICIES if self.allow_policy is None else tuple(self.allow_policy),
            allowed_hosts=allowed_hosts(host, self.api_key, self.allow_host or ()),
            share_prefixes=self.share_prefixes,
            max_new_tokens=self.max_tokens,
            max_context=self.max_context,
        )
