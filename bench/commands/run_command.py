"""`selfspec-bench run`: policies over tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from bench.commands.bench_options import DEFAULT_POLICIES, RunCommand
from bench.commands.cold_run import run_cold
from bench.commands.session import loaded, measure_own
from bench.datasets import COPYING, Prompt, encode_prompts, group_by_task, load_prompts
from bench.engines.own import SelfSpecEngine
from bench.models import open_tokenizer
from policies import LayerCost, Policy, parse_policy
from selfspec import SelfSpecGenerator
from selfspec.cli.console import one_line_errors


def run(options: RunCommand) -> None:
    with one_line_errors():
        sampled = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k", "seed")}
        sampling = sampling_of(options.do_sample, sampled)
        names = ["ar", *(options.policy or (("auto",) if options.cold else DEFAULT_POLICIES))]
        chosen = choose_prompts(options.prompts or [], options.task or [], options.num_samples)
        samples = encode_prompts(chosen, open_tokenizer(options.model), options.prompt_tokens)
        if options.cold:
            if options.warmed_up:
                raise ValueError("--warmed-up has no effect with --cold, where policies keep what they learn anyway")
            run_cold(options, [*dict.fromkeys(names)], samples, sampling)
            return
        generator = SelfSpecGenerator(loaded(options), runner=cast(Any, options.runner), prefix_cache=0)
        num_layers = generator.model.num_layers
        load = generator.load_preverifier
        parse = partial(parse_policy, num_layers=num_layers, measure=lambda: LayerCost(num_layers), preverifier=load)
        for name in names:  # mistakes end the command before anything is measured
            parse(name)
        lasting = warmed_up_policies(options.warmed_up or [], names, parse)
        engines = [SelfSpecEngine(generator, name, sampling=sampling) for name in dict.fromkeys(names)]
        engines += [SelfSpecEngine(generator, name, warmed_up=True, sampling=sampling) for name in lasting]
        asked = {"warmups": options.warmups, "prompt_tokens": options.prompt_tokens, "policies": names}
        measure_own("run", options, generator, engines, samples, **asked, **(sampling or {"do_sample": False}))


def sampling_of(do_sample: bool, asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments that make `generate` sample, None for greedy. Raises ValueError for a wrong one."""
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
    """Choose the first prompts of every task. Raises ValueError for an unknown task, or when two files share an id."""
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


def warmed_up_policies(asked: Sequence[str], names: Sequence[str], parse: Callable[[str], Policy]) -> list[str]:
    """Return the policies to run a second time with what they have learned. Raises ValueError for one that keeps nothing."""
    chosen: list[str] = []
    for name in asked:
        if name == "all":
            chosen += [known for known in names if parse(known).learns]
        elif parse(name).learns:
            chosen.append(name)
        else:
            raise ValueError(f"--warmed-up {name}: this policy learns nothing that it could keep from prompt to prompt")
    return list(dict.fromkeys(chosen))
