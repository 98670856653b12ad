"""`selfspec inspect --shape`: what a model of some shape holds, reads and sends on each of its processes, by arithmetic."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, PreTrainedConfig

from layerskip_models.checkpoints.loading import load_config
from layerskip_models.checkpoints.supported import DTYPES
from layerskip_models.checkpoints.synthetic import SHAPES
from layerskip_models.families import family_of
from layerskip_models.parallel.shard_size import largest_shard
from layerskip_models.training.training_config import OPTIMIZERS
from layerskip_models.training.training_size import training_size

_GIB, _MIB = 1 << 30, 1 << 20


def shape_config(shape: str) -> PreTrainedConfig:
    """The configuration of a name in `SHAPES`, or of a folder with a config.json. ValueError for any other name."""
    if shape in SHAPES:
        return LlamaConfig(**{name: dict(v) if isinstance(v, dict) else v for name, v in SHAPES[shape].items()})
    if not (Path(shape) / "config.json").is_file():
        raise ValueError(f"unknown shape {shape!r}: there are {', '.join(SHAPES)}, or give a folder with config.json")
    return load_config(shape, local_files_only=True)


def shape_lines(shape: str, ranks: int, dtype: str, device: str, context: int | None) -> list[str]:
    """The report's lines. dtype: "auto" is bfloat16. device: "auto" is a GPU, whether or not there is one here.

    context: tokens of the text whose KV cache is counted, None for the longest that the model takes.
    Raises ValueError for an unknown name, or for a number of ranks that the model cannot be divided by.
    """
    if dtype not in ("auto", *DTYPES):
        raise ValueError(f"--dtype must be one of auto, {', '.join(DTYPES)} with --shape, got {dtype!r}")
    config = shape_config(shape)
    place = torch.device("cpu" if device == "cpu" else "cuda")
    size = largest_shard(config, ranks, torch.bfloat16 if dtype == "auto" else DTYPES[dtype], place)
    tokens = family_of(config).max_positions(config) if context is None else context
    cache = size.kv_per_token * tokens
    where = "our kernels on a CPU" if place.type == "cpu" else "a GPU"
    head = f"the head {size.head / _GIB:.2f}"
    if size.draft_head:
        head += f", the drafts' head {size.draft_head / _GIB:.2f}"
    lines = [
        f"{shape}, {'bfloat16' if dtype == 'auto' else dtype}, on {where}, {ranks} process{'es' if ranks > 1 else ''}; "
        "of the one that holds most:",
        f"weights     {size.weights / _GIB:8.2f} GiB: layers {size.layers / _GIB:.2f}, {head}, "
        f"the embedding {size.embedding / _GIB:.2f}",
        f"KV cache    {cache / _GIB:8.2f} GiB for {tokens} tokens ({size.kv_per_token / 1024:.0f} KiB each)",
        f"together    {(size.weights + cache) / _GIB:8.2f} GiB",
        f"read        {size.read_per_pass / _GIB:8.2f} GiB of weights for each plain token",
    ]
    if ranks > 1:
        lines.append(
            f"sent        {size.sent_per_row / _MIB:8.2f} MiB for each row of a pass, in {size.sums_per_pass} sums over "
            "processes"
        )
    return lines


def training_lines(
    shape: str, ranks: int, dtype: str, context: int | None, micro_batch_tokens: int, optimizer: str
) -> list[str]:
    """The report's lines for `selfspec train --shard` in this many processes. dtype: "auto" is bfloat16.

    context: tokens of a sequence, None for one sequence a micro batch. Raises ValueError for an unknown name.
    """
    precisions = {"auto": "bf16", "bfloat16": "bf16", "float32": "fp32"}
    if dtype not in precisions:
        raise ValueError(f"--dtype must be one of {', '.join(precisions)} with --train, got {dtype!r}")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"--optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    size = training_size(
        shape_config(shape),
        ranks,
        optimizer=optimizer,
        precision=precisions[dtype],
        micro_batch_tokens=micro_batch_tokens,
        sequence_length=micro_batch_tokens if context is None else context,
    )
    lines = [
        f"{shape}, trained with --precision {precisions[dtype]} --optimizer {optimizer} --shard in {ranks} "
        f"process{'es' if ranks > 1 else ''}; of each:",
        f"weights     {size.weights / _GIB:8.2f} GiB, its share in float32",
        f"gradients   {size.gradients / _GIB:8.2f} GiB",
        f"optimiser   {size.optimizer_state / _GIB:8.2f} GiB",
        f"gathered    {size.gathered / _GIB:8.2f} GiB at the most: the head {size.head / _GIB:.2f} and its gradients "
        f"{size.head_gradients / _GIB:.2f}, then layers {size.layers / _GIB:.2f}",
        f"activations {size.activations / _GIB:8.2f} GiB for a micro batch of {micro_batch_tokens} tokens",
        f"logits      {size.logits / _GIB:8.2f} GiB for a chunk of rows, with their gradients",
        f"together    {size.together / _GIB:8.2f} GiB",
    ]
    if ranks > 1:
        weights, gradients = size.sent(size.gathered_per_pass), size.sent(size.reduced_per_pass)
        step = size.sent(size.exchanged_per_step)
        lines.append(
            f"sent        {(weights + gradients) / _GIB:8.2f} GiB for each micro batch: weights {weights / _GIB:.2f}, "
            f"gradients {gradients / _GIB:.2f}" + (f"; for each step {step / _GIB:.2f}" if step else "")
        )
    return lines
