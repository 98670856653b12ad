"""`selfspec-bench batch`: throughput with many texts in one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Annotated

import typer
from torch import Tensor

from bench.commands import bench_options as options
from bench.commands.peer_makers import (
    IK_LLAMA_CPP,
    LLAMA_CPP,
    OPENVINO,
    gguf_kinds,
    installed,
    llama_peer,
    openvino_peer,
    transformers_peer,
)
from bench.commands.preparation import (
    configuration,
    encoded,
    load_network,
    open_tokenizer,
    progress,
    recording,
    run_line,
    show,
)
from bench.commands.started_peers import start_all, tell_lost, versions_of, without_lost
from bench.machine.throughput import BatchEngine, SelfSpecBatch, measure_batch
from bench.measure import in_turn, tried
from bench.provenance import provenance
from bench.record import Line, RecordWriter
from bench.sweep import parse_range
from layerskip_models import DEMO_PATH, from_transformers
from selfspec import SelfSpecGenerator
from selfspec.cli.console import one_line_errors


def batch(
    model: options.ModelOption = None,
    prompts: options.PromptsOption = None,
    prompt_tokens: options.PromptTokensOption = 64,
    max_new_tokens: options.NewTokensOption = 64,
    texts: Annotated[str, typer.Option(help="Texts decoded together, as in 1,2,4.")] = "1,2,4,8,16",
    policy: Annotated[list[str] | None, typer.Option(help="Policies, repeatable. Default: ar and auto.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each engine at each number of texts.")] = 3,
    peers: Annotated[
        bool, typer.Option("--peers/--no-peers", help="Measure transformers' batched generate in the same run.")
    ] = True,
    int8: Annotated[bool, typer.Option("--int8", help="Also run selfspec with weights in 8 bits.")] = False,
    llama_cpp: options.LlamaCppOption = None,
    ik_llama_cpp: options.IkLlamaCppOption = None,
    openvino: options.OpenVinoOption = None,
    peer_timeout: options.PeerTimeoutOption = 600,
    dtype: options.DtypeOption = "auto",
    device: options.DeviceOption = "auto",
    output: options.OutputOption = None,
) -> None:
    """Throughput over the number of texts that share the passes, greedy; engines in turn.

    Other engines run in processes of their own and hold the weights themselves. One that crashes or hangs is left out with a
    message, and the others go on. For OpenVINO GenAI all texts are cut to the length of the shortest.
    """
    with one_line_errors(), ExitStack() as running:
        checkpoint = str(model or DEMO_PATH)
        sizes = parse_range(texts, "--texts")
        samples = encoded(prompts, max(sizes), open_tokenizer(checkpoint), prompt_tokens)
        llamas = [(LLAMA_CPP, kind) for kind in gguf_kinds(LLAMA_CPP, llama_cpp or [], device)]
        llamas += [(IK_LLAMA_CPP, kind) for kind in gguf_kinds(IK_LLAMA_CPP, ik_llama_cpp or [], device)]
        exported = openvino if openvino and installed(OPENVINO) else []
        network = load_network(checkpoint, dtype, device)
        found = provenance(network.device, network.dtype)
        generator = SelfSpecGenerator(from_transformers(network), prefix_cache=0)
        policies = policy or ["ar", "auto"]
        engines: list[BatchEngine] = [SelfSpecBatch(generator, name, name) for name in policies]
        for engine in engines:
            generator.resolve_policy(engine.label)
        if int8:
            rounded = SelfSpecGenerator(from_transformers(network, layout="int8"), prefix_cache=0)
            engines += [SelfSpecBatch(rounded, name, f"int8, {name}", weights="int8") for name in policies]
        del network
        weights = (checkpoint, dtype, device)
        longest = max(len(sample.ids) for sample in samples) + max_new_tokens
        others = {
            f"{program} {kind}": partial(llama_peer, program, *weights, kind, longest) for program, kind in llamas
        }
        others |= {f"{OPENVINO} {folder.name}": partial(openvino_peer, folder, longest) for folder in exported}
        if peers:
            others["transformers"] = partial(transformers_peer, *weights)
        started, missing = start_all(others, peer_timeout, running)
        engines += [engine for peer in started for engine in peer.engines]
        shortest = min(len(sample.ids) for sample in samples)
        ids = [sample.ids[-shortest if exported else 0 :] for sample in samples]
        while len(ids) < max(sizes):  # the same prompts once more, each with its last token in front
            ids.append(ids[len(ids) - len(samples)].roll(1))
        about = {**configuration(checkpoint, samples, max_new_tokens, repeats, warmups=1), "texts": sizes}
        where = {**found, **versions_of(started)}
        with recording(RecordWriter(output)) as record:
            record.write(run_line("batch", about, engines, where))
            with progress(len(engines) * len(sizes) * repeats) as advance:
                lost = _measure(engines, ids, sizes, max_new_tokens, repeats, record.write, advance)
            if missing or lost:
                record.complete(without_lost(record.lines, missing, lost))
    show(record.lines)
    tell_lost(missing, lost)


def _measure(
    engines: Sequence[BatchEngine],
    ids: Sequence[Tensor],
    sizes: Sequence[int],
    max_new_tokens: int,
    repeats: int,
    write: Callable[[Line], object],
    advance: Callable[[str], object],
) -> dict[str, str]:
    """All engines in turn at each number of texts. Returns why some were lost on the way, by name."""
    lost: dict[str, str] = {}
    for engine in engines:  # calibrates and warms up
        tried(engine, engines, lost, partial(engine.run, ids[:2], min(max_new_tokens, 16)))
    expected: dict[tuple[str | None, int], list[list[int]]] = {}
    for repeat in range(repeats):
        for size in sizes:
            for engine in in_turn(engines, repeat):
                advance(f"{engine.label}, {size} texts")
                measured = tried(engine, engines, lost, partial(measure_batch, engine, ids[:size], max_new_tokens))
                if measured is not None:
                    line, run = measured
                    equal = run.tokens == expected.setdefault((engine.weights, size), run.tokens)
                    write({**line, "repeat": repeat, "outputs_equal": equal})
    return lost
