"""`copying-gain`: what copied drafts gain on prompts that copy, measured, and estimated at a shape's costs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bench.commands.bench_options import (
    DtypeOption,
    ModelOption,
    NewTokensOption,
    OutputOption,
    PromptsArgument,
    PromptTokensOption,
    RepeatsOption,
    TaskSamplesOption,
)
from bench.commands.preparation import (
    configuration,
    load_network,
    open_model,
    open_tokenizer,
    progress,
    recording,
    show,
)
from bench.commands.run_command import choose_prompts
from bench.datasets import encode_prompts
from bench.engines.peers import transformers_generate, transformers_prompt_lookup
from bench.experiments.copying.gain import Gain, PeerTimes, borrowed_cost, own_gain, peer_gain, steady_cost
from bench.provenance import provenance
from bench.record import RecordWriter
from layerskip_models import DEMO_PATH, from_transformers
from policies import LayerCost, parse_policy
from selfspec import SelfSpecGenerator
from selfspec.cli.notes import one_line_errors
from selfspec.engine.calibrate import use_cost

POLICIES = ("auto:copy=off", "auto", "copy:10")


def copying_gain(
    prompts: PromptsArgument,
    model: ModelOption = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help=f"Policy to run beside plain decoding; repeatable. Default: {', '.join(POLICIES)}."),
    ] = None,
    costs_of: Annotated[str, typer.Option(help="Shape at whose costs rounds are estimated.")] = "synthetic:medium",
    num_samples: TaskSamplesOption = 100,
    prompt_tokens: PromptTokensOption = 800,
    max_new_tokens: NewTokensOption = 128,
    repeats: RepeatsOption = 1,
    peers: Annotated[
        bool, typer.Option("--peers/--no-peers", help="Measure transformers with and without prompt lookup.")
    ] = True,
    dtype: DtypeOption = "auto",
    output: OutputOption = None,
) -> None:
    """What copied drafts gain over plain decoding, beside transformers' prompt lookup over its own, on a CPU.

    Policies decide by the costs of --costs-of, which are timed first, and their rounds are charged these costs. The engines
    take turns prompt by prompt, and their own seconds on this model are measured as well. Every prompt is new to a policy.
    """
    with one_line_errors():
        checkpoint = str(model or DEMO_PATH)
        names = list(dict.fromkeys(["ar", *(policy or POLICIES)]))
        samples = encode_prompts(choose_prompts(prompts, [], num_samples), open_tokenizer(checkpoint), prompt_tokens)
        network = load_network(checkpoint, dtype, "cpu")
        generator = SelfSpecGenerator(from_transformers(network), prefix_cache=0)
        num_layers = generator.model.num_layers
        for name in names:
            parse_policy(name, num_layers=num_layers, measure=lambda: LayerCost(num_layers))
        shape = open_model(costs_of, dtype, "cpu")
    cost = borrowed_cost(steady_cost(shape), num_layers)
    del shape
    times = PeerTimes(load_network(costs_of, dtype, "cpu")) if peers else None
    use_cost(generator.model, cost)
    engines = [transformers_generate(network), transformers_prompt_lookup(network)] if peers else []
    description: dict[str, Any] = {
        "kind": "run",
        "command": "copying-gain",
        "configuration": {
            **configuration(checkpoint, samples, max_new_tokens, repeats, warmups=0),
            "costs_of": costs_of,
            "cost": cost.as_dict(),
            "peer_seconds": None if times is None else {str(rows): value for rows, value in times.seconds.items()},
        },
        "engines": {**{name: name for name in names}, **{engine.name: engine.label for engine in engines}},
        "provenance": provenance(network.device, network.dtype),
    }
    with recording(RecordWriter(output)) as record:
        record.write(description)
        with progress(len(samples) * (len(names) + len(engines)) * repeats) as advance:
            for _ in range(repeats):
                for sample in samples:
                    found: list[Gain] = []
                    for name in names:
                        found.append(own_gain(generator, name, sample, max_new_tokens, cost))
                        advance(name)
                    for engine in engines:
                        found.append(peer_gain(engine, network, sample, max_new_tokens, times))
                        advance(engine.label)
                    for gain in found:
                        record.write({**gain.line(), "same_text": gain.text == found[0].text})
    show(record.lines)
