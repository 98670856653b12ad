"""`selfspec-bench batch`: throughput with many texts in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import Tensor

from bench.commands import bench_options as options
from bench.commands.session import encoded, header, progress, recording, show, started, write_engines
from bench.commands.sweep_command import parse_range
from bench.engines.catalogue import OPENVINO, Work, engines_beside, makers
from bench.engines.own import TimedEngine
from bench.measure import Survivors, in_turn, output_digest
from bench.models import file_of, open_tokenizer
from selfspec.cli.console import one_line_errors


def batch(
    model: options.ModelOption = options.DEMO,
    prompts: options.PromptsOption = None,
    prompt_tokens: options.PromptTokensOption = 64,
    max_new_tokens: options.NewTokensOption = 64,
    texts: Annotated[str, typer.Option(help="Texts decoded together, as in 1,2,4.")] = "1,2,4,8,16",
    policy: Annotated[list[str] | None, typer.Option(help="Policies, repeatable. Default: ar and auto.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each engine at each number of texts.")] = 3,
    engine: options.EngineOption = None,
    peer_timeout: options.PeerTimeoutOption = 600,
    dtype: options.DtypeOption = "auto",
    device: options.DeviceOption = "auto",
    output: options.OutputOption = None,
) -> None:
    """Measure throughput over the number of texts that share the passes, greedy; engines in turn.

    Every engine runs in a process of its own and holds the weights itself. One that crashes or hangs is left out with a
    message, and the others go on. For OpenVINO GenAI all texts are cut to the length of the shortest.
    """
    with one_line_errors():
        sizes = parse_range(texts, "--texts")
        samples = encoded(prompts, max(sizes), open_tokenizer(model), prompt_tokens)
        file = file_of(model)
        model = str(file or model)
        work = Work(
            checkpoint=model,
            file=file,
            dtype=dtype,
            device=device,
            policies=policy or ["ar", "auto"],
            max_tokens=max(len(sample.ids) for sample in samples) + max_new_tokens,
        )
        asked = engines_beside(engine, file)
        made = makers(asked, work)
        has_openvino = any(name.startswith(OPENVINO) for name in made)
        shortest = min(len(sample.ids) for sample in samples) if has_openvino else 0
        ids = [sample.ids[-shortest:] for sample in samples]
        while len(ids) < max(sizes):  # the same prompts once more, each with its last token in front
            ids.append(ids[len(ids) - len(samples)].roll(1))
        with started(made, peer_timeout) as (engines, where, missing):
            said = {"texts": sizes, "policies": work.policies, "engines": [Path(name).name for name in asked]}
            first = header("batch", where, model, samples, max_new_tokens, repeats, **said)
            with recording(output, first) as record:
                write_engines(record, engines, missing)
                survivors = Survivors(engines[0], record)
                for one in [] if record.is_complete else engines:  # calibrates and warms up
                    survivors.call(one, partial(one.run, ids[:2], min(max_new_tokens, 16)))
                with progress(len(engines) * len(sizes) * repeats) as advance:
                    for repeat in range(repeats):
                        for size in sizes:
                            for one in in_turn(engines, repeat):
                                advance(f"{one.label}, {size} texts")
                                key = {"engine": one.name, "texts": size, "repeat": repeat}
                                measured = partial(_measured, one, ids[:size], max_new_tokens)
                                survivors.call(one, partial(record.once, "batch", measured, **key))
    show(record.lines)


def _measured(engine: TimedEngine, prompts: Sequence[Tensor], max_new_tokens: int) -> dict[str, Any]:
    run = engine.run(prompts, max_new_tokens)
    return {
        "tokens": sum(map(len, run.tokens)),
        "seconds": run.seconds,
        "decode_tokens": run.decode_tokens,
        "decode_seconds": run.decode_seconds,
        "output": output_digest(run.tokens),
    }
