"""`python -m bench.experiments spide`: the arms of SPIDE's Table 5, with the calls of the target that they need."""

from __future__ import annotations

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
from bench.experiments.spide.arms import WINDOW, choose, score
from bench.experiments.spide.free_drafts import draft_along
from bench.experiments.tuned_run import ScoredOption, TunedRun, TuningOption
from bench.record import RecordWriter
from layerskip_models.training.evaluation import is_looping
from selfspec.cli.notes import one_line_errors

EXIT_LAYERS = (2, 4)


def spide(
    prompts: PromptsArgument,
    model: ModelOption = None,
    exit_layer: Annotated[
        list[int] | None, typer.Option(help="Exit layer to draft from; repeatable. Default: 2 and 4.")
    ] = None,
    tuning: TuningOption = 5,
    num_samples: ScoredOption = 20,
    prompt_tokens: PromptTokensOption = 320,
    max_new_tokens: NewTokensOption = 128,
    dtype: DtypeOption = "auto",
    output: OutputOption = None,
) -> None:
    """Play SPIDE's Algorithm 1 over the drafts of a model's exits: serial above tau, parallel below it.

    The text is decoded once, and every exit layer drafts from each of its positions. Rounds are exact, and so are the numbers
    of calls and drafts. The time of two devices, one of which drafts while the other verifies, is modelled in layers.
    """
    with one_line_errors():
        run = TunedRun.prepare(model, dtype, prompts, tuning, num_samples, prompt_tokens, exit_layer or EXIT_LAYERS)
    layers = run.exit_layers
    with recording(RecordWriter(output)) as record:
        record.write(run.description("spide", max_new_tokens))
        with progress(len(run.samples)) as advance:
            texts = {}
            for sample in run.samples:
                texts[sample.id] = draft_along(
                    run.generator, sample.ids, max_new_tokens, layers, WINDOW, name=sample.id, task=sample.task
                )
                advance(sample.id)
        for sample in run.scored:
            looping = is_looping(texts[sample.id][0].tokens)
            record.write({"kind": "text", "task": sample.task, "prompt": sample.id, "looping": looping})
        for place in range(len(layers)):
            chosen, arms = choose([texts[sample.id][place] for sample in run.tuning])
            record.write(chosen)
            with progress(len(arms)) as advance:
                for line in score(arms, [texts[sample.id][place] for sample in run.scored], advance):
                    record.write(line)
    show(record.lines)
