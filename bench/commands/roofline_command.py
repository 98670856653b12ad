"""`selfspec-bench roofline`: how close each phase of decoding comes to the speed of the memory."""

from __future__ import annotations

from bench.commands.bench_options import RooflineCommand
from bench.commands.session import encoded, loaded, measure_own
from bench.engines.own import SelfSpecEngine
from bench.models import open_tokenizer
from selfspec import SelfSpecGenerator
from selfspec.cli.console import one_line_errors
from selfspec.defaults import DEFAULT_POLICY, fixed_policy


def roofline(options: RooflineCommand) -> None:
    with one_line_errors():
        samples = encoded(options.prompts, options.num_samples, open_tokenizer(options.model), options.prompt_tokens)
        generator = SelfSpecGenerator(loaded(options), prefix_cache=0)
        policies = ["ar", fixed_policy(options.model, generator.model.num_layers), DEFAULT_POLICY]
        engines = [SelfSpecEngine(generator, name) for name in policies]
        measure_own("roofline", options, generator, engines, samples, warmups=options.warmups, policies=policies)
