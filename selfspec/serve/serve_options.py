"""The options of `selfspec serve`, which are also those of a replica under Ray. Needs none of the server's packages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from layerskip_models import DEMO_PATH
from selfspec.cli.copy_files import read_copy_files
from selfspec.cli.option_groups import ChatTemplateOption, CopyFromOption
from selfspec.messages import template_of
from selfspec.options import POLICY_HELP
from selfspec.serve.server_settings import SAFE_POLICIES, ServerSettings, allowed_hosts, default_name

_SPECULATION, _NETWORK, _LOAD = "Speculation", "Network", "Load"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What a server offers, to whom, and how much of it."""

    policy: Annotated[
        str | None, typer.Option(help=POLICY_HELP + " Requests may name another.", rich_help_panel=_SPECULATION)
    ] = None
    allow_policy: Annotated[
        list[str] | None,
        typer.Option(
            help="A policy that requests may name, 'any' for all; repeatable. Default: "
            "ar, auto, auto:cost=layers, copy, del, pacer and the server's own.",
            rich_help_panel=_SPECULATION,
        ),
    ] = None
    copy_from: CopyFromOption = None
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="SELFSPEC_API_KEY",
            help="Key that clients must send. The environment variable keeps it out of the process list.",
            rich_help_panel=_NETWORK,
        ),
    ] = None
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Host name under which clients may call the server, as a proxy sends it; '*' for any; repeatable. "
            "Default: only localhost for a server without a key on this machine's own address, else any.",
            rich_help_panel=_NETWORK,
        ),
    ] = None
    served_name: Annotated[
        str | None,
        typer.Option(
            help="Name of the model for clients (default: the last part of its name).", rich_help_panel=_NETWORK
        ),
    ] = None
    chat_template: ChatTemplateOption = None
    batch_size: Annotated[int, typer.Option(min=1, help="Number of texts decoded together.", rich_help_panel=_LOAD)] = 8
    max_waiting: Annotated[
        int,
        typer.Option(min=1, help="Number of texts that may wait; further ones get status 429.", rich_help_panel=_LOAD),
    ] = 64
    prefix_cache: Annotated[
        str | None,
        typer.Option(
            help='Memory for complete texts, such as "2GB". A prompt that begins like one of them '
            "is read only from where it differs. Default: the last text.",
            rich_help_panel=_LOAD,
        ),
    ] = None
    share_prefixes: Annotated[
        bool,
        typer.Option(
            "--share-prefixes",
            help="All requests come from one user, so their prompts may reuse each other's texts. Default: only requests "
            "with the same cache_salt may.",
            rich_help_panel=_LOAD,
        ),
    ] = False
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of new tokens of a text.", rich_help_panel=_LOAD)
    ] = None
    max_context: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of tokens of a prompt and its answer, for which memory is reserved (default: the model's "
            "context).",
            rich_help_panel=_LOAD,
        ),
    ] = None
    max_body_mb: Annotated[
        float, typer.Option(min=0.001, help="Largest request body, in MB.", rich_help_panel=_LOAD)
    ] = 4
    default_chat_tokens: Annotated[
        int,
        typer.Option(
            min=1, help="Maximum number of new tokens of a chat answer whose request sets none.", rich_help_panel=_LOAD
        ),
    ] = 1024

    def settings(self, model: str | None, host: str) -> ServerSettings:
        """The settings of a server that listens on `host`. Reads the files that are named; raises their errors."""
        template = template_of(model, self.chat_template)
        return ServerSettings(
            model_name=self.served_name or default_name(str(DEMO_PATH) if model is None else model),
            policy=self.policy,
            batch_size=self.batch_size,
            max_waiting=self.max_waiting,
            max_body_bytes=int(self.max_body_mb * (1 << 20)),
            default_chat_tokens=self.default_chat_tokens,
            api_key=self.api_key,
            copy_from=tuple(read_copy_files(self.copy_from)),
            chat_template=template.source,
            chat_stops=template.stops,
            allowed_policies=SAFE_POLICIES if self.allow_policy is None else tuple(self.allow_policy),
            allowed_hosts=allowed_hosts(host, self.api_key, self.allow_host or ()),
            share_prefixes=self.share_prefixes,
            most_new_tokens=self.max_tokens,
            most_context=self.max_context,
        )
