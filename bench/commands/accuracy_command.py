"""`selfspec-bench accuracy`: what rounding rows, or keys and values, costs a model on a text."""

from __future__ import annotations

import gzip
from contextlib import ExitStack
from pathlib import Path

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

_HEAD_ROWS = 64  # rows whose logits are in memory at a time, of each setting
_LONGEST = 16  # characters of a token on the average


def accuracy(options: AccuracyCommand) -> None:
    with one_line_errors():
        text = _text(options.text)[: _LONGEST * options.tokens]
        ids = open_tokenizer(options.model)(text, verbose=False)["input_ids"][: options.tokens]
        pieces = [*torch.tensor(ids, dtype=torch.long).split(options.context)]
        model = open_model(options.model, options.dtype, "cpu")
        exact = model.with_rows(16)
    reference = exact.with_backend(exact.operators, exact.layer_devices, exact.head_device)
    settings = {f"rows in {rows} bits": model.with_rows(rows) for rows in (16, 8) if rows in (16, *model.row_bits.values())}
    settings["rows in 16 bits, keys and values in bfloat16"] = exact.with_kv_dtype("bfloat16")
    found = torch.zeros(1 + len(settings), 3, dtype=torch.float64)
    with progress(len(pieces)) as advance:
        for piece in pieces:
            found += _compare(reference, [*settings.values()], piece)
            advance("reading")
    count = sum(len(piece) - 1 for piece in pieces)
    typer.echo(f"{count} tokens in pieces of {options.context}; weights in {[*model.row_bits]} bits, {model.kernels}")
    typer.echo("| setting | perplexity | KL, nats | same likeliest token |\n|---|--:|--:|--:|")
    for name, (loss, kl, same) in zip(("rows in float32", *settings), (found / count).tolist()):
        typer.echo(f"| {name} | {torch.tensor(loss).exp():.3f} | {kl:.2g} | {same:.2%} |")


def _text(path: Path) -> str:
    return gzip.open(path, "rt").read() if path.suffix == ".gz" else path.read_text()


@torch.inference_mode()
def _compare(reference: LayerSkipModel, models: list[LayerSkipModel], ids: Tensor) -> Tensor:
    """Sum over a piece: loss, KL(reference || model), and likeliest tokens that are the same; [1 + models, 3]."""
    hidden = []
    for model in (reference, *models):
        model.prepare(len(ids))
        with ExitStack() as held:
            if model is reference:
                held.enter_context(operators_only())
            hidden.append(prefill(model, ids, KVCache(model, len(ids)), most=len(ids)))
    sums = torch.zeros(len(hidden), 3, dtype=torch.float64)
    for first in range(0, len(ids) - 1, _HEAD_ROWS):
        following = ids[first + 1 : first + 1 + _HEAD_ROWS]
        with operators_only():
            p = reference.logits(hidden[0][first : first + len(following)]).log_softmax(-1)
        for index, model in enumerate((reference, *models)):
            q = p if not index else model.logits(hidden[index][first : first + len(following)]).log_softmax(-1)
            sums[index, 0] -= q.gather(1, following.unsqueeze(1)).double().sum()
            sums[index, 1] += (p.exp() * (p - q)).sum(dtype=torch.float64)
            sums[index, 2] += (p.argmax(-1) == q.argmax(-1)).sum()
    return sums
