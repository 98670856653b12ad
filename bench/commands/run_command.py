"""`selfspec-bench run`: policies and engines over tasks."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.commands import bench_options as options
from bench.commands.preparation import (
    configuration,
    exit_if_outputs_differ,
    load_network,
    open_model,
    open_tokenizer,
    progress,
    recording,
    run_line,
    show,
    transformers_engines,
)
from bench.datasets import COPYING, Prompt, encode_prompts, group_by_task, load_prompts, shipped_names
from bench.engines.own import Sampling, SelfSpecEngine, TimedEngine
from bench.hub_tasks import HUB_TASKS, load_hub_task
from bench.provenance import provenance
from bench.record import BEST_FIXED, BEST_FIXED_LABEL, RecordWriter, read_part
from bench.run import Run, resumable
from bench.scoring import Scorer
from layerskip_models import DEMO_PATH, from_transformers
from policies import LayerCost, Policy, parse_policy
from selfspec import SelfSpecGenerator
from selfspec.cli.console import one_line_errors
from selfspec.defaults import fixed_setting
from selfspec.engine.request import end_tokens

DEFAULT_POLICIES = ("auto", "auto:cost=layers", "del", "del:on_stop=keep", "del+spide")


def run(
    model: options.ModelOption = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help=f"Policy to run; repeatable. Default: {', '.join(DEFAULT_POLICIES)}."),
    ] = None,
    kept: options.KeptOption = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help=f"File of prompts, .jsonl[.gz], or shipped ones by name: {', '.join(shipped_names())}; repeatable. "
            f"Default: the shipped ones but {COPYING}."
        ),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="Task of the prompt files, or one of the papers' tasks from the hub; repeatable. Default: all tasks."
        ),
    ] = None,
    num_samples: options.TaskSamplesOption = 2,
    prompt_tokens: options.PromptTokensOption = 320,
    max_new_tokens: options.NewTokensOption = 128,
    repeats: options.RepeatsOption = 2,
    do_sample: options.DoSampleOption = False,
    temperature: options.TemperatureOption = None,
    top_p: options.TopPOption = None,
    top_k: options.TopKOption = None,
    seed: options.SeedOption = None,
    warmups: options.WarmupsOption = 1,
    peers: options.PeersOption = True,
    grid: Annotated[
        bool | None,
        typer.Option(
            "--grid/--no-grid",
            help="Replay all fixed settings, and run the best one of each task. Default: yes, unless sampling.",
        ),
    ] = None,
    dtype: options.DtypeOption = "auto",
    device: options.DeviceOption = "auto",
    runner: options.RunnerOption = "auto",
    output: options.OutputOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run to --output.")] = False,
) -> None:
    """Measure policies and engines over tasks: speed and rounds, with plain decoding in the same run.

    Ends with status 1 if an output differs by more than a near-tie.
    """
    with one_line_errors():
        checkpoint = str(model or DEMO_PATH)
        if resume and output is None:
            raise ValueError("--resume needs --output, the record that was being written")
        if resume and kept:
            raise ValueError("--resume cannot go on with --kept: what a policy had learned is not in the record")
        sampling = sampling_of(do_sample, {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed})
        if sampling is not None and grid:
            raise ValueError("--grid replays greedy texts: leave it out with --do-sample")
        grid = sampling is None if grid is None else grid
        names = ["ar", *(policy or DEFAULT_POLICIES)]
        chosen = choose_prompts(prompts or [], task or [], num_samples)
        tokenizer = open_tokenizer(checkpoint)
        samples = encode_prompts(chosen, tokenizer, prompt_tokens)
        network = load_network(checkpoint, dtype, device) if peers else None
        generator = SelfSpecGenerator(
            open_model(checkpoint, dtype, device) if network is None else from_transformers(network),
            runner=runner,  # type: ignore[arg-type]
            prefix_cache=0,
        )
        num_layers = generator.model.num_layers
        parse = partial(
            parse_policy,
            num_layers=num_layers,
            measure=lambda: LayerCost(num_layers),
            preverifier=generator.load_preverifier,
        )
        for name in names:  # mistakes end the command before anything is measured
            parse(name)
        lasting = kept_policies(kept or [], names, parse)
        engines: list[TimedEngine] = [
            SelfSpecEngine(generator, name, sampling=sampling) for name in dict.fromkeys(names)
        ]
        engines += [SelfSpecEngine(generator, name, kept=True, sampling=sampling) for name in lasting]
        if network is not None:
            engines += transformers_engines(network, *fixed_setting(checkpoint, num_layers), sampling)
        about = {
            **configuration(checkpoint, samples, max_new_tokens, repeats, warmups, sampling),
            "prompt_tokens": prompt_tokens,
            "runner": generator.runner,
            "num_layers": num_layers,
            "grid": grid,
        }
        where = provenance(generator.model.device, generator.model.dtype)
        description = run_line("run", about, engines, where)
        if grid:
            description["engines"][BEST_FIXED] = BEST_FIXED_LABEL
        previous = resumable(read_part(output) if resume and output is not None else [], description)
    with recording(RecordWriter(output, previous=previous), resume=None if kept else _resuming()) as record:
        measuring = Run(
            generator=generator,
            engines=engines,
            prompts=samples,
            record=record,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            warmups=warmups,
            grid=grid,
            sampled=sampling is not None,
            score=Scorer(tokenizer, end_tokens(generator.model.generation_config, tokenizer)),
        )
        cost = measuring.costs()
        measuring.limits()
        with progress(measuring.num_steps) as measuring.advance:
            measuring.replay(cost)
            measuring.measure()
    show(record.lines)
    exit_if_outputs_differ(record.lines)


def sampling_of(do_sample: bool, asked: Mapping[str, Any]) -> Sampling | None:
    """How to sample, None for greedy decoding. asked: by option. Raises ValueError for an option that would do nothing."""
    given = {name: value for name, value in asked.items() if value is not None}
    if given and not do_sample:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(f"{flags} has no effect on greedy decoding: add --do-sample, or leave it out")
    return Sampling(**given) if do_sample else None


def _resuming() -> str:
    """Return the command line that goes on with this one."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--resume"]
    return shlex.join(["selfspec-bench", *arguments, "--resume"])


def choose_prompts(files: Sequence[Path], tasks: Sequence[str], num_samples: int) -> list[Prompt]:
    """Choose the first `num_samples` prompts of every task: from the files or the shipped ones, or else from the hub.

    Raises ValueError for an unknown task, or when two files share an id.
    """
    if files:
        found = [prompt for path in files for prompt in load_prompts(path)]
    else:
        found = load_prompts() + (load_prompts(Path(COPYING)) if COPYING in tasks else [])
    if len({prompt.id for prompt in found}) < len(found):
        raise ValueError("prompts of different files must have different ids")
    by_task = group_by_task(found)
    missing = [name for name in tasks if name not in by_task and name not in HUB_TASKS]
    if missing:
        raise ValueError(
            f"no prompts of task {', '.join(missing)}; there are {', '.join(by_task)}; and on the hub {', '.join(HUB_TASKS)}"
        )
    chosen: list[Prompt] = []
    for name in tasks or by_task:
        chosen += by_task[name][:num_samples] if name in by_task else load_hub_task(name, num_samples)
    return chosen


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
