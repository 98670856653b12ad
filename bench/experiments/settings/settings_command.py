"""`python -m bench.experiments settings`: published settings beside ours, chosen on prompts that are not scored."""

from __future__ import annotations

from functools import cache
from typing import Annotated

import typer

from bench.commands.bench_options import (
    DtypeOption,
    ModelOption,
    NewTokensOption,
    OutputOption,
    PromptsArgument,
    PromptTokensOption,
)
from bench.commands.preparation import progress, recording, show
from bench.datasets import EncodedPrompt
from bench.experiments.settings.arms import OURS, PUBLISHED, candidates, choose
from bench.experiments.tuned_run import (
    EXIT_LAYERS,
    ExitLayersOption,
    ScoredOption,
    TunedRun,
    TuningOption,
)
from bench.record import Line, RecordWriter
from layerskip_models.training.evaluation import is_looping
from selfspec import SelfSpecGenerator
from selfspec.cli.notes import one_line_errors


def settings(
    prompts: PromptsArgument,
    model: ModelOption = None,
    exit_layer: ExitLayersOption = None,
    tuning: TuningOption = 5,
    num_samples: ScoredOption = 20,
    prompt_tokens: PromptTokensOption = 320,
    max_new_tokens: NewTokensOption = 96,
    temperature: Annotated[
        float,
        typer.Option(min=0, help="0 decodes greedily; above it the scored runs sample (settings are chosen so, too)."),
    ] = 0.0,
    dtype: DtypeOption = "auto",
    output: OutputOption = None,
) -> None:
    """Tokens per loaded layer of each policy at its published settings and at the best of ours, and of DEL in its readings.

    Nothing is timed: rounds and layers are counted, so a busy machine changes nothing. Every prompt is new to a policy.
    """
    with one_line_errors():
        run = TunedRun.prepare(model, dtype, prompts, tuning, num_samples, prompt_tokens, exit_layer or EXIT_LAYERS)
    layers = run.exit_layers

    def counts(policy: str, sample: EncodedPrompt) -> Line:
        return count(run.generator, policy, sample, max_new_tokens, temperature)

    tried = [name for rule in PUBLISHED for name in candidates([*PUBLISHED[rule], *OURS[rule]], layers)]
    with recording(RecordWriter(output)) as record:
        record.write(run.description("settings", max_new_tokens, temperature=temperature))
        with progress(len(dict.fromkeys(tried))) as advance:

            @cache
            def etpl(policy: str) -> float:
                lines = [counts(policy, sample) for sample in run.tuning]
                advance(policy)
                value = float(sum(line["tokens"] for line in lines) / sum(line["layers"] for line in lines))
                record.write({"kind": "tried", "policy": policy, "etpl": value})
                return value

            chosen = choose(layers, etpl)
        with progress(len(chosen)) as advance:
            for one in chosen:
                for sample in run.scored:
                    line = counts(one.policy, sample)
                    record.write({"kind": "score", "rule": one.rule, "settings": one.settings, **line})
                advance(one.policy)
    show(record.lines)


def count(
    generator: SelfSpecGenerator, policy: str, sample: EncodedPrompt, max_new_tokens: int, temperature: float
) -> Line:
    """Decode a prompt with a policy that has forgotten all others. tokens: all new ones but the first."""
    generator.resolve_policy(policy).reset()
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0, "seed": 0}
    result = generator.generate(
        sample.ids,
        max_new_tokens=max_new_tokens,
        policy=policy,
        eos_token_id=[],
        **(sampling if temperature else {"do_sample": False}),
    )
    stats = result.stats
    return {
        "policy": policy,
        "task": sample.task,
        "prompt": sample.id,
        "tokens": stats.num_new_tokens - 1,
        "layers": stats.loaded_layers,
        "rounds": stats.rounds,
        "drafted": stats.num_drafted,
        "accepted": stats.num_accepted,
        "looping": is_looping(result.new_tokens),
    }
