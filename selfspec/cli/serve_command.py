"""`selfspec serve`: an OpenAI-compatible server."""

from __future__ import annotations

import logging
from dataclasses import replace

from selfspec.analysis.inspection import arithmetic_in_words
from selfspec.cache.copy_index import copies_drafts
from selfspec.cli.arguments import load_generator
from selfspec.cli.console import LogConsole
from selfspec.cli.option_groups import LoadOptions
from selfspec.serve.serve_options import ServeOptions


def run_server(load: LoadOptions, serve: ServeOptions, log: LogConsole) -> None:
    """Load the model and serve it until SIGTERM or Ctrl-C."""
    try:
        from selfspec.serve.app import make_app
        from selfspec.serve.running import make_server, open_socket
    except ModuleNotFoundError as error:
        raise ValueError(f"the server needs {error.name}: pip install -e '.[serve]' in selfspec's folder") from None
    if load.draft_weights == "auto":  # nobody must wait while they are made
        load = replace(load, draft_weights="none")
    listening = open_socket(serve.host, serve.port)
    try:
        generator = load_generator(serve.model, load, log, prefix_cache=serve.prefix_cache)
    except BaseException:
        listening.close()
        raise
    with log.status("Preparing to draft ..."):
        app = make_app(generator, serve)
    own = generator.resolve_policy(serve.policy)
    if serve.copied_texts and not copies_drafts(own.observes):
        log.print(f"policy {own.name!r} copies nothing: only requests that name one that does use --copy-from")
    host = f"[{serve.host}]" if ":" in serve.host else serve.host
    address = f"http://{host}:{listening.getsockname()[1]}"
    offers, context = app.state.translator.offers, app.state.translator.prompts.max_context
    sampling = ", ".join(f"{name} {value:g}" for name, value in offers["sampling"].items())
    memory = serve.batch_size * context * generator.bound.pool.row_bytes
    started = (
        f"ready: serving {serve.name} at {address}/v1, with a page at {address}/ (Ctrl-C ends it)\n"
        f"  on {arithmetic_in_words(generator.model)}\n"
        f"  where a request says nothing: policy {offers['policy']}, {sampling}\n"
        f"  beside the model, at most {memory / 1e6:,.0f} MB for {serve.batch_size} texts of {context:,} tokens "
        "(--batch-size, --max-context)"
    )
    if serve.access_log:
        access = logging.getLogger("selfspec.access")
        access.addHandler(logging.StreamHandler())
        access.setLevel(logging.INFO)
    server = make_server(app, grace_seconds=serve.grace_seconds, on_start=lambda: log.print(started))
    server.run(sockets=[listening])
