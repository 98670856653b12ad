"""`selfspec-bench run`: policies over tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from bench.commands import bench_options as options
from bench.commands.session import header, measure, recording, show, write_engines
from bench.datasets import COPYING, Prompt, encode_prompts, group_by_task, load_prompts, shipped_names
from bench.engines.own import SelfSpecEngine
from bench.machine import WeightBytes, measure_bandwidth
from bench.models import open_model, open_tokenizer
from bench.provenance import provenance
from policies import LayerCost, Policy, parse_policy
from selfspec import SelfSpecGenerator
from selfspec.cli.console import one_line_errors

DEFAULT_POLICIES = ("auto", "auto:cost=layers", "del", "del:on_stop=keep", "del+spide")


def run(
    model: options.ModelOption = options.DEMO,
    policy: Annotated[
        list[str] | None, typer.Option(help=f"Policy to run; repeatable. Default: {', '.join(DEFAULT_POLICIES)}.")
    ] = None,
    kept: options.KeptOption = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help=f"File of prompts, .jsonl[.gz], or shipped ones by name: {', '.join(shipped_names())}; repeatable. "
            f"Default: the shipped ones but {COPYING}."
        ),
    ] = None,
    task: Annotated[list[str] | None, typer.Option(help="Task of the prompts; repeatable. Default: all tasks.")] = None,
    num_samples: Annotated[int, typer.Option(min=1, help="Number of prompts of each task.")] = 2,
    prompt_tokens: options.PromptTokensOption = 320,
    max_new_tokens: options.NewTokensOption = 128,
    repeats: options.RepeatsOption = 2,
    do_sample: Annotated[
        bool,
        typer.Option(
            "--do-sample", help="Sample instead of decoding greedily; every repeat of a prompt has another seed."
        ),
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature, with --do-sample (default 1).")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Top-p, with --do-sample (default 1: all tokens).")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Top-k, with --do-sample (default 0: all tokens).")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Random seed of the first repeat, with --do-sample (default 0).")
    ] = None,
    warmups: options.WarmupsOption = 1,
    dtype: options.DtypeOption = "auto",
    device: options.DeviceOption = "auto",
    runner: Annotated[
        str, typer.Option(help="eager, graphs (on CUDA), or auto: graphs on CUDA where they can be, else eager.")
    ] = "auto",
    output: options.OutputOption = None,
) -> None:
    """Measure policies over tasks: speed and rounds, with plain decoding in the same run.

    Ends with status 1 if an output differs by more than a near-tie.
    """
    with one_line_errors():
        sampling = sampling_of(do_sample, {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed})
        names = ["ar", *(policy or DEFAULT_POLICIES)]
        chosen = choose_prompts(prompts or [], task or [], num_samples)
        samples = encode_prompts(chosen, open_tokenizer(model), prompt_tokens)
        weights = open_model(model, dtype, device)
        generator = SelfSpecGenerator(weights, runner=cast(Any, runner), prefix_cache=0)
        num_layers = weights.num_layers
        parse = partial(
            parse_policy,
            num_layers=num_layers,
            measure=lambda: LayerCost(num_layers),
            preverifier=generator.load_preverifier,
        )
        for name in names:  # mistakes end the command before anything is measured
            parse(name)
        lasting = kept_policies(kept or [], names, parse)
        engines = [SelfSpecEngine(generator, name, sampling=sampling) for name in dict.fromkeys(names)]
        engines += [SelfSpecEngine(generator, name, kept=True, sampling=sampling) for name in lasting]
        asked = {
            "warmups": warmups,
            "prompt_tokens": prompt_tokens,
            "engines": [engine.name for engine in engines],
            "runner": generator.runner,
            "num_layers": num_layers,
            "policies": names,
            **(sampling or {"do_sample": False}),
        }
        where = provenance(weights.device, weights.dtype)
        first = header("run", where, model, samples, max_new_tokens, repeats, **asked)
    with recording(output, first) as record:
        write_engines(record, engines)
        limits = WeightBytes.of(weights).as_line()
        record.once("limits", lambda: {"bytes_per_second": measure_bandwidth(weights.device), **limits})
        measure(record, engines, samples)
    show(record.lines)


def sampling_of(do_sample: bool, asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments that make `generate` sample, None for greedy decoding.

    Raises ValueError for an option that would do nothing, or that is out of its range.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    if given and not do_sample:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(f"{flags} has no effect on greedy decoding: add --do-sample, or leave it out")
    if not do_sample:
        return None
    sampling = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 0, **given}
    if not sampling["temperature"] > 0:
        raise ValueError(f"--temperature must be above 0, got {sampling['temperature']}")
    if not 0 < sampling["top_p"] <= 1:
        raise ValueError(f"--top-p must be in (0, 1], got {sampling['top_p']}")
    return sampling


def choose_prompts(files: Sequence[Path], tasks: Sequence[str], num_samples: int) -> list[Prompt]:
    """Choose the first `num_samples` prompts of every task, from the files or the shipped ones.

    Raises ValueError for an unknown task, or when two files share an id.
    """
    more = [Path(COPYING)] if COPYING in tasks else []
    chosen: Sequence[Path | None] = files or [None, *more]
    found = [prompt for path in chosen for prompt in load_prompts(path)]
    if len({prompt.id for prompt in found}) < len(found):
        raise ValueError("prompts of different files must have different ids")
    by_task = group_by_task(found)
    missing = [name for name in tasks if name not in by_task]
    if missing:
        raise ValueError(f"no prompts of task {', '.join(missing)}; there are {', '.join(by_task)}")
    return [prompt for name in tasks or by_task for prompt in by_task[name][:num_samples]]


def kept_policies(asked: Sequence[str], names: Sequence[str], parse: Callable[[str], Policy]) -> list[str]:
    """Return the policies to run a second time with what they have learned: the named ones; "all": all that learn.

    Raises ValueError for one that learns nothing, or keeps nothing of it from prompt to prompt.
    """
    chosen: list[str] = []
    for name in asked:
        if name == "all":
            chosen += [known for known in names if parse(known).learns]
        elif parse(name).learns:
            chosen.append(name)
        else:
            raise ValueError(f"--kept {name}: this policy learns nothing that it could keep from prompt to prompt")
    return list(dict.fromkeys(chosen))
