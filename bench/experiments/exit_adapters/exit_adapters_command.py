"""`exit-adapters`: train adapters of every form for a frozen model, and say what each is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.commands.bench_options import (
    DtypeOption,
    ModelOption,
    NewTokensOption,
    OutputOption,
    PromptTokensOption,
    RepeatsOption,
    TaskSamplesOption,
)
from bench.commands.preparation import configuration, open_model, open_tokenizer, progress, recording, show
from bench.commands.run_command import choose_prompts
from bench.datasets import encode_prompts
from bench.experiments.exit_adapters.arms import Measured, arms, train_arms
from bench.experiments.exit_adapters.confidences import correlations
from bench.experiments.exit_adapters.other_forms import FORMS
from bench.experiments.exit_adapters.position_weights import OTHERS
from bench.provenance import provenance
from bench.record import RecordWriter
from layerskip_models import DEMO_PATH
from layerskip_models.exits.adapter import LOW_RANK as DRAFTED
from layerskip_models.training.accepted_length import ARMS
from layerskip_models.training.documents import DEFAULT_EXCLUDES
from selfspec import SelfSpecGenerator
from selfspec.cli.notes import one_line_errors
from selfspec.exits.settings import ExitTraining


def exit_adapters(
    data: Annotated[list[str], typer.Option(help="PATH[:share] of training data, as for selfspec train-exit.")],
    work: Annotated[Path, typer.Option(help="Folder for the runs. Finished ones in it are not trained again.")],
    model: ModelOption = None,
    form: Annotated[list[str] | None, typer.Option(help=f"Form; repeatable. Default: {', '.join(FORMS)}.")] = None,
    weighting: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Weights of positions, ARM[:ALPHA[:BLOCK]] with one of {', '.join((*ARMS, *OTHERS))}; repeatable. "
            "Default: uniform, full (D-PACE).",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each form and weighting.")] = 3,
    exit_layer: Annotated[list[int] | None, typer.Option(help="Exit; repeatable. Default: train-exit's.")] = None,
    rank: Annotated[int, typer.Option(min=0, help="Width of the adapters; 0 for train-exit's default.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to train on.")] = 100_000,
    epochs: Annotated[float, typer.Option(help="Passes over them.")] = 2.0,
    own_answers: Annotated[
        bool, typer.Option("--own-answers", help="Train on what the model writes for beginnings of the data.")
    ] = False,
    exclude: Annotated[list[str] | None, typer.Option(help="Names to leave out of folders of data.")] = None,
    prompt: Annotated[list[Path] | None, typer.Option(help="Prompts, .jsonl[.gz] or shipped ones by name.")] = None,
    num_samples: TaskSamplesOption = 4,
    prompt_tokens: PromptTokensOption = 128,
    max_new_tokens: NewTokensOption = 100,
    repeats: RepeatsOption = 3,
    dtype: DtypeOption = "auto",
    output: OutputOption = None,
) -> None:
    """Agreement, tokens per layer and speed with adapters after the exits, next to the bare exits.

    All arms are trained on the same states with equal steps, and judged on greedy text that the model writes for prompts of
    the benchmark. Tokens per layer are replayed for each exit at its best draft length, and counted in runs of auto for the
    forms that the engine drafts with; adapters are charged by the weights that a draft step reads. Speeds are measured with
    the first low-rank run, plain decoding, bare and adapted exits taking turns.
    """
    with one_line_errors():
        checkpoint = str(model or DEMO_PATH)
        forms = form or list(FORMS)
        chosen = arms(forms, weighting or ["uniform", "full"], seeds)
        samples = encode_prompts(
            choose_prompts(prompt or [], [], num_samples), open_tokenizer(checkpoint), prompt_tokens
        )
        config = ExitTraining(
            model=str(model) if model else None, data=tuple(data), output_dir=str(work), max_tokens=max_tokens, epochs=epochs,
            rank=rank, exit_layers=tuple(exit_layer or ()), own_answers=own_answers,
            exclude=tuple(exclude or DEFAULT_EXCLUDES),
        )  # fmt: skip
        network = open_model(checkpoint, dtype, "cpu").with_adapters({})
        generator = SelfSpecGenerator(network, open_tokenizer(checkpoint), prefix_cache=0)
        with progress(len(chosen) + 1) as advance:
            trained = train_arms(chosen, work, config, generator, advance)
        measured = Measured.of(network, [*trained.values()], [s.ids for s in samples], max_new_tokens)
    described = next(iter(trained.values())).config
    description = {
        "kind": "run",
        "command": "exit-adapters",
        "configuration": {
            **configuration(checkpoint, samples, max_new_tokens, repeats, warmups=1),
            "num_layers": network.num_layers,
            "rank": described.rank,
            "max_tokens": max_tokens,
            "epochs": epochs,
            "seeds": seeds,
            "own_answers": own_answers,
        },
        "provenance": provenance(network.device, network.dtype),
    }
    layers = described.exit_layers
    with recording(RecordWriter(output)) as record:
        record.write(description)
        with progress(len(trained) + 2) as advance:
            bare = [*measured.bare(layers)]
            for line in bare:
                record.write({**line, "form": "none", "weighting": "", "seed": 0})
            advance("bare exits")
            best = {line["exit_layer"]: line["num_speculations"] for line in bare if line["kind"] == "exit"}
            lengths: dict[int, tuple[int, int]] = {}
            for arm, adapters in trained.items():
                for line in measured.arm(arm, adapters):
                    record.write(line)
                    if line["kind"] == "exit" and arm.form == DRAFTED and len(lengths) < len(layers):
                        layer = line["exit_layer"]
                        lengths[layer] = best[layer], line["num_speculations"]
                advance(arm.name)
            for line in correlations(measured, next(iter(trained.values()))):
                record.write(line)
            drafted = next((found for arm, found in trained.items() if arm.form == DRAFTED), None)
            if drafted is not None:
                for line in measured.speeds(drafted, lengths, repeats):
                    record.write(line)
            advance("speeds")
    show(record.lines)
