"""`selfspec-bench batch`: throughput with many texts in one pass."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer

from bench.commands.bench_options import (
    DeviceOption,
    DtypeOption,
    LlamaCppOption,
    ModelOption,
    NewTokensOption,
    OutputOption,
    PromptsOption,
    PromptTokensOption,
)
from bench.commands.preparation import (
    configuration,
    encoded,
    llama_cpp_batches,
    llama_cpp_kinds,
    load_network,
    open_tokenizer,
    progress,
    recording,
    show,
)
from bench.machine.throughput import BatchEngine, SelfSpecBatch, TransformersBatch, measure_batch, measure_joining
from bench.provenance import provenance
from bench.record import RecordWriter
from bench.sweep import parse_range
from layerskip_models import DEMO_PATH, from_transformers
from selfspec import SelfSpecGenerator
from selfspec.cli.arguments import one_line_errors


def batch(
    model: ModelOption = None,
    prompts: PromptsOption = None,
    prompt_tokens: PromptTokensOption = 64,
    max_new_tokens: NewTokensOption = 64,
    texts: Annotated[str, typer.Option(help="Texts decoded together, as in 1,2,4.")] = "1,2,4,8,16",
    policy: Annotated[list[str] | None, typer.Option(help="Policies, repeatable. Default: ar and auto.")] = None,
    joining_tokens: Annotated[
        int, typer.Option(min=0, help="Length of a prompt that joins four decoding texts; 0 for none.")
    ] = 4096,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each engine at each number of texts.")] = 3,
    peers: Annotated[
        bool, typer.Option("--peers/--no-peers", help="Measure transformers' batched generate in the same run.")
    ] = True,
    int8: Annotated[bool, typer.Option("--int8", help="Run selfspec with weights in 8 bits, too.")] = False,
    llama_cpp: LlamaCppOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    output: OutputOption = None,
) -> None:
    """Throughput over the number of texts that share the passes, greedy; engines in turn."""
    with one_line_errors():
        checkpoint = str(model or DEMO_PATH)
        sizes = parse_range(texts, "--texts")
        samples = encoded(prompts, max(*sizes, 4), open_tokenizer(checkpoint), prompt_tokens)
        network = load_network(checkpoint, dtype, device)
        generator = SelfSpecGenerator(from_transformers(network), prefix_cache=0)
        policies = policy or ["ar", "auto"]
        engines: list[BatchEngine] = [SelfSpecBatch(generator, name, name) for name in policies]
        for engine in engines:
            generator.resolve_policy(engine.label)
        if int8:
            rounded = SelfSpecGenerator(from_transformers(network, layout="int8"), prefix_cache=0)
            engines += [SelfSpecBatch(rounded, name, f"int8, {name}", weights="int8") for name in policies]
        kinds = llama_cpp_kinds(llama_cpp or [], device)
        engines += llama_cpp_batches(network, kinds, max(len(sample.ids) for sample in samples) + max_new_tokens)
    if peers:
        engines.append(TransformersBatch(network))
    ids = [sample.ids for sample in samples]
    while len(ids) < max(sizes):  # the same prompts once more, a little shorter
        ids.append(ids[len(ids) - len(samples)][1:])
    description: dict[str, Any] = {
        "kind": "run",
        "command": "batch",
        "configuration": {**configuration(checkpoint, samples, max_new_tokens, repeats, warmups=1), "texts": sizes},
        "engines": {engine.name: engine.label for engine in engines},
        "provenance": provenance(network.device, network.dtype),
    }
    joins = joining_tokens > 0
    with recording(RecordWriter(output)) as record:
        record.write(description)
        with progress(len(engines) * len(sizes) * repeats + joins) as advance:
            for engine in engines:  # calibrates and warms up
                engine.run(ids[:2], min(max_new_tokens, 16))
            expected: dict[tuple[str | None, int], list[list[int]]] = {}
            for repeat in range(repeats):
                for size in sizes:
                    for offset in range(len(engines)):
                        engine = engines[(repeat + offset) % len(engines)]
                        line, run = measure_batch(engine, ids[:size], max_new_tokens)
                        equal = run.tokens == expected.setdefault((engine.weights, size), run.tokens)
                        record.write({**line, "repeat": repeat, "outputs_equal": equal})
                        advance(f"{engine.label}, {size} texts")
            if joins:
                read = torch.cat(ids).repeat(-(-joining_tokens // int(torch.cat(ids).numel())))[:joining_tokens]
                record.write(measure_joining(generator, ids[:4], read, "ar", max_new_tokens=joining_tokens))
                advance("a prompt that joins")
    show(record.lines)
