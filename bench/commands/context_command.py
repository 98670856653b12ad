"""`selfspec-bench context`: speed, time to the first token and memory over the length of the context."""

from __future__ import annotations

from typing import Annotated

import typer

from bench.commands import bench_options as options
from bench.commands.preparation import (
    configuration,
    load_network,
    open_model,
    open_tokenizer,
    progress,
    recording,
    run_line,
    show,
)
from bench.engines.own import GREEDY
from bench.machine.bandwidth import WeightBytes, bandwidth_fields, measure_bandwidth
from bench.machine.context import CONTEXTS, Context, long_prompt, measure_transformers, usable_contexts
from bench.provenance import provenance
from bench.record import RecordWriter
from bench.sweep import parse_range
from layerskip_models import DEMO_PATH, from_transformers
from selfspec import SelfSpecGenerator
from selfspec.cli.console import one_line_errors
from selfspec.engine.calibrate import measured_cost


def context(
    model: options.ModelOption = None,
    contexts: Annotated[str, typer.Option(help="Prompt lengths in tokens, for example 128,1024.")] = ",".join(
        map(str, CONTEXTS)
    ),
    max_new_tokens: options.NewTokensOption = 64,
    repeats: options.RepeatsOption = 3,
    peers: options.PeersOption = True,
    dtype: options.DtypeOption = "auto",
    kv_dtype: options.KvDtypeOption = "auto",
    device: options.DeviceOption = "auto",
    output: options.OutputOption = None,
) -> None:
    """tokens/s and time to the first token, of the next turn as well, at several lengths of the prompt; greedy.

    Contexts beyond the model's positions are left out.
    """
    with one_line_errors():
        checkpoint = str(model or DEMO_PATH)
        wanted = parse_range(contexts, "--contexts")
        tokenizer = open_tokenizer(checkpoint)
        network = load_network(checkpoint, dtype, device) if peers else None
        skip = open_model(checkpoint, dtype, device) if network is None else from_transformers(network)
        skip = skip.with_kv_dtype(kv_dtype)
        lengths = usable_contexts(wanted, max_new_tokens, skip.max_positions)
    for left_out in sorted(set(wanted) - set(lengths)):
        typer.echo(f"{left_out} tokens of context: beyond the model's {skip.max_positions} positions", err=True)
    generator = SelfSpecGenerator(skip, prefix_cache=0)
    prompts = [long_prompt(tokenizer, length) for length in lengths]
    weights = WeightBytes.of(skip)
    about = {
        **configuration(checkpoint, prompts, max_new_tokens, repeats, warmups=1),
        "num_layers": skip.num_layers,
        "kv_dtype": str(skip.kv_dtype).removeprefix("torch."),
    }
    steps = len(lengths) * (peers + 1 + 3 * repeats)
    with recording(RecordWriter(output)) as record:
        record.write(run_line("context", about, [], provenance(skip.device, skip.dtype)))
        bandwidths = []
        cost = measured_cost(skip)
        if network is not None:
            measure_transformers(network, prompts[0], max_new_tokens)
        generator.generate(prompts[0].ids, max_new_tokens=max_new_tokens, policy="ar", **GREEDY)
        with progress(steps) as advance:
            measured = []
            for prompt in prompts:
                measured.append(Context(skip, prompt, max_new_tokens=max_new_tokens, cost=cost))
                record.write(measured[-1].prefill)
                advance("prefill")
                if network is not None:
                    record.write(measure_transformers(network, prompt, max_new_tokens))
                    advance("transformers")
            for repeat in range(repeats):
                bandwidths.append(measure_bandwidth(skip.device))
                for place in measured:
                    place.decode(repeat, record.write, advance)
                    turn = place.turn(repeat)
                    if turn is not None:
                        record.write(turn)
        record.write({"kind": "limits", **bandwidth_fields(bandwidths), "kv_bytes": weights.kv})
    show(record.lines)
