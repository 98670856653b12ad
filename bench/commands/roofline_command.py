"""`selfspec-bench roofline`: how close the engine comes to the memory bus, call by call and phase by phase."""

from __future__ import annotations

from bench.commands import bench_options as options
from bench.commands.preparation import (
    configuration,
    encoded,
    open_model,
    open_tokenizer,
    progress,
    recording,
    run_line,
    show,
)
from bench.machine.bandwidth import WeightBytes, bandwidth_fields, measure_bandwidth
from bench.machine.roofline import best_fixed, calls, measure_phases
from bench.measure import in_turn
from bench.provenance import provenance
from bench.record import RecordWriter
from layerskip_models import DEMO_PATH
from policies import parse_policy
from selfspec import SelfSpecGenerator
from selfspec.cli.notes import one_line_errors
from selfspec.engine.calibrate import learning_seconds, measured_cost, timed_context

_LEARNING_ROWS = (1, 4)


def roofline(
    model: options.ModelOption = None,
    prompts: options.PromptsOption = None,
    num_samples: options.NumSamplesOption = 2,
    prompt_tokens: options.PromptTokensOption = 192,
    max_new_tokens: options.NewTokensOption = 128,
    repeats: options.RepeatsOption = 3,
    dtype: options.DtypeOption = "auto",
    device: options.DeviceOption = "auto",
    output: options.OutputOption = None,
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
    about = {
        **configuration(checkpoint, samples, max_new_tokens, repeats, warmups=1),
        "num_layers": network.num_layers,
        "timed_context": timed,
    }
    with recording(RecordWriter(output)) as record:
        record.write(run_line("roofline", about, [], provenance(network.device, network.dtype)))
        record.write({"kind": "costs", **cost.as_dict()})
        bandwidths = [measure_bandwidth(network.device)]
        for call in calls(cost, weights, context=timed, exit_layers=layers, learning=learning):
            record.write({"kind": "call", "name": call.name, "seconds": call.seconds, "bytes": call.num_bytes})
        with progress(len(policies) * (1 + len(samples) * repeats)) as advance:
            for policy in policies:  # the path that is timed
                measure_phases(generator, policy, samples[0], 0, max_new_tokens, weights, cost)
                advance(policy)
            for sample in samples:
                for repeat in range(repeats):
                    bandwidths.append(measure_bandwidth(network.device))
                    for policy in in_turn(policies, repeat):
                        record.write(measure_phases(generator, policy, sample, repeat, max_new_tokens, weights, cost))
                        advance(policy)
        record.write({"kind": "limits", **bandwidth_fields(bandwidths), **weights.as_line()})
    show(record.lines)
