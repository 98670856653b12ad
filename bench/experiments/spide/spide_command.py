"""`python -m bench.experiments spide`: the arms of SPIDE's Table 5, with the calls of the target that they need."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bench.commands.bench_options import DtypeOption, ModelOption, NewTokensOption, OutputOption, PromptTokensOption
from bench.commands.preparation import configuration, open_model, open_tokenizer, progress, recording, show
from bench.commands.run_command import choose_prompts
from bench.datasets import EncodedPrompt, encode_prompts
from bench.experiments.spide.arms import WINDOW, choose, score
from bench.experiments.spide.free_drafts import draft_along
from bench.provenance import provenance
from bench.record import RecordWriter
from layerskip_models import DEMO_PATH
from layerskip_models.training.evaluation import is_looping
from policies.bounds import check_exit_layer
from selfspec import SelfSpecGenerator
from selfspec.cli.notes import one_line_errors

EXIT_LAYERS = (2, 4)


def spide(
    prompts: Annotated[list[Path], typer.Argument(help="Prompts, .jsonl[.gz] or shipped ones by name.")],
    model: ModelOption = None,
    exit_layer: Annotated[
        list[int] | None, typer.Option(help="Exit layer to draft from; repeatable. Default: 2 and 4.")
    ] = None,
    tuning: Annotated[int, typer.Option(min=1, help="Prompts of each task that settings are chosen on.")] = 5,
    num_samples: Annotated[int, typer.Option(min=1, help="Prompts of each task that are scored, after these.")] = 20,
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
        checkpoint = str(model or DEMO_PATH)
        samples = encode_prompts(
            choose_prompts(prompts, [], tuning + num_samples), open_tokenizer(checkpoint), prompt_tokens
        )
        kept, scored = split_for_tuning(samples, tuning)
        generator = SelfSpecGenerator(open_model(checkpoint, dtype, "cpu"), prefix_cache=0)
        num_layers = generator.model.num_layers
        layers = [check_exit_layer(layer, num_layers) for layer in dict.fromkeys(exit_layer or EXIT_LAYERS)]
    description: dict[str, Any] = {
        "kind": "run",
        "command": "spide",
        "configuration": {
            **configuration(checkpoint, samples, max_new_tokens, repeats=1, warmups=0),
            "tuning_prompts": [sample.id for sample in kept],
            "num_layers": num_layers,
            "exit_layers": layers,
        },
        "engines": {},
        "provenance": provenance(generator.model.device, generator.model.dtype),
    }
    with recording(RecordWriter(output)) as record:
        record.write(description)
        with progress(len(samples)) as advance:
            texts = {}
            for sample in samples:
                texts[sample.id] = draft_along(
                    generator, sample.ids, max_new_tokens, layers, WINDOW, name=sample.id, task=sample.task
                )
                advance(sample.id)
        for sample in scored:
            looping = is_looping(texts[sample.id][0].tokens)
            record.write({"kind": "text", "task": sample.task, "prompt": sample.id, "looping": looping})
        for place in range(len(layers)):
            chosen, arms = choose([texts[sample.id][place] for sample in kept])
            record.write(chosen)
            with progress(len(arms)) as advance:
                for line in score(arms, [texts[sample.id][place] for sample in scored], advance):
                    record.write(line)
    show(record.lines)


def split_for_tuning(samples: list[EncodedPrompt], tuning: int) -> tuple[list[EncodedPrompt], list[EncodedPrompt]]:
    """The first `tuning` prompts of each task, and the others, tasks taking turns. ValueError if a task has no others."""
    by_task: dict[str, list[EncodedPrompt]] = {}
    for sample in samples:
        by_task.setdefault(sample.task, []).append(sample)
    for task, found in by_task.items():
        if len(found) <= tuning:
            raise ValueError(f"task {task} has {len(found)} prompts: more than --tuning {tuning} are needed")
    turns = max(map(len, by_task.values()))
    taken = [(turn, found[turn]) for turn in range(turns) for found in by_task.values() if turn < len(found)]
    return [sample for turn, sample in taken if turn < tuning], [sample for turn, sample in taken if turn >= tuning]
