"""What it costs a model to cut its rows into parts, as our kernels do before they meet bytes or a matrix unit.

    python -m bench.experiments.row_parts.row_parts --text articles.txt --text novels.txt

Every linear of the model gets its inputs as the digits or parts would add up to them; the rest is float32. Compared with the
same weights in float64. Without --text: the shipped prompts. docs/kernels.md has what came of it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.datasets import load_prompts
from layerskip_models import DEMO_PATH

Cut = Callable[[Tensor], Tensor]
PIECE, PIECES = 2000, 8  # characters of a text, and texts of a file


def digits(count: int) -> Cut:
    """Fixed-point numbers of so many bytes, the largest number of a row in the highest one."""

    def cut(x: Tensor) -> Tensor:
        largest = x.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
        unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent + 1 - 8 * count)
        return (x / unit).round() * unit

    return cut


def parts(count: int) -> Cut:
    """So many bfloat16 numbers that add up to nearly x."""

    def cut(x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for _ in range(count):
            total = total + (x - total).bfloat16().float()
        return total

    return cut


WAYS: dict[str, dict[str, Cut | None]] = {
    "int8": {"float32": None} | {f"{n} digits": digits(n) for n in (1, 2, 3)},
    "bfloat16": {"float32": None} | {f"{n} parts": parts(n) for n in (1, 2, 3)},
}


def rounded(weight: Tensor, kind: str) -> Tensor:
    """The weight as it would be kept, in float32."""
    if kind == "bfloat16":
        return weight.bfloat16().float()
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round() * scale


@torch.inference_mode()
def main(
    model: Annotated[str, typer.Option(help="Folder or hub name of a transformers model.")] = str(DEMO_PATH),
    text: Annotated[
        list[Path] | None, typer.Option(help="Plain text; repeatable. Default: the shipped prompts.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Of each text.")] = 256,
) -> None:
    """Print, for each way to cut rows, the largest difference of a logit, the KL divergence and the agreement."""
    subject = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    if text:
        whole = [path.read_text(encoding="utf-8") for path in text]
        texts = [part[at : at + PIECE] for part in whole for at in range(0, min(len(part), PIECE * PIECES), PIECE)]
    else:
        texts = [prompt.prompt for prompt in load_prompts()]
    inputs = [tokenizer(each, return_tensors="pt").input_ids[:, :tokens] for each in texts]
    linears = [module for module in subject.modules() if isinstance(module, nn.Linear)]
    whole_weights = [linear.weight.clone() for linear in linears]
    chosen: list[Cut | None] = [None]
    peaks: list[Tensor] = []

    def before(_: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor] | None:
        x = arguments[0]
        peaks.append((x.abs().amax(-1) / x.square().mean(-1).sqrt()).max())
        return None if chosen[0] is None else (chosen[0](x),)

    for linear in linears:
        linear.register_forward_pre_hook(before)
    for kind, ways in WAYS.items():
        for linear, weight in zip(linears, whole_weights):
            linear.weight.copy_(rounded(weight, kind))
        chosen[0] = None
        subject.double()
        exact = [subject(ids).logits[0].log_softmax(-1) for ids in inputs]
        subject.float()
        for name, cut in ways.items():
            chosen[0] = cut
            found = [subject(ids).logits[0].double().log_softmax(-1) for ids in inputs]
            largest = max((a - b).abs().max().item() for a, b in zip(found, exact))
            divergence = torch.cat([(b.exp() * (b - a)).sum(-1) for a, b in zip(found, exact)]).mean().item()
            same = torch.cat([a.argmax(-1) == b.argmax(-1) for a, b in zip(found, exact)]).double().mean().item()
            typer.echo(f"{kind:9} {name:9} logits {largest:.1e}  KL {divergence:.1e}  same token {same:.2%}")
    typer.echo(f"largest number of a row: up to {max(peaks):.0f} times its root mean square")


if __name__ == "__main__":
    typer.run(main)
