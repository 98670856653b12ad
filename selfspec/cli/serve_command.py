"""`selfspec serve`: an OpenAI-compatible server."""

from __future__ import annotations

from dataclasses import dataclass, replace

from selfspec.cache.copy_index import copies_drafts
from selfspec.cli.arguments import load_generator
from selfspec.cli.console import LogConsole, one_line_errors
from selfspec.cli.option_groups import LoadOptions, ModelArgument, option, with_groups
from selfspec.engine.request import host_class
from selfspec.serve.serve_options import ServeOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenOptions:
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for all.", "Network")
    port: int = option(8000, "Port; 0 takes a free one.", "Network", min=0, max=65535)
    grace_seconds: int = option(
        30, "Seconds that running requests may continue after SIGTERM or Ctrl-C.", "Load", min=0
    )


@with_groups
def serve_command(load: LoadOptions, serve: ServeOptions, listen: ListenOptions, model: ModelArgument = None) -> None:
    """Serve a model to OpenAI clients: chat, completions, streams, metrics."""
    log = LogConsole()
    with one_line_errors():
        try:
            from selfspec.serve.app import make_app
            from selfspec.serve.running import open_socket, run
        except ModuleNotFoundError as error:
            raise ValueError(f"the server needs {error.name}: pip install 'selfspec[serve]'") from None
        settings = serve.settings(model, listen.host)
        if load.draft_weights == "auto":  # nobody must wait while they are made
            load = replace(load, draft_weights="none")
        listening = open_socket(listen.host, listen.port)
        try:
            generator = load_generator(model, load, log, prefix_cache=serve.prefix_cache)
        except BaseException:
            listening.close()
            raise
        with log.status("Calibrating ..."):
            host_class()  # else the first request waits for what it imports
            app = make_app(generator, settings)
        own = generator.resolve_policy(serve.policy)
        if settings.copy_from and not copies_drafts(own.observes):
            log.print(f"policy {own.name!r} copies nothing: only requests that name one that does use --copy-from")
        host = f"[{listen.host}]" if ":" in listen.host else listen.host
        address = f"http://{host}:{listening.getsockname()[1]}"
        started = f"ready: serving {settings.model_name} at {address}/v1 (Ctrl-C ends it)"
        run(app, listening, grace_seconds=listen.grace_seconds, on_start=lambda: log.print(started))
