"""`selfspec-bench context`: what a long text costs, beside reading its keys and values.

A prompt is read once per context, timed; what decoding costs there is then measured with every policy on the same cache,
which its generator keeps between calls (`prefix_cache`): all but the last rows of the prompt are not read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import typer
from transformers import PreTrainedTokenizerBase

from bench.calibration import calibrated
from bench.commands.bench_options import ContextCommand
from bench.commands.roofline_command import best_fixed
from bench.commands.session import header, loaded, progress, recording, show
from bench.commands.sweep_command import parse_range
from bench.datasets import EncodedPrompt, load_prompts
from bench.engines.own import run_afresh
from bench.machine import WeightBytes, measure_bandwidth
from bench.measure import in_turn
from bench.models import open_tokenizer
from bench.provenance import provenance
from bench.record import Line, Record
from layerskip_models import LayerSkipModel
from selfspec import SelfSpecGenerator
from selfspec.cli.console import one_line_errors


def context(options: ContextCommand) -> None:
    with one_line_errors():
        wanted = parse_range(options.contexts, "--contexts")
        tokenizer = open_tokenizer(options.model)
        weights = loaded(options).with_kv_dtype(options.kv_dtype)
        most = weights.max_positions
        lengths = [length for length in wanted if length + options.max_new_tokens <= most]
        if not lengths:
            new = f"{options.max_new_tokens} new tokens"
            raise ValueError(f"the model has {most} positions: no context of {options.contexts} leaves room for {new}")
        for left_out in wanted[len(lengths) :]:
            typer.echo(f"{left_out} tokens of context: beyond the model's {most} positions", err=True)
        prompts = [long_prompt(tokenizer, length) for length in lengths]
        where = provenance(weights.device, weights.dtype)
        asked = {"num_layers": weights.num_layers, "kv_dtype": str(weights.kv_dtype).removeprefix("torch.")}
        first = header("context", where, options.model, prompts, options.max_new_tokens, options.repeats, **asked)
    with recording(options.output, first) as record:
        if not record.is_complete:
            _measure(record, weights, prompts, options.max_new_tokens, options.repeats)
    show(record.lines)


def _measure(
    record: Record, weights: LayerSkipModel, prompts: Sequence[EncodedPrompt], max_new_tokens: int, repeats: int
) -> None:
    generator = SelfSpecGenerator(weights, prefix_cache=0)
    cost = calibrated(generator, record)
    run_afresh(generator, "ar", prompts[0].ids, max_new_tokens)  # warms up
    with progress(len(prompts) * (1 + 3 * repeats)) as advance:
        places = []
        for prompt in prompts:
            place = _Place(weights, prompt, max_new_tokens)
            record.once("prefill", lambda: {"time_to_first_token": place.seconds}, context=place.size)  # noqa: B023
            find = partial(best_fixed, place.generator, prompt, max_new_tokens, cost)
            fixed = record.once("fixed", lambda: {"policy": find()}, context=place.size)  # noqa: B023
            place.warm_up(fixed["policy"])
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


class _Place:
    """One context, kept by its generator, and what decodes after it: policies by role. seconds: to the first token."""

    def __init__(self, weights: LayerSkipModel, prompt: EncodedPrompt, max_new_tokens: int) -> None:
        self.generator, self.size = SelfSpecGenerator(weights, prefix_cache=1), prompt.ids.numel()  # it keeps one text
        self.policies: dict[str, str] = {}
        self._run = partial(run_afresh, self.generator, prompt=prompt.ids, max_new_tokens=max_new_tokens)
        first = self._run(policy="ar")
        self._tokens, self.seconds = first.new_tokens, first.stats.time_to_first_token

    def warm_up(self, fixed: str) -> None:
        """Run every policy once. fixed: the setting that is best here by replay."""
        self.policies = {"plain": "ar", "best fixed": fixed, "auto": "auto"}
        for policy in self.policies.values():
            self._run(policy=policy)

    def decode(self, role: str) -> Line:
        """Decode with one of the policies."""
        result = self._run(policy=self.policies[role])
        equal, seconds = result.new_tokens == self._tokens, result.stats.seconds - result.stats.time_to_first_token
        counted = {"tokens": result.stats.num_new_tokens - 1, "seconds": seconds}
        return {"policy": self.policies[role], **counted, "outputs_equal": equal}
