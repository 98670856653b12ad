"""`python -m bench.experiments roundings`: how many drafts in 4 bits would be accepted if rounded in other ways."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from transformers import PreTrainedModel

from bench.commands.bench_options import OutputOption
from bench.commands.preparation import load_network, model_name, open_tokenizer, progress, recording, show
from bench.experiments.fewer_bits.roundings import Inputs, Rounding, roundings
from bench.provenance import provenance
from bench.record import RecordWriter
from layerskip_models.linear import EIGHT_BIT_LAYERS
from selfspec import SelfSpecGenerator
from selfspec.cli.arguments import one_line_errors

Text = tuple[Tensor, int]
"""Tokens, int64 [n], and how many of them are the prompt's."""


def compare_roundings(
    model: Annotated[str, typer.Argument(help="Model, as transformers runs it in float32.")],
    prompts: Annotated[Path, typer.Option(help='Prompts, .jsonl with "prompt".')],
    group: Annotated[
        list[int] | None, typer.Option(help="Inputs that share a scale; repeatable. Default: 32, 64.")
    ] = None,
    num_samples: Annotated[int, typer.Option(min=2, help="Prompts. Half are for judging.")] = 50,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Last tokens of a prompt that are kept.")] = 256,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of a text.")] = 64,
    chat: Annotated[bool, typer.Option(help="Ask by the model's chat template.")] = True,
    output: OutputOption = None,
) -> None:
    """Round the layers of a model in several ways, and count where its likeliest token stays, on its own greedy texts.

    The first layer and the head stay as they are. Half of the texts are what the ways that look at inputs may look at, the
    other half are judged.
    """
    with one_line_errors():
        network, tokenizer = load_network(model, "float32", "cpu").eval(), open_tokenizer(model)
        lines = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()[:num_samples]]
        asked = [str(line["prompt"]) for line in lines]
        generator = SelfSpecGenerator(network, tokenizer)
        ways = {name: way for size in group or (32, 64) for name, way in roundings(size)}
        configuration = {
            "model": model_name(model),
            "weights_digest": None,
            "prompts_digest": sha256(json.dumps(asked).encode()).hexdigest()[:12],
            "prompts": len(asked),
            "max_new_tokens": max_new_tokens,
            "repeats": 1,
        }
        with progress(len(asked) + len(ways)) as advance, recording(RecordWriter(output)) as record:
            record.write(
                {
                    "kind": "run",
                    "command": "roundings",
                    "configuration": configuration,
                    "provenance": provenance(torch.device("cpu"), torch.float32),
                }
            )
            texts = [_text(generator, one, chat, prompt_tokens, max_new_tokens, advance) for one in asked]
            for line in _lines(network, texts[::2], texts[1::2], ways, advance):
                record.write(line)
    show(record.lines)


def _text(
    generator: SelfSpecGenerator,
    prompt: str,
    chat: bool,
    prompt_tokens: int,
    max_new_tokens: int,
    advance: Callable[[str], None],
) -> Text:
    """The model's own greedy continuation, or answer."""
    assert generator.tokenizer is not None
    ids = generator.tokenizer(prompt)["input_ids"][-prompt_tokens:]
    if chat:
        messages = [{"role": "user", "content": generator.tokenizer.decode(ids, skip_special_tokens=True)}]
        result = generator.generate(messages=messages, max_new_tokens=max_new_tokens)
    else:
        result = generator.generate(ids, max_new_tokens=max_new_tokens)
    advance("texts")
    return result.sequences[0], result.stats.num_prompt_tokens


def _lines(
    network: PreTrainedModel,
    learned: Sequence[Text],
    judged: Sequence[Text],
    ways: dict[str, Rounding],
    advance: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    linears = {
        f"{index}.{name}": module
        for index, layer in enumerate(network.model.layers)
        if index >= EIGHT_BIT_LAYERS
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    }
    inputs = _inputs(network, linears, learned)
    own = {name: linear.weight.data for name, linear in linears.items()}
    for way, rounding in ways.items():
        for name, linear in linears.items():
            linear.weight.data = rounding(own[name], inputs[name])
        equal, tokens = _agreement(network, judged)
        yield {"kind": "rounding", "way": way, "equal": equal, "tokens": tokens}
        advance(way)
    for name, linear in linears.items():
        linear.weight.data = own[name]


@torch.no_grad()
def _inputs(network: PreTrainedModel, linears: dict[str, nn.Linear], texts: Sequence[Text]) -> dict[str, Inputs]:
    """What each matrix gets in these texts."""
    second: dict[str, Tensor] = {}
    sizes: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def add(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            x = given[0].flatten(0, -2)
            wide = x.double()
            second[name] = second.get(name, 0) + wide.T @ wide
            sizes[name] = sizes.get(name, 0) + x.abs().sum(dim=0)

        return add

    hooks = [linear.register_forward_pre_hook(watch(name)) for name, linear in linears.items()]
    for ids, _ in texts:
        network(ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    tokens = sum(len(ids) for ids, _ in texts)
    return {name: Inputs(second=second[name], size=sizes[name] / tokens) for name in linears}


@torch.no_grad()
def _agreement(network: PreTrainedModel, texts: Sequence[Text]) -> tuple[int, int]:
    """(Tokens of the texts that are the likeliest, tokens)."""
    equal = tokens = 0
    for ids, start in texts:
        likeliest = network(ids[None], use_cache=False).logits[0, start - 1 : -1].argmax(dim=-1)
        equal += int((likeliest == ids[start:]).sum())
        tokens += len(ids) - start
    return equal, tokens
