"""`selfspec serve`: an OpenAI-compatible server."""

from __future__ import annotations

from typing import Annotated

import typer

from layerskip_models.parallel.ranks import RankError
from selfspec.cache.copy_sources import copies_drafts
from selfspec.cli.arguments import load_generator, notes_console, one_line_errors
from selfspec.cli.option_groups import LoadOptions, ModelArgument, with_groups
from selfspec.distributed.launch import end_at_once, speaks
from selfspec.distributed.rank0_engine import watch_workers
from selfspec.serve.serve_options import ServeOptions

_NETWORK, _LOAD = "Network", "Load"


@with_groups
def serve_command(
    load: LoadOptions,
    serve: ServeOptions,
    model: ModelArgument = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all.", rich_help_panel=_NETWORK)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.", rich_help_panel=_NETWORK)
    ] = 8000,
    grace_seconds: Annotated[
        int,
        typer.Option(
            min=0, help="Seconds that running requests may continue after SIGTERM or Ctrl-C.", rich_help_panel=_LOAD
        ),
    ] = 30,
) -> None:
    """Serve a model to OpenAI clients: chat, completions, streams, metrics."""
    notes = notes_console(False)
    with one_line_errors():
        try:
            from selfspec.serve.app import make_app, run_server_worker
            from selfspec.serve.running import open_socket, run
        except ModuleNotFoundError as error:
            raise ValueError(f"the server needs {error.name}: pip install 'selfspec[serve]'") from None
        settings = serve.settings(model, host)
        listening = open_socket(host, port) if speaks() else None
        generator = load_generator(model, load, notes, prefix_cache=serve.prefix_cache, tensor_parallel="auto")
        if listening is None:
            run_server_worker(generator, settings)
            return
        with notes.status("Calibrating ..."):
            app = make_app(generator, settings, watch_workers(generator))
        own = generator.resolve_policy(serve.policy)
        if settings.copy_from and not copies_drafts(own.observes, generator.runner):
            notes.print(f"policy {own.name!r} copies nothing: only requests that name one that does use --copy-from")
        address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
        started = f"serving {settings.model_name} at {address}/v1 (Ctrl-C ends it)"
        try:
            run(app, listening, grace_seconds=grace_seconds, on_start=lambda: notes.print(started))
        except RankError as error:
            end_at_once(error)
