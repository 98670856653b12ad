"""`selfspec-bench context`: what a long text costs, beside reading its keys and values.

The generator keeps the last text (`prefix_cache`): the engine that comes to a context first reads it, and all others go on
from its keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
import typer
from transformers import PreTrainedTokenizerBase

from bench.commands.bench_options import ContextCommand
from bench.commands.session import loaded, measure_own
from bench.commands.sweep_command import parse_range
from bench.datasets import EncodedPrompt, load_prompts
from bench.engines.imposed import ImposedEngine
from bench.engines.own import SelfSpecEngine
from bench.models import open_tokenizer
from selfspec import SelfSpecGenerator
from selfspec.cli.console import one_line_errors
from selfspec.defaults import DEFAULT_POLICY, fixed_policy


def context(options: ContextCommand) -> None:
    with one_line_errors():
        wanted = parse_range(options.contexts, "--contexts")
        weights = loaded(options).with_kv_dtype(options.kv_dtype)
        most = weights.max_positions
        lengths = [length for length in wanted if length + options.max_new_tokens <= most]
        if not lengths:
            new = f"{options.max_new_tokens} new tokens"
            raise ValueError(f"the model has {most} positions: no context of {options.contexts} leaves room for {new}")
        for left_out in wanted[len(lengths) :]:
            typer.echo(f"{left_out} tokens of context: beyond the model's {most} positions", err=True)
        tokenizer = open_tokenizer(options.model)
        prompts = [long_prompt(tokenizer, length) for length in lengths]
        generator = SelfSpecGenerator(weights, prefix_cache=1)  # byte: it keeps one text
        wanted_policies = options.policy or [fixed_policy(options.model, weights.num_layers), DEFAULT_POLICY]
        policies, shares = [*dict.fromkeys(["ar", *wanted_policies])], options.agreement or []
        plain: dict[bytes, list[int]] = {}
        warmed = [SelfSpecEngine(generator, name) for name in policies]
        drafting = [ImposedEngine(generator, name, share, plain) for share in shares for name in policies[1:]]
        engines = [warmed[0], *(drafting or warmed[1:])]
        for engine in warmed:  # warmed up on another text, or no timed run would read the first context
            engine.generate(prompts[0].ids[:8].flip(0), options.max_new_tokens)
        asked: dict[str, Any] = {"policies": policies, "agreements": shares, "loop_layers": weights.loop_layers}
        asked["weights"], asked["kv_dtype"] = options.dtype, str(weights.kv_dtype).removeprefix("torch.")
        measure_own("context", options, generator, engines, prompts, warmups=0, **asked)


def long_prompt(tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> EncodedPrompt:
    """Repeat the shipped prompts, and keep the last `num_tokens` tokens, so that each length begins differently."""
    text = "\n\n".join(prompt.prompt for prompt in load_prompts())
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.long)
    repeated = ids.repeat(-(-num_tokens // ids.numel()))[-num_tokens:]
    return EncodedPrompt(id=f"context-{num_tokens}", task=str(num_tokens), ids=repeated)
