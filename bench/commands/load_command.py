"""`selfspec-bench load`: a server under load, ours and transformers', on one folder."""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import typer
from transformers import PreTrainedTokenizerBase

from bench.commands.bench_options import LoadCommand
from bench.commands.session import encoded, header, progress, recording, show
from bench.commands.sweep_command import parse_range
from bench.datasets import EncodedPrompt
from bench.engines.servers import Server, network_folder, selfspec_server, transformers_server
from bench.measure import output_digest
from bench.models import is_synthetic, load_network
from bench.provenance import provenance
from bench.record import Line, by_value, matching
from layerskip_models import load_tokenizer
from selfspec import SelfSpecGenerator
from selfspec.cli.console import one_line_errors

_BATCH = "selfspec:generate_batch"


def load(options: LoadCommand) -> None:
    with ExitStack() as held:
        held.enter_context(one_line_errors())
        sizes = parse_range(options.clients, "--clients")
        folder = Path(options.model)
        if is_synthetic(options.model):
            folder = held.enter_context(network_folder(load_network(options.model, "bfloat16", "cpu")))
        elif not folder.is_dir():
            raise ValueError("--model must be a folder or synthetic:SHAPE: all servers load the same files")
        tokenizer = load_tokenizer(folder, local_files_only=True)
        samples, prompts = _prompts(tokenizer, max(sizes) * options.requests, options.prompt_tokens)
        generator = SelfSpecGenerator.from_pretrained(folder, dtype="float32", local_files_only=True, prefix_cache=0)
        generator.resolve_policy()
        where = provenance(generator.model.device, generator.model.dtype)
        asked = {"requests": options.requests, "clients": sizes, "peers": options.peers}
        first = header("load", where, options.model, samples, options.max_new_tokens, options.repeats, **asked)
        record = held.enter_context(recording(options.output, first))
        record.once("engine", lambda: {"label": "selfspec generate_batch"}, engine=_BATCH)
        # Every repeat reads its prompts again, as the peers do.
        arguments = f"--dtype float32 --batch-size {max([8, *sizes])} --max-waiting 256 --prefix-cache 0".split()
        servers = [] if record.is_complete else [held.enter_context(selfspec_server(folder, arguments))]
        for continuous in (False, True) if options.peers and servers else ():
            try:
                started = transformers_server(folder, "float32", continuous_batching=continuous)
                servers.append(held.enter_context(started))
            except RuntimeError as error:
                record.write("lost", engine="transformers:serve", label="transformers serve", reason=str(error))
        for server in servers:
            record.once("engine", partial(dict, label=server.label), engine=server.name)
            measure_clients(server, prompts[:2], 2, 8)  # warms up
        with progress((len(servers) + 1) * len(sizes) * options.repeats) as advance:
            for repeat in range(options.repeats):
                for size in sizes:
                    sent = prompts[: size * options.requests]
                    batch = partial(measure_batch_call, generator, sent, size, options.max_new_tokens)
                    record.once("load", batch, engine=_BATCH, clients=size, repeat=repeat)
                    advance(f"generate_batch, {size} clients")
                    for server in servers:
                        measure = partial(measure_clients, server, sent, size, options.max_new_tokens)
                        record.once("load", measure, engine=server.name, clients=size, repeat=repeat)
                        advance(f"{server.label}, {size} clients")
    show(record.lines)
    ours = [line for line in matching(record.lines, "load") if line["engine"].startswith("selfspec:")]
    different = sum(len({line["output"] for line in own}) > 1 for own in by_value(ours, "clients").values())
    if different:
        typer.echo("texts of selfspec serve differ from those of the engine itself", err=True)
        raise typer.Exit(1)


def _prompts(
    tokenizer: PreTrainedTokenizerBase, count: int, prompt_tokens: int
) -> tuple[list[EncodedPrompt], list[str]]:
    """Return prompts as records name them, and as texts; of random words for a tokenizer that has no others."""
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


def _stream(
    connection: http.client.HTTPConnection, server: Server, prompt: str, max_tokens: int, **fields: Any
) -> Line:
    """Stream a greedy completion: its text, and the seconds until it began. Raises RuntimeError if it is not complete."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    start = perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body | fields), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"{server.label}: status {response.status}: {response.read(500).decode(errors='replace')}")
    first, pieces = None, []
    while line := response.readline():
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"{server.label}: {event['error']}")
            text = event["choices"][0]["text"] if event["choices"] else ""
            if text:
                first = perf_counter() - start if first is None else first
                pieces.append(text)
    if first is None:
        raise RuntimeError(f"{server.label}: a stream without text")
    # A continuation may begin with the blank that parts it from its prompt.
    return {"text": "".join(pieces).strip(), "first_seconds": first}


def measure_clients(server: Server, prompts: Sequence[str], clients: int, max_tokens: int, **fields: Any) -> Line:
    """Let `clients` clients send the prompts at once, each on one connection."""
    replies: dict[int, Line] = {}
    with ExitStack() as held:
        connections = [held.enter_context(closing(server.connect())) for _ in range(clients)]

        def work(client: int) -> None:
            for index in range(client, len(prompts), clients):
                replies[index] = _stream(connections[client], server, prompts[index], max_tokens, **fields)

        start = perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            working = [pool.submit(work, client) for client in range(clients)]
        seconds = perf_counter() - start
    try:
        for client in working:
            client.result()
    except Exception as error:
        raise RuntimeError(f"a client of {server.label} failed") from error
    found = [replies[index] for index in range(len(prompts))]
    output, first = output_digest([reply["text"] for reply in found]), [reply["first_seconds"] for reply in found]
    return {"tokens": max_tokens * len(prompts), "seconds": seconds, "first_seconds": first, "output": output}


def measure_batch_call(generator: SelfSpecGenerator, prompts: Sequence[str], clients: int, max_tokens: int) -> Line:
    """Generate the same texts by `generate_batch`, `clients` at a time: what a server could give at best."""
    start = perf_counter()
    results = generator.generate_batch(list(prompts), batch_size=clients, max_new_tokens=max_tokens, do_sample=False)
    seconds, output = perf_counter() - start, output_digest([(result.text or "").strip() for result in results])
    tokens = sum(result.stats.num_new_tokens for result in results)
    return {"tokens": tokens, "seconds": seconds, "first_seconds": None, "output": output}
