"""`selfspec-bench accuracy`: what rounding rows, or keys and values, costs a model on a text."""

from __future__ import annotations

import gzip
from contextlib import nullcontext
from math import exp

import torch
import typer
from torch import Tensor

from bench.commands.bench_options import AccuracyCommand
from bench.commands.session import progress
from bench.models import open_model, open_tokenizer
from layerskip_models import LayerSkipModel
from layerskip_models.kernels.native_linear import operators_only
from layerskip_models.kv_cache import KVCache
from layerskip_models.prefill import prefill
from selfspec.cli.console import one_line_errors

_HEAD_ROWS = 64  # rows whose logits are in memory at a time
_LONGEST = 16  # characters of a token: text beyond the tokens asked for need not be cut into tokens


def accuracy(options: AccuracyCommand) -> None:
    with one_line_errors():
        stored = options.text.read_bytes()
        text = (gzip.decompress(stored) if options.text.suffix == ".gz" else stored).decode()
        tokens = open_tokenizer(options.model)(text[: _LONGEST * options.tokens], verbose=False)["input_ids"]
        pieces = torch.tensor(tokens[: options.tokens], dtype=torch.long).split(options.context)
        model = open_model(options.model, options.dtype, "cpu")
        exact = model.with_rows(16)
    models = {
        "rows in float32": exact.with_backend(exact.operators, exact.layer_devices, exact.head_device),
        "rows in 16 bits": exact,
        **({"rows in 8 bits": model} if 8 in model.row_bits.values() else {}),
        "rows in 16 bits, keys and values in bfloat16": exact.with_kv_dtype("bfloat16"),
    }
    found = torch.zeros(len(models), 3, dtype=torch.float64)
    with progress(len(pieces)) as advance:
        for piece in pieces:
            found += _compare([*models.values()], piece)
            advance("reading")
    found /= sum(len(piece) - 1 for piece in pieces)
    typer.echo("| setting | perplexity | KL, nats | same likeliest token |\n|---|--:|--:|--:|")
    for name, (loss, kl, same) in zip(models, found.tolist()):
        typer.echo(f"| {name} | {exp(loss):.3f} | {kl:.2g} | {same:.2%} |")


@torch.inference_mode()
def _compare(models: list[LayerSkipModel], ids: Tensor) -> Tensor:
    """Sum over a text, int64 [n]: loss, KL(first || model), and how often the likeliest token is the first's; [models, 3]."""
    hidden, sums = [], torch.zeros(len(models), 3, dtype=torch.float64)
    for index, model in enumerate(models):
        model.prepare(len(ids))
        with nullcontext() if index else operators_only():
            hidden.append(prefill(model, ids, KVCache(model, len(ids)), most=len(ids)))
    for first in range(0, len(ids) - 1, _HEAD_ROWS):
        following = ids[first + 1 : first + 1 + _HEAD_ROWS]
        rows = slice(first, first + len(following))
        for index, model in enumerate(models):
            with nullcontext() if index else operators_only():
                q = model.logits(hidden[index][rows]).log_softmax(-1)
            if not index:
                p = q
            sums[index, 0] -= q.gather(1, following.unsqueeze(1)).double().sum()
            sums[index, 1] += (p.exp() * (p - q)).sum(dtype=torch.float64)
            sums[index, 2] += (p.argmax(-1) == q.argmax(-1)).sum()
    return sums
