"""`selfspec serve`: an OpenAI-compatible server."""

from __future__ import annotations

from typing import Annotated

import typer

from layerskip_models import DEMO_PATH
from layerskip_models.parallel.ranks import RankError
from selfspec.cache.copy_sources import copies_drafts
from selfspec.cli.arguments import (
    POLICY_HELP,
    DeviceOption,
    DtypeOption,
    ExitsOption,
    KvDtypeOption,
    load_generator,
    notes_console,
    one_line_errors,
)
from selfspec.cli.copy_files import CopyFromOption, read_copy_files
from selfspec.distributed.launch import end_at_once, speaks
from selfspec.distributed.rank0_engine import watch_followers
from selfspec.messages import template_of

_SPECULATION, _NETWORK, _LOAD = "Speculation", "Network", "Load"


def serve_command(
    model: Annotated[str | None, typer.Argument(help="Hub name or folder (default: the demo model).")] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    exits: ExitsOption = "auto",
    kv_dtype: KvDtypeOption = "auto",
    policy: Annotated[
        str | None, typer.Option(help=POLICY_HELP + " Requests may name another.", rich_help_panel=_SPECULATION)
    ] = None,
    allow_policy: Annotated[
        list[str] | None,
        typer.Option(
            help="A policy that requests may name, 'any' for all. May be repeated. Default: "
            "ar, auto, auto:cost=layers, copy, del, pacer and the server's own.",
            rich_help_panel=_SPECULATION,
        ),
    ] = None,
    copy_from: CopyFromOption = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all.", rich_help_panel=_NETWORK)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.", rich_help_panel=_NETWORK)
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="SELFSPEC_API_KEY",
            help="Clients must send this key. The environment variable keeps it out of the process list.",
            rich_help_panel=_NETWORK,
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name by which clients may call the server, as a proxy sends it; '*' for any. May be repeated. "
            "Default: without a key and on this machine's own address only localhost, else any.",
            rich_help_panel=_NETWORK,
        ),
    ] = None,
    served_name: Annotated[
        str | None,
        typer.Option(
            help="What clients call the model (default: the last part of its name).", rich_help_panel=_NETWORK
        ),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(
            help='Jinja file, or "plain" (questions and answers, for base models). '
            "Default: the tokenizer's; plain for the demo model.",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts that are decoded together.", rich_help_panel=_LOAD)] = 8,
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Texts that may wait for a place; more get status 429.", rich_help_panel=_LOAD)
    ] = 64,
    prefix_cache: Annotated[
        str | None,
        typer.Option(
            help='Memory for complete texts, such as "2GB": a prompt that begins like one '
            "is read only from where it differs. Default: the last text.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    share_prefixes: Annotated[
        bool,
        typer.Option(
            "--share-prefixes",
            help="All requests are one user's: their prompts go on from each other's texts. Default: only requests with "
            "the same cache_salt.",
            rich_help_panel=_LOAD,
        ),
    ] = False,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Largest number of new tokens of a text.", rich_help_panel=_LOAD)
    ] = None,
    max_context: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most tokens of a prompt and its answer, for which memory is reserved (default: what the model can).",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    max_body_mb: Annotated[
        float, typer.Option(min=0.001, help="Largest request body, in MB.", rich_help_panel=_LOAD)
    ] = 4,
    default_chat_tokens: Annotated[
        int,
        typer.Option(min=1, help="New tokens of a chat answer whose request gives no limit.", rich_help_panel=_LOAD),
    ] = 1024,
    grace_seconds: Annotated[
        int,
        typer.Option(
            min=0, help="After SIGTERM or Ctrl-C, how long running requests may go on.", rich_help_panel=_LOAD
        ),
    ] = 30,
) -> None:
    """Serve a model to OpenAI clients: chat, completions, streams, metrics."""
    notes = notes_console(False)
    with one_line_errors():
        try:
            from selfspec.serve.app import follow_server, make_app
            from selfspec.serve.running import open_socket, run
            from selfspec.serve.server_settings import SAFE_POLICIES, ServerSettings, allowed_hosts, default_name
        except ModuleNotFoundError as error:
            raise ValueError(f"the server needs {error.name}: pip install 'selfspec[serve]'") from None
        template, copy_texts = template_of(model, chat_template), tuple(read_copy_files(copy_from))
        listening = open_socket(host, port) if speaks() else None
        settings = ServerSettings(
            model_name=served_name or default_name(str(DEMO_PATH) if model is None else model),
            policy=policy,
            batch_size=batch_size,
            max_waiting=max_waiting,
            max_body_bytes=int(max_body_mb * (1 << 20)),
            default_chat_tokens=default_chat_tokens,
            api_key=api_key,
            copy_from=copy_texts,
            chat_template=template.source,
            chat_stops=template.stops,
            allowed_policies=SAFE_POLICIES if allow_policy is None else tuple(allow_policy),
            allowed_hosts=allowed_hosts(host, api_key, allow_host or ()),
            share_prefixes=share_prefixes,
            most_new_tokens=max_tokens,
            most_context=max_context,
        )
        generator = load_generator(
            model,
            dtype,
            device,
            notes,
            prefix_cache=prefix_cache,
            exits=exits,
            kv_dtype=kv_dtype,
            tensor_parallel="auto",
        )
        if listening is None:
            follow_server(generator, settings)
            return
        with notes.status("Calibrating ..."):
            app = make_app(generator, settings, watch_followers(generator))
        own = generator.resolve_policy(policy)
        if settings.copy_from and not copies_drafts(own.observes, generator.runner):
            notes.print(f"policy {own.name!r} copies nothing: only requests that name one that does use --copy-from")
        address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
        started = f"serving {settings.model_name} at {address}/v1 (Ctrl-C ends it)"
        try:
            run(app, listening, grace_seconds=grace_seconds, on_start=lambda: notes.print(started))
        except RankError as error:
            end_at_once(error)
