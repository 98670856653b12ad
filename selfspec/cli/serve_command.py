"""`selfspec serve`: an OpenAI-compatible server."""

from __future__ import annotations

from dataclasses import replace

from selfspec.cache.copy_index import copies_drafts
from selfspec.cli.arguments import load_generator
from selfspec.cli.console import LogConsole, one_line_errors
from selfspec.cli.option_groups import LoadOptions, with_groups
from selfspec.serve.serve_options import ServeOptions


@with_groups
def serve_command(load: LoadOptions, serve: ServeOptions) -> None:
    """Serve a model to OpenAI clients: chat, completions, streams, metrics."""
    log = LogConsole()
    with one_line_errors():
        try:
            from selfspec.serve.app import make_app
            from selfspec.serve.running import make_server, open_socket
        except ModuleNotFoundError as error:
            raise ValueError(f"the server needs {error.name}: pip install 'selfspec[serve]'") from None
        serve.check()
        if load.draft_weights == "auto":  # nobody must wait while they are made
            load = replace(load, draft_weights="none")
        listening = open_socket(serve.host, serve.port)
        try:
            generator = load_generator(serve.model, load, log, prefix_cache=serve.prefix_cache)
        except BaseException:
            listening.close()
            raise
        with log.status("Calibrating ..."):
            app = make_app(generator, serve)
        own = generator.resolve_policy(serve.policy)
        if serve.copied_texts and not copies_drafts(own.observes):
            log.print(f"policy {own.name!r} copies nothing: only requests that name one that does use --copy-from")
        host = f"[{serve.host}]" if ":" in serve.host else serve.host
        address = f"http://{host}:{listening.getsockname()[1]}"
        started = f"ready: serving {serve.name} at {address}/v1 (Ctrl-C ends it)"
        server = make_server(app, grace_seconds=serve.grace_seconds, on_start=lambda: log.print(started))
        server.run(sockets=[listening])
