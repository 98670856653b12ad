"""`selfspec-bench context`: what a long text costs, beside reading its keys and values.

A prompt is read once per context, timed; what decoding costs there is then measured with every policy on the same cache,
which its generator keeps between calls (`prefix_cache`): all but the last rows of the prompt are not read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import torch
import typer
from transformers import PreTrainedTokenizerBase

from bench.commands import bench_options as options
from bench.commands.roofline_command import best_fixed
from bench.commands.session import configuration, header, progress, recording, show
from bench.commands.sweep_command import parse_range
from bench.datasets import EncodedPrompt, load_prompts
from bench.engines.own import GREEDY, run_afresh
from bench.machine import WeightBytes, calibrated, measure_bandwidth
from bench.measure import in_turn
from bench.models import open_model, open_tokenizer
from bench.provenance import provenance
from bench.record import Line, Record
from layerskip_models import DEMO_PATH, LayerSkipModel
from selfspec import SelfSpecGenerator
from selfspec.cli.console import one_line_errors


def context(
    model: options.ModelOption = None,
    contexts: Annotated[
        str, typer.Option(help="Prompt lengths in tokens, for example 128,1024.")
    ] = "128,1024,4096,16384",
    max_new_tokens: options.NewTokensOption = 64,
    repeats: options.RepeatsOption = 3,
    dtype: options.DtypeOption = "auto",
    kv_dtype: Annotated[
        str,
        typer.Option(help="What our engine keeps keys and values in: auto (the arithmetic's own) or bfloat16."),
    ] = "auto",
    device: options.DeviceOption = "auto",
    output: options.OutputOption = None,
) -> None:
    """Measure tokens/s and time to the first token at several lengths of the prompt; greedy.

    Contexts beyond the model's positions are left out. Contexts and policies take turns.
    """
    with one_line_errors():
        checkpoint = str(model or DEMO_PATH)
        wanted = parse_range(contexts, "--contexts")
        tokenizer = open_tokenizer(checkpoint)
        weights = open_model(checkpoint, dtype, device).with_kv_dtype(kv_dtype)
        lengths = usable_contexts(wanted, max_new_tokens, weights.max_positions)
        for left_out in sorted(set(wanted) - set(lengths)):
            typer.echo(f"{left_out} tokens of context: beyond the model's {weights.max_positions} positions", err=True)
        prompts = [long_prompt(tokenizer, length) for length in lengths]
        about = configuration(
            checkpoint,
            prompts,
            max_new_tokens,
            repeats,
            num_layers=weights.num_layers,
            kv_dtype=str(weights.kv_dtype).removeprefix("torch."),
        )
        first = header("context", about, provenance(weights.device, weights.dtype))
    with recording(output, first) as record:
        if not record.is_complete:
            _measure(record, weights, prompts, max_new_tokens, repeats)
    show(record.lines)


def _measure(
    record: Record,
    weights: LayerSkipModel,
    prompts: Sequence[EncodedPrompt],
    max_new_tokens: int,
    repeats: int,
) -> None:
    generator = SelfSpecGenerator(weights, prefix_cache=0)
    cost = calibrated(generator, record)
    generator.generate(prompts[0].ids, max_new_tokens=max_new_tokens, policy="ar", **GREEDY)  # warms up
    with progress(len(prompts) * (1 + 3 * repeats)) as advance:
        places = []
        for prompt in prompts:
            place = Context(SelfSpecGenerator(weights, prefix_cache=1), prompt, max_new_tokens)  # it keeps one text
            if record.find("prefill", context=place.size) is None:
                record.write("prefill", context=place.size, time_to_first_token=place.seconds)
                record.write(
                    "fixed", context=place.size, policy=best_fixed(place.generator, prompt, max_new_tokens, cost)
                )
            place.warm_up(record.find("fixed", context=place.size)["policy"])  # type: ignore[index]
            places.append(place)
            advance("prefill")
        kv_bytes = WeightBytes.of(weights).kv
        for repeat in range(repeats):
            if record.find("bandwidth", repeat=repeat) is None:
                speed = measure_bandwidth(weights.device)
                record.write("bandwidth", repeat=repeat, bytes_per_second=speed, kv_bytes=kv_bytes)
            for place in places:
                key = {"context": place.size, "repeat": repeat}
                for role in in_turn([*place.policies], repeat):
                    record.once("decode", partial(place.decode, role), **key, role=role)
                    advance(role)


def long_prompt(tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> EncodedPrompt:
    """Put the shipped prompts one after another, repeated as often as needed, and cut them to `num_tokens` tokens."""
    text = "\n\n".join(prompt.prompt for prompt in load_prompts())
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.long)
    repeated = ids.repeat(-(-num_tokens // ids.numel()))[:num_tokens]
    return EncodedPrompt(id=f"context-{num_tokens}", task="context", ids=repeated)


class Context:
    """One context, which its generator keeps, and what decodes after it.

    policies: by their role. seconds: to the first token, when the whole prompt was read.
    """

    def __init__(self, generator: SelfSpecGenerator, prompt: EncodedPrompt, max_new_tokens: int) -> None:
        self.generator, self.size = generator, prompt.ids.numel()
        self.policies: dict[str, str] = {}
        self._prompt, self._max_new_tokens = prompt, max_new_tokens
        first = generator.generate(prompt.ids, max_new_tokens=max_new_tokens, policy="ar", **GREEDY)
        self._tokens = first.new_tokens
        self.seconds = first.stats.time_to_first_token

    def warm_up(self, fixed: str) -> None:
        """Run every policy once. fixed: the setting that is best here by replay."""
        self.policies = {"plain": "ar", "best fixed": fixed, "auto": "auto"}
        for policy in self.policies.values():
            run_afresh(self.generator, policy, self._prompt.ids, self._max_new_tokens)

    def decode(self, role: str) -> Line:
        """Decode with one of the policies."""
        policy = self.policies[role]
        result = run_afresh(self.generator, policy, self._prompt.ids, self._max_new_tokens)
        stats = result.stats
        return {
            "policy": policy,
            "tokens": stats.num_new_tokens - 1,
            "seconds": stats.seconds - stats.time_to_first_token,
            "outputs_equal": result.new_tokens == self._tokens,
        }


def usable_contexts(contexts: Sequence[int], max_new_tokens: int, max_positions: int) -> list[int]:
    """Return those that leave room for the new tokens. Raises ValueError where none does."""
    usable = sorted({context for context in contexts if context + max_new_tokens <= max_positions})
    if not usable:
        raise ValueError(
            f"the model has {max_positions} positions: no context of {', '.join(map(str, contexts))} leaves room for "
            f"{max_new_tokens} new tokens"
        )
    return usable
