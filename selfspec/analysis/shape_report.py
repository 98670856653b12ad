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

_GIB, _MIB = 1 << 30, 1 << 20


def shape_config(shape: str) -> PreTrainedConfig:
    """Of a name out of `SHAPES`, or of a folder with a config.json. ValueError for another name."""
    if shape in SHAPES:
        return LlamaConfig(**{name: dict(v) if isinstance(v, dict) else v for name, v in SHAPES[shape].items()})
    if not (Path(shape) / "config.json").is_file():
        raise ValueError(f"unknown shape {shape!r}: there are {', '.join(SHAPES)}, or give a folder with config.json")
    return load_config(shape, local_files_only=True)


def shape_lines(shape: str, ranks: int, dtype: str, device: str, context: int | None) -> list[str]:
    """What to print. dtype: "auto" is bfloat16. device: "auto" is a GPU, whether or not there is one here.

    context: tokens of the text whose KV cache is counted, None for the longest that the model takes.
    Raises ValueError for what there is not, or for a number of ranks that the model cannot be divided by.
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
