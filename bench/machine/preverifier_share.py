r"""Pacer's share of decoding: in bytes moved at a real shape, and in time with a random pre-verifier for any model.

    python -m bench.machine.preverifier_share --shape llama2-7B --exit-layer 8
    python -m bench.machine.preverifier_share --measure --model synthetic:llama2-7B --device cuda --dtype bfloat16 \
        --exit-layer 8

The measured rounds draft to their cap whatever the estimates say, since those of random weights mean nothing: every block but
the last is judged, the most that a pre-verifier can cost.
"""

from __future__ import annotations

from statistics import median
from typing import Annotated

import torch
import typer
from transformers import LlamaConfig

from bench.commands.preparation import open_model
from layerskip_models import DEMO_PATH
from layerskip_models.checkpoints.synthetic import SHAPES
from policies import FixedExit, PacerStopping, Policy
from selfspec import SelfSpecGenerator
from selfspec.cli.arguments import one_line_errors
from selfspec.pacer.inference import PreVerification
from selfspec.pacer.network import (
    PreVerifierConfig,
    PreVerifierModule,
    count_parameters,
    describe_layer,
    fingerprint,
    lean,
)

_CONTEXT, _NEW, _RUNS = 512, 96, 3


def share_of_bytes(shape: LlamaConfig, exit_layer: int, block: int, num_drafts: int, context: int) -> float:
    """Bytes that the pre-verifier's passes read over all that a round reads: weights, and keys and values of the context.

    A round of num_drafts, every whole block judged: num_drafts * E + L layers, a head per draft and one for verification.
    """
    own = count_parameters(
        PreVerifierConfig(base_model="", fingerprint=(), exit_layers=(exit_layer,), layer=describe_layer(shape))
    )
    hidden, heads, kv_heads = shape.hidden_size, shape.num_attention_heads, shape.num_key_value_heads
    kv = 2 * kv_heads * (getattr(shape, "head_dim", None) or hidden // heads) * context
    layer = hidden * hidden * (2 + 2 * kv_heads / heads) + 3 * hidden * shape.intermediate_size
    passes = num_drafts // block * (own + kv)
    layers = (num_drafts * exit_layer + shape.num_hidden_layers) * (layer + kv)
    return passes / (passes + layers + (num_drafts + 1) * hidden * shape.vocab_size)


def share_of_time(generator: SelfSpecGenerator, exit_layer: int, block: int, num_drafts: int) -> float:
    """Median over a few runs of preverify_seconds over the rounds' time, after one to warm up."""
    model = generator.model
    config = PreVerifierConfig(
        base_model="random",
        fingerprint=fingerprint(model),
        exit_layers=(exit_layer,),
        layer=describe_layer(model.config),
    )
    network = PreVerification(lean(PreVerifierModule(config), model.dtype, model.device))
    stopping = PacerStopping(network, b=block, t=1e-9, rho=1.0, max_length=num_drafts)
    policy = Policy(FixedExit(exit_layer, num_drafts, num_layers=model.num_layers), stopping)
    prompt = torch.arange(_CONTEXT) * 7919 % model.vocab_size
    shares = []
    for _ in range(_RUNS + 1):
        stats = generator.generate(prompt, max_new_tokens=_NEW, policy=policy, do_sample=False, eos_token_id=[]).stats
        rounds = stats.seconds - stats.prefill_seconds
        shares.append(stats.preverify_seconds / rounds)
    return median(shares[1:])


def main(
    exit_layer: Annotated[int, typer.Option(help="Layers that draft.")],
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "llama2-7B",
    block: Annotated[int, typer.Option(min=1, help="Drafts per pass, b.")] = 4,
    drafts: Annotated[list[int] | None, typer.Option(help="Tokens per draft; repeatable.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Time it on --model.")] = False,
    model: Annotated[str, typer.Option(help="Folder, hub name, synthetic:SHAPE.")] = str(DEMO_PATH),
    dtype: str = "auto",
    device: str = "auto",
) -> None:
    """Print Pacer's share of a round for some lengths of draft."""
    with one_line_errors():
        lengths = drafts or [4, 8, 16, 32]
        if measure:
            generator = SelfSpecGenerator(open_model(model, dtype, device))
            shares = [share_of_time(generator, exit_layer, block, count) for count in lengths]
        else:
            config = LlamaConfig(**SHAPES[shape])
            shares = [share_of_bytes(config, exit_layer, block, count, _CONTEXT) for count in lengths]
    for count, value in zip(lengths, shares):
        typer.echo(f"{count} drafts in blocks of {block}: {100 * value:.2f} % of the {'time' if measure else 'bytes'}")


if __name__ == "__main__":
    typer.run(main)
