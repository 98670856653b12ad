"""`selfspec-bench serving`: our server and its peers."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from transformers import PreTrainedTokenizerBase

from bench.commands import bench_options as options
from bench.commands.preparation import (
    configuration,
    encoded,
    is_synthetic,
    load_network,
    progress,
    recording,
    run_line,
    show,
)
from bench.datasets import EncodedPrompt
from bench.engines.servers import selfspec_server, served_folder, transformers_server
from bench.machine.serving_load import measure_batch_call, measure_clients
from bench.provenance import provenance
from bench.record import RecordWriter
from bench.sweep import parse_range
from layerskip_models import DEMO_PATH, load_tokenizer
from selfspec import SelfSpecGenerator
from selfspec.cli.console import one_line_errors

_BATCH = "selfspec:generate_batch"


def serving(
    model: options.ModelOption = None,
    clients: Annotated[str, typer.Option(help="Numbers of clients, as in 1,4,8.")] = "1,4,8",
    requests: Annotated[int, typer.Option(min=1, help="Requests of each client in a measurement.")] = 2,
    prompt_tokens: options.PromptTokensOption = 64,
    max_new_tokens: options.NewTokensOption = 64,
    repeats: options.RepeatsOption = 3,
    peers: Annotated[
        bool, typer.Option("--peers/--no-peers", help="Also measure `transformers serve`, plain and continuous.")
    ] = True,
    output: options.OutputOption = None,
) -> None:
    """Measure serving: throughput and time to first token over the number of clients; CPU, float32, greedy.

    EOS is ignored where the checkpoint has none. All servers run on one folder, and are measured in turn, as is
    generate_batch in this process. Ends with status 1 if our server's texts differ from generate_batch's.
    """
    with one_line_errors():
        checkpoint = str(model or DEMO_PATH)
        sizes = parse_range(clients, "--clients")
        synthetic = is_synthetic(checkpoint)
        if not synthetic and not Path(checkpoint).is_dir():
            raise ValueError("--model must be a folder or synthetic:SHAPE: all servers load the same files")
        network = load_network(checkpoint, "bfloat16", "cpu") if synthetic else None
    with ExitStack() as held, recording(RecordWriter(output)) as record:
        folder = held.enter_context(served_folder(None if synthetic else Path(checkpoint), network))
        del network
        tokenizer = load_tokenizer(folder, local_files_only=True)
        count = max(sizes) * requests
        samples, prompts = _prompts(tokenizer, count, prompt_tokens)
        generator = SelfSpecGenerator.from_pretrained(folder, dtype="float32", local_files_only=True, prefix_cache=0)
        generator.resolve_policy()
        arguments = ["--dtype", "float32", "--batch-size", str(max([8, *sizes])), "--max-waiting", "256"]
        arguments += ["--prefix-cache", "0"]  # every repeat reads its prompts again, as the peers do
        servers = [held.enter_context(selfspec_server(folder, arguments))]
        if peers:
            for continuous in (False, True):
                try:
                    servers.append(
                        held.enter_context(transformers_server(folder, "float32", continuous_batching=continuous))
                    )
                except RuntimeError as error:
                    typer.echo(f"left out: {error}", err=True)
        about = {**configuration(checkpoint, samples, max_new_tokens, repeats, warmups=1), "requests": requests}
        first = run_line("serving", about, servers, provenance(generator.model.device, generator.model.dtype))
        first["engines"] = {_BATCH: "selfspec generate_batch", **first["engines"]}
        record.write(first)
        different = 0
        with progress((len(servers) + 1) * len(sizes) * repeats) as advance:
            for server in servers:
                measure_clients(server, prompts[:2], 2, 8)
            for repeat in range(repeats):
                for size in sizes:
                    asked = prompts[: size * requests]
                    line, expected = measure_batch_call(generator, asked, size, max_new_tokens, None)
                    record.write({**line, "repeat": repeat})
                    advance(f"generate_batch, {size} clients")
                    for server in servers:
                        line, texts = measure_clients(server, asked, size, max_new_tokens)
                        record.write({**line, "repeat": repeat, "outputs_equal": texts == expected})
                        different += server is servers[0] and texts != expected
                        advance(f"{server.label}, {size} clients")
    show(record.lines)
    if different:
        typer.echo(f"{different} measurements of selfspec serve gave other texts than the engine itself", err=True)
        raise typer.Exit(1)


def _prompts(
    tokenizer: PreTrainedTokenizerBase, count: int, prompt_tokens: int
) -> tuple[list[EncodedPrompt], list[str]]:
    """Prompts as records name them, and as texts; of random words for a tokenizer that has no others."""
    if tokenizer.convert_ids_to_tokens(1) == "w1":
        random, words = Random(0), len(tokenizer)
        texts = [" ".join(f"w{random.randrange(words)}" for _ in range(prompt_tokens)) for _ in range(count)]
        return [], texts
    samples = encoded(None, min(count, 8), tokenizer, prompt_tokens)
    texts = []
    for index in range(count):
        ids: Any = samples[index % len(samples)].ids[index // len(samples) :]  # later ones a little shorter
        texts.append(str(tokenizer.decode(ids)))
    return samples, texts
