"""`selfspec-bench peers`: selfspec and other engines on one model, each in a process of its own."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bench.commands import bench_options as options
from bench.commands.session import encoded, header, measure, recording, show, started, write_engines
from bench.datasets import chat_prompts, load_prompts
from bench.engines.catalogue import Work, engines_beside, loaders, makers
from bench.engines.own import EngineLostError
from bench.models import file_of, num_layers_of, open_tokenizer
from bench.record import Record
from policies import LayerCost, parse_policy
from selfspec.cli.console import one_line_errors
from selfspec.defaults import DEFAULT_POLICY, fixed_policy, fixed_setting


def peers(
    model: options.ModelOption = options.DEMO,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Policy beside plain decoding; repeatable. Default: the best known fixed setting, and auto."),
    ] = None,
    kept: Annotated[
        list[str] | None,
        typer.Option(help="Policy to run without forgetting between prompts, as in ordinary use; repeatable."),
    ] = None,
    engine: options.EngineOption = None,
    prompts: options.PromptsOption = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Prompts are messages of a user, in the model's chat template; those that are too long are left out. "
            "Answers end where the model ends them.",
        ),
    ] = False,
    num_samples: options.NumSamplesOption = 4,
    prompt_tokens: options.PromptTokensOption = 320,
    max_new_tokens: options.NewTokensOption = 128,
    repeats: options.RepeatsOption = 3,
    warmups: options.WarmupsOption = 1,
    loads: Annotated[
        int,
        typer.Option(min=0, help="Also load each engine this often, in a new process each time. Needs a GGUF file."),
    ] = 0,
    dtype: options.DtypeOption = "auto",
    peer_timeout: options.PeerTimeoutOption = 600,
    device: options.DeviceOption = "auto",
    output: options.OutputOption = None,
) -> None:
    """Measure selfspec beside transformers' generate and assistant_early_exit, llama.cpp, ik_llama.cpp and OpenVINO GenAI.

    All run the same model in turn, greedily, each in a process of its own that holds the weights itself, once more for each
    KIND. One that crashes or hangs is left out with a message, and the others go on. Outputs are compared with those of
    selfspec without speculation. Ends with status 1 if one differs by more than a near-tie. Weights rounded to fewer bits are
    another model: their outputs are compared, but a difference is no fault.
    """
    with one_line_errors():
        file = file_of(model)
        model = str(file or model)
        if loads and file is None:
            raise ValueError("--loads needs a GGUF file as --model, which all engines read as it is")
        num_layers = num_layers_of(model)
        policies = policy or [*([] if file else [fixed_policy(model, num_layers)]), DEFAULT_POLICY]
        for name in (*policies, *(kept or [])):
            if "pacer" not in name:  # which needs the loaded model
                parse_policy(name, num_layers=num_layers, measure=lambda: LayerCost(num_layers))
        tokenizer = open_tokenizer(model)
        if chat:
            samples = chat_prompts(load_prompts(prompts), tokenizer, prompt_tokens, num_samples)
        else:
            samples = encoded(prompts, num_samples, tokenizer, prompt_tokens)
        work = Work(
            checkpoint=model,
            file=file,
            dtype=dtype,
            device=device,
            policies=["ar", *dict.fromkeys(policies)],
            kept=kept or [],
            setting=_early_exit_setting(policies, model, num_layers),
            max_tokens=max(sample.ids.numel() for sample in samples) + max_new_tokens,
        )
        asked = engines_beside(engine, file)
        with started(makers(asked, work), peer_timeout) as (engines, where, missing):
            if chat:
                lengths = [engines[0].answer_length(sample.ids, max_new_tokens) for sample in samples]
                # At least 2 tokens: decoding takes time.
                samples = [replace(one, answer_tokens=max(size, 2)) for one, size in zip(samples, lengths)]
            said = {
                "warmups": warmups,
                "policies": work.policies,
                "kept": work.kept,
                "engines": [Path(name).name for name in asked],
                "chat": chat,
                "num_layers": num_layers,
            }
            first = header("peers", where, model, samples, max_new_tokens, repeats, **said)
            with recording(output, first) as record:
                write_engines(record, engines, missing)
                if loads:
                    _measure_loading(record, asked, work, loads, peer_timeout)
                measure(record, engines, samples)
    show(record.lines)


def _measure_loading(record: Record, asked: list[str], work: Work, loads: int, timeout: float) -> None:
    """Write how each engine loads; one that does not is left out, and `started` has said why."""
    tokenizer = open_tokenizer(work.checkpoint)
    prompt = str(tokenizer.decode(encoded(None, 1, tokenizer, work.max_tokens // 2)[0].ids))
    timed = loaders(asked, work, prompt, timeout)
    for repeat in range(loads):
        for name, load in timed.items():
            with suppress(EngineLostError):
                record.once("loading", load, name=name, repeat=repeat)


def _early_exit_setting(policies: list[str], checkpoint: str, num_layers: int) -> tuple[int, int]:
    """Return exit layer and length for transformers' early exit: of the first fixed policy, else the best known ones."""
    fixed = (re.fullmatch(r"ls:(\d+)-([1-9]\d*)", name) for name in policies)
    return next(((int(one[1]), int(one[2])) for one in fixed if one), fixed_setting(checkpoint, num_layers))
