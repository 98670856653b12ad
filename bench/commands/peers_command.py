"""`selfspec-bench peers`: selfspec and other engines on one model, each in a process of its own."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from bench.commands.bench_options import PeersCommand
from bench.commands.session import encoded, header, measure, recording, show, started, write_engines
from bench.datasets import chat_prompts, load_prompts
from bench.engines.catalogue import Work, engines_beside, makers
from bench.models import file_of, num_layers_of, open_tokenizer
from policies import LayerCost, parse_policy
from selfspec.cli.console import one_line_errors
from selfspec.defaults import DEFAULT_POLICY, fixed_policy


def peers(options: PeersCommand) -> None:
    with one_line_errors():
        file = file_of(options.model)
        options = replace(options, model=str(file or options.model))
        num_layers = num_layers_of(options.model)
        policies = options.policy or [*([] if file else [fixed_policy(options.model, num_layers)]), DEFAULT_POLICY]
        for name in (*policies, *(options.warmed_up or [])):
            if "pacer" not in name:  # which needs the loaded model
                parse_policy(name, num_layers=num_layers, measure=lambda: LayerCost(num_layers))
        tokenizer = open_tokenizer(options.model)
        if options.chat:
            samples = chat_prompts(load_prompts(options.prompts), tokenizer, options.prompt_tokens, options.num_samples)
        else:
            samples = encoded(options.prompts, options.num_samples, tokenizer, options.prompt_tokens)
        work = Work(
            options=options,
            file=file,
            policies=["ar", *dict.fromkeys(policies)],
            warmed_up=options.warmed_up or [],
            setting=_early_exit_setting(policies),
            max_tokens=max(sample.ids.numel() for sample in samples) + options.max_new_tokens,
        )
        asked = engines_beside(options.engine, file)
        with started(makers(asked, work), options.peer_timeout) as (engines, where, missing):
            if options.chat:
                lengths = [engines[0].answer_length(sample.ids, options.max_new_tokens) for sample in samples]
                # At least 2 tokens: decoding takes time.
                samples = [replace(one, answer_tokens=max(size, 2)) for one, size in zip(samples, lengths)]
            said = {
                "warmups": options.warmups,
                "policies": work.policies,
                "warmed_up": work.warmed_up,
                "engines": [Path(name).name for name in asked],
                "chat": options.chat,
                "num_layers": num_layers,
                "rows": options.rows,
            }
            first = header("peers", where, options.model, samples, options.max_new_tokens, options.repeats, **said)
            with recording(options.output, first) as record:
                write_engines(record, engines, missing)
                measure(record, engines, samples)
    show(record.lines)


def _early_exit_setting(policies: list[str]) -> tuple[int, int] | None:
    """Return exit layer and length of the first fixed policy, with which transformers then exits early, too."""
    fixed = (re.fullmatch(r"ls:(\d+)-([1-9]\d*)", name) for name in policies)
    return next(((int(one[1]), int(one[2])) for one in fixed if one), None)
