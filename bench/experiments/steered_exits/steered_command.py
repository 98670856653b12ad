"""`steered-exits`: adapters that the last verified row steers beside those that nothing steers, drafting in the engine."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from bench.commands.bench_options import DtypeOption, ModelOption, NewTokensOption, OutputOption, PromptTokensOption
from bench.commands.preparation import configuration, open_model, open_tokenizer, progress, recording, show
from bench.commands.run_command import choose_prompts
from bench.datasets import encode_prompts
from bench.experiments.exit_adapters.arms import arms, train_arms
from bench.experiments.exit_adapters.judge_command import questions
from bench.experiments.steered_exits.steered_runs import Setting, SteeredRuns
from bench.provenance import provenance
from bench.record import RecordWriter
from layerskip_models import DEMO_PATH
from selfspec import SelfSpecGenerator
from selfspec.cli.notes import one_line_errors
from selfspec.exits.settings import ExitTraining

DRAFTING_FORMS = ("low_rank", "steered", "steered_wide")


def steered_exits(
    data: Annotated[list[str], typer.Option(help="PATH[:share] of training data, as for selfspec train-exit.")],
    work: Annotated[Path, typer.Option(help="Folder for the runs. Finished ones in it are not trained again.")],
    model: ModelOption = None,
    form: Annotated[
        list[str] | None, typer.Option(help=f"Form; repeatable. Default: {', '.join(DRAFTING_FORMS)}.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each form.")] = 3,
    exit_layer: Annotated[list[int] | None, typer.Option(help="Exit; repeatable. Default: train-exit's.")] = None,
    drafts: Annotated[list[int] | None, typer.Option(min=1, help="Drafts a round; repeatable. Default: 1, 4.")] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(min=0, help="0 for greedy; repeatable. Default: 0, 1.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to train on.")] = 50_000,
    epochs: Annotated[float, typer.Option(help="Passes over them.")] = 2.0,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Rows of an optimiser step.")] = 2048,
    chats: Annotated[
        Path | None, typer.Option(help='Questions to judge on, .jsonl with "messages". Default: the shipped prompts.')
    ] = None,
    num_samples: Annotated[int, typer.Option(min=1, help="Questions, or prompts of each task.")] = 4,
    prompt_tokens: PromptTokensOption = 128,
    max_new_tokens: NewTokensOption = 100,
    dtype: DtypeOption = "auto",
    output: OutputOption = None,
) -> None:
    """Drafts accepted and tokens per layer of steered and unsteered exits, really run, greedily and sampled.

    All arms are trained on the same answers of the model's own, with equal steps. An adapter is charged by the weights that a
    draft step reads; what is computed once a round is not. These are counts, which a busy machine does not change.
    """
    with one_line_errors():
        checkpoint = str(model or DEMO_PATH)
        if unknown := {*(form or ())} - {*DRAFTING_FORMS}:
            raise ValueError(f"forms that draft are {', '.join(DRAFTING_FORMS)}; got {', '.join(sorted(unknown))}")
        chosen = arms(form or DRAFTING_FORMS, ["uniform"], seeds)
        tokenizer = open_tokenizer(checkpoint)
        if chats is None:
            samples = encode_prompts(choose_prompts([], [], num_samples), tokenizer, prompt_tokens)
        else:
            samples = questions(chats, tokenizer, num_samples)
        config = ExitTraining(
            model=str(model) if model else None, data=tuple(data), output_dir=str(work), max_tokens=max_tokens, epochs=epochs,
            exit_layers=tuple(exit_layer or ()), own_answers=True, batch_tokens=batch_tokens,
        )  # fmt: skip
        network = open_model(checkpoint, dtype, "cpu").with_adapters({})
        with progress(len(chosen) + 1) as advance:
            writer = SelfSpecGenerator(network, tokenizer, prefix_cache=0)
            trained = train_arms(chosen, work, config, writer, advance)
        runs = SteeredRuns(network, [sample.ids for sample in samples], max_new_tokens)
        described = next(iter(trained.values())).config
        settings = [
            Setting(exit_layer=layer, num_speculations=length, temperature=heat)
            for heat, layer, length in product(temperature or (0.0, 1.0), described.exit_layers, drafts or (1, 4))
        ]
        with recording(RecordWriter(output)) as record:
            record.write(
                {
                    "kind": "run",
                    "command": "steered-exits",
                    "configuration": {
                        **configuration(checkpoint, samples, max_new_tokens, 1, warmups=0),
                        "num_layers": network.num_layers,
                        "rank": described.rank,
                        "max_tokens": max_tokens,
                        "epochs": epochs,
                        "batch_tokens": batch_tokens,
                        "seeds": seeds,
                    },
                    "provenance": provenance(network.device, network.dtype),
                }
            )
            with progress(len(trained) + seeds) as advance:
                for seed in range(seeds):
                    for line in runs.lines(None, settings, seed):
                        record.write({**line, "form": "none", "seed": seed})
                    advance("bare exits")
                for arm, adapters in trained.items():
                    for line in runs.lines(adapters, settings, arm.seed):
                        record.write({**line, "form": arm.form, "seed": arm.seed})
                    advance(arm.name)
    show(record.lines)
