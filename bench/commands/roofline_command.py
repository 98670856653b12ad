"""`selfspec-bench roofline`: how close the engine comes to the memory bus, call by call and phase by phase."""

from __future__ import annotations

from typing import Any

from bench.commands.bench_options import (
    DeviceOption,
    DtypeOption,
    ModelOption,
    NewTokensOption,
    NumSamplesOption,
    OutputOption,
    PromptsOption,
    PromptTokensOption,
    RepeatsOption,
)
from bench.commands.preparation import (
    configuration,
    encoded,
    open_model,
    open_tokenizer,
    progress,
    recording,
    show,
)
from bench.machine.bandwidth import BandwidthInTurn, WeightBytes
from bench.machine.roofline import best_fixed, calls, measure_phases
from bench.provenance import provenance
from bench.record import RecordWriter
from layerskip_models import DEMO_PATH
from policies import parse_policy
from selfspec import SelfSpecGenerator
from selfspec.cli.arguments import one_line_errors
from selfspec.engine.calibrate import learning_seconds, measured_cost, timed_context

_LEARNING_ROWS = (1, 4)


def roofline(
    model: ModelOption = None,
    prompts: PromptsOption = None,
    num_samples: NumSamplesOption = 2,
    prompt_tokens: PromptTokensOption = 192,
    max_new_tokens: NewTokensOption = 128,
    repeats: RepeatsOption = 3,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    output: OutputOption = None,
) -> None:
    """Measured memory bandwidth, the bytes that each step must read, the limit that follows, and how close the engine comes.

    Plain decoding, the fixed setting that is best on the first prompt by replay, and auto; greedy.
    """
    with one_line_errors():
        checkpoint = str(model or DEMO_PATH)
        samples = encoded(prompts, num_samples, open_tokenizer(checkpoint), prompt_tokens)
        generator = SelfSpecGenerator(open_model(checkpoint, dtype, device), prefix_cache=0)
    network = generator.model
    cost = measured_cost(network, generator.runner)
    weights = WeightBytes.of(network)
    fixed = best_fixed(generator, samples[0], max_new_tokens, cost)
    policies = ["ar", fixed, "auto"]
    learned = parse_policy("auto", num_layers=network.num_layers, measure=lambda: cost).observes.shadow_layers
    learning = learning_seconds(network, learned, _LEARNING_ROWS)
    exit_layer = int(fixed.removeprefix("ls:").partition("-")[0])
    layers = sorted({1, exit_layer, max(1, network.num_layers // 4), max(1, network.num_layers // 2)})
    timed = timed_context(network)
    description: dict[str, Any] = {
        "kind": "run",
        "command": "roofline",
        "configuration": {
            **configuration(checkpoint, samples, max_new_tokens, repeats, warmups=1),
            "num_layers": network.num_layers,
            "timed_context": timed,
        },
        "engines": {},
        "provenance": provenance(network.device, network.dtype),
    }
    with recording(RecordWriter(output)) as record:
        record.write(description)
        record.write({"kind": "costs", **cost.as_dict()})
        bandwidth = BandwidthInTurn(network.device)
        bandwidth.measure()
        for call in calls(cost, weights, context=timed, exit_layers=layers, learning=learning):
            record.write(call.as_line())
        with progress(len(policies) * (1 + len(samples) * repeats)) as advance:
            for policy in policies:  # the path that is timed
                measure_phases(generator, policy, samples[0], 0, max_new_tokens, weights, cost)
                advance(policy)
            for sample in samples:
                for repeat in range(repeats):
                    bandwidth.measure()
                    for offset in range(len(policies)):
                        policy = policies[(repeat + offset) % len(policies)]
                        record.write(measure_phases(generator, policy, sample, repeat, max_new_tokens, weights, cost))
                        advance(policy)
        record.write({"kind": "limits", **bandwidth.as_line(), **weights.as_line()})
    show(record.lines)
