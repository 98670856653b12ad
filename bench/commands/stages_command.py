"""`selfspec-bench stages`: two stages in two processes, with and without overlap, beside one process and the simulation."""

from __future__ import annotations

import os
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer

from bench.commands.bench_options import (
    DtypeOption,
    NewTokensOption,
    NumSamplesOption,
    PromptsOption,
    PromptTokensOption,
)
from bench.commands.preparation import encoded, open_tokenizer
from bench.datasets import EncodedPrompt
from bench.report.table import Table, print_tables
from layerskip_models import DEMO_PATH
from selfspec import SelfSpecGenerator
from selfspec.analysis.replay import trace_agreement
from selfspec.cli.arguments import one_line_errors
from selfspec.parallel.overlap_timing import StagedRun, Stages, with_overlap
from selfspec.parallel.two_stages import StagedStats, TwoStages

_WARM = 16


def stages(
    model: Annotated[Path, typer.Option(help="Folder of a checkpoint.")] = DEMO_PATH,
    exit_layer: Annotated[int, typer.Option(min=1, help="Layers of the first stage.")] = 4,
    rows: Annotated[int, typer.Option(min=1, help="Drafts that a verification waits for.")] = 2,
    ahead: Annotated[int, typer.Option(min=1, help="Drafts that may lie ahead of a verification.")] = 2,
    prompts: PromptsOption = None,
    num_samples: NumSamplesOption = 2,
    prompt_tokens: PromptTokensOption = 64,
    max_new_tokens: NewTokensOption = 96,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each mode.")] = 3,
    dtype: DtypeOption = "auto",
) -> None:
    """Measure two processes with a core each: both stages at work at once, in turn, and one process with both cores.

    The simulation (`selfspec-bench overlap`) is given the times that the stages took, and is to come to the same speed.
    """
    with one_line_errors():
        cores = sorted(os.sched_getaffinity(0))[:2]
        if len(cores) < 2:
            raise ValueError("two stages need two cores, and this process may use one: widen its affinity")
        samples = encoded(prompts, num_samples, open_tokenizer(str(model)), prompt_tokens)
        table = _measured(
            model, exit_layer, (rows, ahead), samples, max_new_tokens, repeats, dtype, (cores[0], cores[1])
        )
    print_tables([table])


def _measured(
    model: Path,
    exit_layer: int,
    lead: tuple[int, int],
    samples: list[EncodedPrompt],
    new: int,
    repeats: int,
    dtype: str,
    cores: tuple[int, int],
) -> Table:
    generator = SelfSpecGenerator.from_pretrained(model, dtype=dtype, device="cpu", exits=None, prefix_cache=0)
    options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "eos_token_id": []}
    traces = [trace_agreement(generator, sample.ids, new) for sample in samples]
    agrees = [[bool(flag) for flag in trace.agrees[exit_layer]] for trace in traces]
    found: list[tuple[str, float, str, str]] = []

    def one_process(policy: str) -> float:
        generator.generate(samples[0].ids, max_new_tokens=_WARM, policy=policy, eos_token_id=[])
        speeds = []
        for _ in range(repeats):
            started, prefill = perf_counter(), 0.0
            for sample in samples:
                prefill += generator.generate(sample.ids, policy=policy, **options).stats.prefill_seconds
            speeds.append(len(samples) * (new - 1) / (perf_counter() - started - prefill))
        return median(speeds)

    torch.set_num_threads(2)
    found.append(("one process, two threads, plain", one_process("ar"), "", ""))
    length = sum(lead)
    found.append(
        (f"one process, two threads, ls:{exit_layer}-{lead[0]}", one_process(f"ls:{exit_layer}-{lead[0]}"), "", "")
    )
    for overlap in (False, True):
        name = "two processes, at once" if overlap else "two processes, in turn"
        with TwoStages(
            model,
            exit_layer,
            devices=("cpu", "cpu"),
            dtype=dtype,
            exits=None,
            overlap=overlap,
            lead=lead,
            cores=([cores[0]], [cores[1]]),
        ) as staged:
            staged.generate(samples[0].ids, **{**options, "max_new_tokens": _WARM})
            runs: list[tuple[float, list[StagedStats]]] = []
            for _ in range(repeats):
                stats = [staged.generate(sample.ids, **options).stats for sample in samples]
                runs.append((len(samples) * (new - 1) / sum(one.seconds for one in stats), stats))
        speed, stats = sorted(runs, key=lambda run: run[0])[len(runs) // 2]
        predicted = _predicted(agrees, stats, lead, overlap)
        thrown = sum(one.thrown_away for one in stats) / (len(samples) * (new - 1))
        found.append((name, speed, f"{predicted:.1f} ({100 * (predicted / speed - 1):+.0f} %)", f"{thrown:.2f}"))
    plain = found[0][1]
    rows = tuple((name, f"{speed:.1f}", f"{speed / plain:.2f}x", told, thrown) for name, speed, told, thrown in found)
    columns = ("mode", "tokens/s", "times plain", "simulated", "thrown away per token")
    title = f"Exit layer {exit_layer}, verifications of {lead[0]} and up to {length} drafts under way"
    return Table(name="stages", title=title, columns=columns, rows=rows)


def _predicted(agrees: list[list[bool]], stats: list[StagedStats], lead: tuple[int, int], overlap: bool) -> float:
    """Tokens per second of the simulation, with the times that the stages really took."""
    draft = sum(one.draft_seconds for one in stats) / len(stats)
    verify = sum(one.verify_seconds for one in stats) / len(stats)
    handover = sum(one.handover_seconds for one in stats) / len(stats)
    timed = Stages(draft=draft, verify=(verify,), catch_up=0.0, handover=handover)
    if overlap:
        runs: list[StagedRun] = [with_overlap(text, timed, *lead) for text in agrees]
    else:
        runs = [with_overlap(text, timed, lead[0], 0) for text in agrees]
    return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)
