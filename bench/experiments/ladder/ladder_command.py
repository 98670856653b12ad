"""`python -m bench.experiments ladder`: the same policies on checkpoints of growing quality, settings tuned on each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from bench.commands.bench_options import DtypeOption, NewTokensOption, OutputOption, PromptTokensOption
from bench.commands.preparation import progress, recording, show
from bench.datasets import EncodedPrompt
from bench.experiments.ladder.earlier import measured_before
from bench.experiments.ladder.rungs import Rung, find_rungs, held_out_figures
from bench.experiments.settings.arms import OURS, candidates
from bench.experiments.settings.settings_command import count
from bench.experiments.tuned_run import EXIT_LAYERS, ExitLayersOption, ScoredOption, TunedRun, TuningOption
from bench.grid import ALL, LAYERS, grid_line, mean_agreement, tokens_per_cost
from bench.provenance import weights_digest
from bench.record import Line, RecordWriter, matching
from bench.report.table import counted
from layerskip_models.training.evaluation import is_looping
from policies import LayerCost
from selfspec import SelfSpecGenerator
from selfspec.analysis.replay import GRID_LENGTHS, trace_agreement
from selfspec.cli.notes import one_line_errors

REPLAYED = "LayerSkip"
"""The rule whose settings are replayed from plain runs, so that none of them has to be decoded."""
UNTUNED: Mapping[str, str] = {
    "DEL": "del",
    "DEL, keeping the last draft": "del:on_stop=keep",
    "DEL, as its text says": "del:on_stop=keep,prompt=counted",
    "ours": "auto:cost=layers",
}
"""Policies that choose their own layers and lengths, by the rule that tables name."""


def ladder(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(
            help="Checkpoints, early ones first. The OUTPUT_DIR of a training stands for all that --keep-at left there."
        ),
    ],
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help="Prompts, .jsonl[.gz] or shipped ones by name; repeatable. Default: the shipped ones."),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Text as for training, whose held-out documents give loss and agreement; repeatable."),
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Names to leave out of folders of text.")] = None,
    max_text_tokens: Annotated[int, typer.Option(min=257, help="Held-out tokens, shared by the texts.")] = 16384,
    exit_layer: ExitLayersOption = None,
    tuning: TuningOption = 2,
    num_samples: ScoredOption = 20,
    prompt_tokens: PromptTokensOption = 128,
    max_new_tokens: NewTokensOption = 128,
    dtype: DtypeOption = "auto",
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the checkpoints that --output already has, and measure the others.")
    ] = False,
    output: OutputOption = None,
) -> None:
    """Tokens per loaded layer of each policy on each checkpoint: does their order hold as a model gets better?

    Each rule runs at the settings that are best for that checkpoint on prompts which are not scored. Nothing is timed: rounds
    and layers are counted, so a busy machine changes nothing. Every prompt is new to a policy.
    """
    with one_line_errors():
        if resume and output is None:
            raise ValueError("--resume needs --output, the record that is to go on")
        rungs = find_rungs(checkpoints)
        prepare = partial(
            TunedRun.prepare,
            dtype=dtype,
            prompts=prompts or [],
            tuning=tuning,
            num_samples=num_samples,
            prompt_tokens=prompt_tokens,
            exit_layers=exit_layer or EXIT_LAYERS,
        )
        run = prepare(str(rungs[0].path))
        first = run.description(
            "ladder",
            max_new_tokens,
            model=counted(len(rungs), "checkpoint"),
            weights_digest=None,
            rungs=[rung.name for rung in rungs],
            training=next((rung.training for rung in rungs if rung.training is not None), None),
            text=[path.name for path in text or []],
            max_text_tokens=max_text_tokens,
        )
        before = measured_before(output, first, rungs) if resume and output is not None else []
    with recording(RecordWriter(output, previous=[first, *before])) as record:
        for rung in rungs:
            if matching(before, "rung", rung=rung.name):
                continue
            run = prepare(str(rung.path)) if rung is not rungs[0] else run
            about = held_out_figures(rung.path, text or [], exclude or [], max_text_tokens)
            measure(run, rung, about, max_new_tokens, record)
    show(record.lines)


def measure(run: TunedRun, rung: Rung, about: Line, max_new_tokens: int, record: RecordWriter) -> None:
    """Write a checkpoint's lines: which settings were chosen, what each policy counted, and what the model is like."""
    patterns = [name for rule in OURS if rule != REPLAYED for name in candidates(OURS[rule], run.exit_layers)]
    with progress(len(patterns) + len(OURS) + len(UNTUNED) + 1) as advance:
        etpls = replayed_settings(run, max_new_tokens)
        for name in patterns:
            lines = [count(run.generator, name, sample, max_new_tokens, 0.0) for sample in run.tuning]
            etpls[name] = sum(line["tokens"] for line in lines) / sum(line["layers"] for line in lines)
            advance(f"{rung.name}: {name}")
        chosen = {rule: max(candidates(OURS[rule], run.exit_layers), key=etpls.__getitem__) for rule in OURS}
        for rule, name in {**chosen, **UNTUNED}.items():
            if rule in chosen:
                record.write({"kind": "chosen", "rung": rung.name, "rule": rule, "policy": name, "etpl": etpls[name]})
            for sample in run.scored:
                line = count(run.generator, name, sample, max_new_tokens, 0.0)
                record.write({"kind": "score", "rung": rung.name, "rule": rule, **line})
            advance(f"{rung.name}: {name}")
        record.write({**_rung_line(run, rung, max_new_tokens), **about})
        advance(rung.name)


def replayed_settings(run: TunedRun, max_new_tokens: int) -> dict[str, float]:
    """Tokens per layer of drafts of a fixed length on the tuning prompts, by replay."""
    grid = [line for line, _ in _traced(run.generator, run.tuning, max_new_tokens)]
    return {
        name: tokens_per_cost(grid, {line["prompt"]: name for line in grid}, LAYERS)[ALL]
        for name in candidates(OURS[REPLAYED], run.exit_layers)
    }


def _traced(
    generator: SelfSpecGenerator, samples: Sequence[EncodedPrompt], max_new_tokens: int
) -> list[tuple[Line, bool]]:
    """Each prompt's line of a grid, and whether its text loops."""
    cost = LayerCost(generator.model.num_layers)
    traces = [(sample, trace_agreement(generator, sample.ids, max_new_tokens)) for sample in samples]
    return [(grid_line(sample, trace, GRID_LENGTHS, cost), is_looping(trace.tokens)) for sample, trace in traces]


def _rung_line(run: TunedRun, rung: Rung, max_new_tokens: int) -> Line:
    """own_agreement: of every exit with the last layer, on the model's own texts; own_agreement_free: without loops."""
    traced = _traced(run.generator, run.scored, max_new_tokens)
    free = [line for line, looping in traced if not looping]
    return {
        "kind": "rung",
        "rung": rung.name,
        "tokens": rung.tokens,
        "num_layers": run.generator.model.num_layers,
        "weights_digest": weights_digest(rung.path),
        "looping": sum(looping for _, looping in traced),
        "texts": len(traced),
        "own_agreement": mean_agreement([line for line, _ in traced]),
        "own_agreement_free": mean_agreement(free) if free else None,
    }
