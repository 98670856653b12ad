"""`selfspec-bench roofline`: how close each part of a round comes to the speed of the memory, by traces of whole runs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from bench.calibration import calibrated
from bench.commands.bench_options import RooflineCommand
from bench.commands.session import encoded, header, loaded, progress, recording, show
from bench.datasets import EncodedPrompt
from bench.engines.own import run_afresh
from bench.machine import WeightBytes, measure_bandwidth
from bench.measure import in_turn
from bench.models import open_tokenizer
from bench.provenance import provenance
from bench.record import Line
from policies import CostModel, RoundRecord, cost_of_round
from selfspec import SelfSpecGenerator
from selfspec.analysis.replay import fixed_settings, trace_agreement
from selfspec.cli.console import one_line_errors


def roofline(options: RooflineCommand) -> None:
    with one_line_errors():
        samples = encoded(options.prompts, options.num_samples, open_tokenizer(options.model), options.prompt_tokens)
        generator = SelfSpecGenerator(loaded(options), prefix_cache=0)
        network = generator.model
        where = provenance(network.device, network.dtype)
        layers, most = network.num_layers, options.max_new_tokens
        first = header("roofline", where, options.model, samples, most, options.repeats, num_layers=layers)
    weights = WeightBytes.of(network)

    def bandwidth() -> Line:
        return {"bytes_per_second": measure_bandwidth(network.device)}

    with recording(options.output, first) as record:
        cost = calibrated(generator, record)
        best = partial(best_fixed, generator, samples[0], options.max_new_tokens, cost)
        fixed = record.once("fixed", lambda: {"policy": best()})["policy"]
        policies = ["ar", fixed, "auto"]
        record.once("weights", weights.as_line)
        with progress(len(policies) * (1 + len(samples) * options.repeats)) as advance:
            for policy in [] if record.is_complete else policies:  # the path that is timed
                measure_phases(generator, policy, samples[0], options.max_new_tokens, weights, cost)
                advance(policy)
            for sample in samples:
                for repeat in range(options.repeats):
                    # In turn with the runs: a shared host's memory is not as fast in one minute as in the next.
                    record.once("bandwidth", bandwidth, prompt=sample.id, repeat=repeat)
                    for policy in in_turn(policies, repeat):
                        measure = partial(measure_phases, generator, policy, sample, most, weights, cost)
                        record.once("phases", measure, policy=policy, prompt=sample.id, repeat=repeat)
                        advance(policy)
    show(record.lines)


def phase_bytes(
    trace: Iterable[RoundRecord], weights: WeightBytes, num_layers: int, cost: CostModel
) -> tuple[dict[str, float], float]:
    """Return the bytes that the rounds of a run had to read in drafting, verifying and learning, and their predicted seconds.

    A layer's weights count once per pass, whatever the rows; keys and values as long as the text was when the round began.
    """
    read = {"draft": 0.0, "verify": 0.0, "learn": 0.0}
    seconds = 0.0
    for record in trace:
        layer = weights.layer + weights.kv * record.num_committed_before
        read["verify"] += num_layers * layer + weights.head
        seconds += cost_of_round(record, cost)
        if record.exit_layer is not None:
            # Where drafting stopped before a draw, the last row was looked at, too, and verification finds it there.
            complete = record.stop_cause == "before_draw"
            read["draft"] += (record.num_drafted + complete) * (record.exit_layer * layer + weights.draft_head)
            read["verify"] -= complete * record.exit_layer * layer
        if record.shadow is not None:
            read["learn"] += weights.draft_head
    return read, seconds


def measure_phases(
    generator: SelfSpecGenerator,
    policy: str,
    prompt: EncodedPrompt,
    max_new_tokens: int,
    weights: WeightBytes,
    cost: CostModel,
) -> Line:
    """Measure the phases of one run after the first token, learning from the prompt included; `other` is what is in none."""
    result = run_afresh(generator, policy, prompt.ids, max_new_tokens, trace=True)
    assert result.trace is not None
    stats = result.stats
    read, predicted = phase_bytes(result.trace, weights, generator.model.num_layers, cost)
    seconds = {phase: getattr(stats, f"{phase}_seconds") for phase in ("draft", "verify", "accept", "learn")}
    decoding = stats.seconds - stats.prefill_seconds
    seconds["other"] = max(0.0, decoding - sum(seconds.values()))
    found = {"tokens": stats.num_new_tokens - 1, "decode_seconds": decoding, "predicted_seconds": predicted}
    return {**found, "seconds": seconds, "bytes": read}


def best_fixed(generator: SelfSpecGenerator, prompt: EncodedPrompt, max_new_tokens: int, cost: CostModel) -> str:
    """Find the fixed setting that measured costs call best on this prompt, by replay of one traced run."""
    return fixed_settings(trace_agreement(generator, prompt.ids, max_new_tokens), cost)[0].policy
