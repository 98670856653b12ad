"""`python -m bench.experiments draws`: what a sampled token costs besides its logits, by operators and by our kernels."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Annotated

import torch
import typer
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from bench.commands.bench_options import OutputOption, RepeatsOption
from bench.commands.preparation import progress, recording, show
from bench.provenance import provenance
from bench.record import RecordWriter
from bench.sweep import parse_range
from layerskip_models.kernels.check import native_works
from layerskip_models.kernels.threads import OneTeam
from selfspec.cli.notes import one_line_errors
from selfspec.engine.sampling import Sampler, distribution

SETTINGS = {
    "temperature .6": LogitsProcessorList([TemperatureLogitsWarper(0.6)]),
    "and top-k of 50": LogitsProcessorList([TemperatureLogitsWarper(0.6), TopKLogitsWarper(50)]),
    "and top-p of .9": LogitsProcessorList([TemperatureLogitsWarper(0.6), TopPLogitsWarper(0.9)]),
}
_SPREAD = 3.0  # standard deviation of the logits


def draws(
    vocabulary: Annotated[str, typer.Option(help="Sizes of vocabularies, with commas.")] = "4096,49152,128256",
    repeats: RepeatsOption = 200,
    output: OutputOption = None,
) -> None:
    """Time one row's way from logits to a token: transformers' warpers, softmax and multinomial, and our kernels, in turn.

    Operators have one thread, as in the engine, where a team of their own would wait for threads that are not running.
    """
    with one_line_errors():
        sizes = parse_range(vocabulary, "--vocabulary")
        if not native_works(torch.device("cpu"), torch.float32):
            raise ValueError("our own kernels are measured, and cannot be used here")
    with recording(RecordWriter(output)) as record, progress(len(sizes) * len(SETTINGS)) as advance:
        record.write(
            {
                "kind": "run",
                "command": "draws",
                "configuration": {
                    "model": "no weights",
                    "weights_digest": "none",
                    "prompts_digest": "no prompts",
                    "repeats": repeats,
                },
                "engines": {},
                "provenance": provenance(torch.device("cpu"), torch.float32),
            }
        )
        for size in sizes:
            for name, processors in SETTINGS.items():
                for way, seconds in _in_turn(size, processors, repeats).items():
                    record.write({"kind": "draw", "vocabulary": size, "setting": name, "way": way, "seconds": seconds})
                advance(f"{size} tokens")
    show(record.lines)


@torch.inference_mode()
def _in_turn(size: int, processors: LogitsProcessorList, repeats: int) -> dict[str, list[float]]:
    generator = torch.Generator().manual_seed(0)
    sampler = Sampler(processors, generator, native=True)
    logits, text = torch.randn(1, size, generator=generator) * _SPREAD, torch.zeros(1, 1, dtype=torch.long)
    out = torch.empty_like(logits)

    def by_operators() -> int:
        return int(torch.multinomial(distribution(sampler.process(logits, text, 1))[0], 1, generator=generator))

    def by_kernels() -> int:
        return sampler.sample(logits, text, 1, out, "here")

    ways: dict[str, Callable[[], int]] = {"operators": by_operators, "kernels": by_kernels}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    with OneTeam():  # as the engine runs its operators
        for _ in range(1 + repeats):
            for way, draw in ways.items():
                started = perf_counter()
                draw()
                seconds[way].append(perf_counter() - started)
    return {way: found[1:] for way, found in seconds.items()}  # the first is a warm-up
