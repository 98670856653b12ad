"""`exit-losses`: exits trained with equal weights for all tokens, and by accepted length (D-PACE)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import AutoTokenizer

from bench.commands.bench_options import NewTokensOption, OutputOption
from bench.commands.preparation import load_network, model_name, progress, recording, show
from bench.experiments.exit_losses.outcome import finished_outcome, held_out, outcome
from bench.experiments.exit_losses.study import Study, arms_and_seeds, parse_arm, write_own_text
from bench.provenance import provenance, weights_digest
from bench.record import RecordWriter
from layerskip_models import DEMO_PATH
from selfspec.cli.notes import one_line_errors

ARMS = ("uniform", "cumulative:0.5", "full:0.3", "full:0.5", "full:0.7")
BEFORE = "before training"
"""The arm of the checkpoint that all runs continue."""


def exit_losses(
    data: Annotated[list[str], typer.Option(help="PATH[:weight], as for training; repeatable.")],
    init: Annotated[str | None, typer.Option(help="LayerSkip checkpoint to continue. Default: the demo.")] = None,
    work_dir: Annotated[Path, typer.Option(help="Folder for the runs; what is finished there is not repeated.")] = Path(
        "exit-losses"
    ),
    arm: Annotated[
        list[str] | None,
        typer.Option(help=f"uniform, cumulative:ALPHA or full:ALPHA; repeatable. Default: {', '.join(ARMS)}."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each arm.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps of each run.")] = 10,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens per step.")] = 2048,
    sequence_length: Annotated[int, typer.Option(min=2, help="Tokens per sequence.")] = 256,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 2e-3,
    block: Annotated[int, typer.Option(min=1, help="Tokens of the draft whose accepted length counts.")] = 8,
    exits: Annotated[int, typer.Option(min=1, help="Exit layers 1 to this one are trained and measured.")] = 4,
    own_texts: Annotated[int, typer.Option(min=1, help="Texts that the checkpoint writes, to train on.")] = 300,
    own_text_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each of these texts.")] = 192,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out sequences, and greedy texts to replay.")] = 48,
    max_new_tokens: NewTokensOption = 96,
    exclude: Annotated[list[str] | None, typer.Option(help="Names to leave out of folders of data.")] = None,
    output: OutputOption = None,
) -> None:
    """Continue a checkpoint with each loss for its exits, and replay what the exits would then draft.

    Runs of one seed see the same text in the same order. Repeat the command to go on where it broke off, or with more
    seeds or arms to add to what is finished.
    """
    with one_line_errors():
        checkpoint = init or str(DEMO_PATH)
        arms = [parse_arm(text) for text in dict.fromkeys(arm or ARMS)]
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        network = load_network(checkpoint, "float32", "cpu")
        num_layers = len(network.model.layers)
        if exits >= num_layers:
            raise ValueError(f"exits must be in [1, {num_layers - 1}] for this {num_layers}-layer model, got {exits}")
        study = Study(
            data=tuple(data),
            exclude=tuple(exclude or ()),
            init=checkpoint,
            num_layers=num_layers,
            work_dir=work_dir,
            max_steps=steps,
            batch_tokens=batch_tokens,
            sequence_length=sequence_length,
            learning_rate=learning_rate,
            block=block,
            exits=exits,
        )
        runs = arms_and_seeds(arms, seeds)
        text = held_out(study, tokenizer, prompts)
        write_own_text(study, network, tokenizer, own_texts, own_text_tokens)
        configs = [study.run_config(chosen, seed) for chosen, seed in runs]
    description: dict[str, Any] = {
        "kind": "run",
        "command": "exit-losses",
        "configuration": {
            "model": model_name(checkpoint),
            "weights_digest": weights_digest(Path(checkpoint)) if Path(checkpoint).is_dir() else None,
            "prompts_digest": f"{len(text.prompts)} held-out",
            "num_layers": num_layers,
            "data": list(data),
            "arms": [chosen.name for chosen in arms],
            "repeats": seeds,
            "steps": steps,
            "batch_tokens": batch_tokens,
            "sequence_length": sequence_length,
            "learning_rate": learning_rate,
            "block": block,
            "exits": exits,
            "own_texts": own_texts,
            "own_text_tokens": own_text_tokens,
            "max_new_tokens": max_new_tokens,
        },
        "provenance": provenance(network.device, network.dtype),
    }
    with recording(RecordWriter(output)) as record, progress(len(runs) + 1) as advance:
        record.write(description)
        record.write({"kind": "exits", "arm": BEFORE, "seed": None, **outcome(network, text, exits, max_new_tokens)})
        advance(BEFORE)
        for (chosen, seed), config in zip(runs, configs, strict=True):
            line = finished_outcome(
                config, {"exits": exits, "prompts": prompts, "max_new_tokens": max_new_tokens}, text
            )
            record.write({"kind": "exits", "arm": chosen.name, "seed": seed, **line})
            advance(f"{chosen.name}, seed {seed}")
    show(record.lines)
