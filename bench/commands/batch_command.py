"""`selfspec-bench batch`: throughput with many texts in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from bench.commands.bench_options import BatchCommand
from bench.commands.session import encoded, header, progress, recording, show, started, write_engines
from bench.commands.sweep_command import parse_range
from bench.engines.catalogue import OPENVINO, Work, engines_beside, makers
from bench.engines.own import TimedEngine
from bench.measure import Survivors, in_turn, output_digest
from bench.models import file_of, open_tokenizer
from selfspec.cli.console import one_line_errors


def batch(options: BatchCommand) -> None:
    with one_line_errors():
        sizes = parse_range(options.texts, "--texts")
        file = file_of(options.model)
        options = replace(options, model=str(file or options.model))
        samples = encoded(options.prompts, max(sizes), open_tokenizer(options.model), options.prompt_tokens)
        work = Work(
            options=options,
            file=file,
            policies=options.policy or ["ar", "auto"],
            max_tokens=max(len(sample.ids) for sample in samples) + options.max_new_tokens,
        )
        asked = engines_beside(options.engine, file)
        made = makers(asked, work)
        has_openvino = any(name.startswith(OPENVINO) for name in made)
        shortest = min(len(sample.ids) for sample in samples) if has_openvino else 0
        ids = [sample.ids[-shortest:] for sample in samples]
        while len(ids) < max(sizes):  # the same prompts once more, each with its last token in front
            ids.append(ids[len(ids) - len(samples)].roll(1))
        with started(made, options.peer_timeout) as (engines, where, missing):
            names = [Path(name).name for name in asked]
            said = {"texts": sizes, "policies": work.policies, "engines": names, "rows": options.rows}
            first = header("batch", where, options.model, samples, options.max_new_tokens, options.repeats, **said)
            with recording(options.output, first) as record:
                write_engines(record, engines, missing)
                survivors = Survivors(engines[0], record)
                for one in [] if record.is_complete else engines:  # calibrates and warms up
                    survivors.call(one, partial(one.run, ids[:2], min(options.max_new_tokens, 16)))
                with progress(len(engines) * len(sizes) * options.repeats) as advance:
                    for repeat in range(options.repeats):
                        for size in sizes:
                            for one in in_turn(engines, repeat):
                                advance(f"{one.label}, {size} texts")
                                key = {"engine": one.name, "texts": size, "repeat": repeat}
                                measured = partial(measured_texts, one, ids[:size], options.max_new_tokens)
                                survivors.call(one, partial(record.once, "batch", measured, **key))
    show(record.lines)


def measured_texts(engine: TimedEngine, prompts: Sequence[Tensor], max_new_tokens: int) -> dict[str, Any]:
    """Measure several texts continued together."""
    run = engine.run(prompts, max_new_tokens)
    decoding = {"decode_tokens": run.decode_tokens, "decode_seconds": run.decode_seconds}
    whole = {"tokens": sum(map(len, run.tokens)), "seconds": run.seconds, "output": output_digest(run.tokens)}
    return {**whole, **decoding}
